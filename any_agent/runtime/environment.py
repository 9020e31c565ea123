"""This process's environment variables: some set inside a block, some kept from a child."""

from __future__ import annotations

import os
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def environment_with(values: Mapping[str, str]) -> Iterator[None]:
    """Set this process's variables inside the block; after it they are as before."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def environment_without(secrets: Container[str]) -> dict[str, str]:
    """Return this process's variables but for some, for a child that has no use for them."""
    # Other threads may remove some meanwhile.
    values = {name: os.environ.get(name) for name in list(os.environ) if name not in secrets}
    return {name: value for name, value in values.items() if value is not None}
