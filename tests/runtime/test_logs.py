from __future__ import annotations

import importlib
import json
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

import pytest

from any_agent.config import load_config
from any_agent.keys import KEPT_SCOPES, KeySigner, new_key
from any_agent.runtime.logs import FloodFilter, LogFormat, Redactor, set_up_logging

ADMIN = r'p@ss\w"ord/%20+'
"""Nothing that looks like a key, and different in each way of writing it down."""
FORMATS: tuple[LogFormat, ...] = ("text", "json")


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    hooks = sys.excepthook, threading.excepthook
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    sys.excepthook, threading.excepthook = hooks
    logging.captureWarnings(False)


@pytest.fixture(params=["session", "run", *KEPT_SCOPES])
def key(request: pytest.FixtureRequest) -> str:
    """A key of each form."""
    signer = KeySigner(bytes(32))
    others = {"session": signer.mint(0)[1], "run": signer.run_key}
    return others.get(request.param) or new_key(request.param)[0]


def written(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


@pytest.mark.parametrize("log_format", FORMATS)
def test_keys_are_cut_wherever_they_come_from(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat, key: str
) -> None:
    set_up_logging("info", log_format)
    log = logging.getLogger("anything")
    log.info("GET /%s/v1/models and sk-1234567890abcdef", key)
    log.info("one %s", "more", extra={"key": key, "nested": {key: [(key, object(), b"sk-")]}})
    log.info("escaped %s", key.replace(".", "%2E"))
    try:
        raise ValueError(f"what about {key}?")
    except ValueError:
        log.exception("it failed", stack_info=True)
    log.debug("not shown")
    text = capsys.readouterr().err
    assert text.count("sk-***") >= 7
    assert key not in text
    assert key.rpartition(".")[2] not in text
    assert "1234567890abcdef" not in text
    assert "ValueError: what about sk-***" in text
    assert "not shown" not in text


@pytest.mark.parametrize("log_format", FORMATS)
def test_given_secrets_are_cut_in_every_form(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat
) -> None:
    set_up_logging("info", log_format, secrets=[ADMIN, "another-secret"])
    log = logging.getLogger("anything")
    log.info("plain %s, as repr %r, as JSON %s", ADMIN, ADMIN, json.dumps({"key": ADMIN}))
    log.info("in a URL: %s and another-secret", quote(ADMIN, safe=""))
    log.info("extra", extra={"headers": {"authorization": f"Bearer {ADMIN}"}, "raw": [ADMIN]})
    try:
        raise RuntimeError(ADMIN)
    except RuntimeError:
        log.exception("it failed")
    text = capsys.readouterr().err
    assert "another" not in text
    for piece in ("p@ss", "w%22ord", "ord/", "%2520"):
        assert piece not in text, piece
    assert text.count("***") >= 8
    redactor = Redactor(["secret", "secret-of-the-other"])
    assert redactor.text("secret-of-the-other secret") == "*** ***", "one within another"


@pytest.mark.parametrize("part", ["proxy_ext", "router", "trainer"])
def test_each_part_names_the_runs_secrets_to_its_log(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    class Enough(Exception):
        pass

    def told(*given: Any, secrets: Any = (), **more: Any) -> None:
        cut.extend(secrets)
        raise Enough

    cut: list[str] = []
    module = importlib.import_module(f"{part}.__main__")
    config = load_config(environ={"ANY_AGENT_SERVER__ADMIN_KEY": ADMIN})
    monkeypatch.setattr(module, "load_resolved", lambda _: config)
    monkeypatch.setattr(module, "set_up_logging", told)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    more = ["--port", "0"] if part != "trainer" else []
    more += ["--engine-url", "http://x"] if part == "proxy_ext" else []
    arguments = [part, "--config", "run.yaml", "--host", "127.0.0.1", *more]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(Enough):
        module.main()
    assert ADMIN in cut


@pytest.mark.parametrize("log_format", FORMATS)
def test_a_message_that_cannot_be_formatted_tells_no_secret(
    capsys: pytest.CaptureFixture[str], log_format: LogFormat, key: str
) -> None:
    set_up_logging("info", log_format, secrets=["the-admin-key"])
    logging.getLogger("anything").info("%d sessions of %s", key, "the-admin-key")
    text = capsys.readouterr().err
    assert "%d sessions of %s (with ('sk-***', '***'))" in text
    assert "Traceback" not in text


def test_json_log_lines_have_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json", part="rank-1")
    before = datetime.now(UTC)
    log = logging.getLogger("proxy_ext.calls.call_manager")
    log.warning("two\nlines of %s", "text", extra={"session": "ses-0-1", "pid": "not mine"})
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("it failed")
    first, second = written(capsys)
    at = datetime.fromisoformat(first["time"])
    assert first["time"].endswith("Z") and len(first["time"]) == len("2026-01-01T00:00:00.000Z")
    assert abs((at - before).total_seconds()) < 60
    assert (first["level"], first["logger"]) == ("warning", "proxy_ext.calls.call_manager")
    assert (first["message"], first["part"]) == ("two\nlines of text", "rank-1")
    assert (first["session"], first["pid"]) == ("ses-0-1", logging.makeLogRecord({}).process)
    assert "exception" not in first
    assert second["message"] == "it failed"
    assert "Traceback" in second["exception"] and "ValueError: why" in second["exception"]


def test_extras_of_any_kind_become_json(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("info", "json")
    circle: list[Any] = []
    circle.append(circle)
    extra = {"number": 1.5, "nan": float("nan"), "none": None, "set": {1}, "circle": circle}
    logging.getLogger("anything").info("x", extra=extra)
    (line,) = written(capsys)
    assert (line["number"], line["nan"], line["none"], line["set"]) == (1.5, "nan", None, [1])
    assert "circle" in line


def test_uncaught_errors_and_warnings_are_log_lines(
    capsys: pytest.CaptureFixture[str], key: str
) -> None:
    set_up_logging("info", "json")
    error = ValueError(key)
    sys.excepthook(ValueError, error, None)
    thread = threading.Thread(target=_fail, args=(key,), name="worker")
    thread.start()
    thread.join()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn(f"beware of {key}", stacklevel=1)
    lines = written(capsys)
    assert [line["level"] for line in lines] == ["critical", "critical", "warning"]
    assert "ValueError: sk-***" in lines[0]["exception"]
    assert lines[1]["message"].endswith("thread worker")
    assert "beware of sk-***" in lines[2]["message"]


def _fail(key: str) -> None:
    raise RuntimeError(key)


def test_a_flood_of_lines_is_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("any_agent.runtime.logs.time.monotonic", lambda: now[0])
    log = logging.getLogger("tests.flood")
    flood = FloodFilter()
    log.addFilter(flood)
    try:
        for n in range(10_000):
            log.warning("malformed request %d", n)
        assert len(caplog.records) == 20
        log.error("a bug")
        now[0] = 2.5
        log.warning("malformed request")
        log.warning("malformed request")
    finally:
        log.removeFilter(flood)
    assert [record.getMessage() for record in caplog.records[20:]] == [
        "a bug",
        "malformed request (and 9980 such lines were left out)",
        "malformed request",
    ]
