from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from any_agent.keys import KeySigner
from any_agent.logs import set_up_logging


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def test_keys_are_cut_wherever_they_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info")
    _, key = KeySigner(bytes(32)).mint(0)
    log = logging.getLogger("anything")
    log.info("GET /%s/v1/models and sk-1234567890abcdef", key)
    try:
        raise ValueError(f"what about {key}?")
    except ValueError:
        log.exception("it failed")
    log.debug("not shown")
    written = capsys.readouterr().err
    assert "sk-***" in written
    assert key not in written
    assert key.split(".")[3] not in written
    assert "1234567890abcdef" not in written
    assert "ValueError: what about sk-***" in written
    assert "not shown" not in written
