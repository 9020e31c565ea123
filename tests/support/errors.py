"""Expect an error by its facts, not by its wording, which ``tests/golden/errors.txt`` has."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import pytest

E = TypeVar("E", bound=BaseException)


@contextmanager
def fails_with(
    kind: type[E] | tuple[type[E], ...], *names: object, **facts: object
) -> Iterator[pytest.ExceptionInfo[E]]:
    """Expect an error of this class that has these attributes, as ``param``, ``code``, ``status``.

    ``names`` must be in its message, literally: a setting, a file, a number that it must carry.
    """
    with pytest.raises(kind) as raised:
        yield raised
    message = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    missing = [name for name in map(str, names) if name not in message]
    assert not missing, f"the error does not name {missing}: {message}"
    found = {name: getattr(raised.value, name) for name in facts}
    assert found == facts, f"the error has other facts: {message}"
