"""The exception tree, its documentation, and its way over HTTP and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from any_agent import errors
from any_agent.errors import AnyAgentError, from_response


def tree(
    kind: type[AnyAgentError] = AnyAgentError, depth: int = 0
) -> Iterator[tuple[int, type[AnyAgentError]]]:
    yield depth, kind
    for child in kind.__subclasses__():
        # Other modules have subclasses for themselves, which nobody outside sees.
        if child.__module__ == errors.__name__:
            yield from tree(child, depth + 1)


KINDS: list[type[AnyAgentError]] = [kind for _, kind in tree()]


def test_the_docstring_shows_the_tree_of_errors() -> None:
    assert errors.__doc__ is not None
    documented = {}
    for line in errors.__doc__.splitlines():
        found = re.match(r"([│├└─ ]*)(\w+)\s+(\d{3}) (\w+)", line)
        if found:
            documented[found[2]] = (len(found[1]) // 4, int(found[3]), found[4])
    actual = {k.__name__: (depth, k.status, k.default_code) for depth, k in tree()}
    assert documented == actual


def test_codes_are_distinct() -> None:
    codes = [kind.default_code for kind in KINDS]
    assert len(codes) == len(set(codes))


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_comes_back_as_its_class(kind: type[AnyAgentError]) -> None:
    error = kind("do this", param="p", retry_after=3)
    body = json.dumps(error.body()).encode()
    back = from_response(error.status, body, error.headers().get("Retry-After"))
    assert type(back) is kind
    assert (back.message, back.code, back.param) == ("do this", kind.default_code, "p")
    assert back.retry_after == 3
    assert "x-should-retry" in kind("x").headers() or kind.retryable


def every(kind: type[AnyAgentError] = AnyAgentError) -> Iterator[type[AnyAgentError]]:
    """Also those that other modules have for themselves."""
    yield kind
    for child in kind.__subclasses__():
        yield from every(child)


@pytest.mark.parametrize("wait", [None, 0, 0.01, 1.2, 59.0])
def test_who_is_turned_away_is_told_when_to_come_again(wait: float | None) -> None:
    for kind in every():
        headers = kind("busy", retry_after=wait).headers()
        if kind.status in (429, 503, 507):
            assert kind.retryable
            assert int(headers["Retry-After"]) >= max(1.0, wait or 0.0)
        elif wait is None:
            assert not kind.retryable and headers.pop("x-should-retry") == "false"
            assert headers.keys() <= {"Accept-Encoding"}


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (400, b'{"error": {"message": "m", "code": "some_new_code"}}', errors.InvalidRequest),
        (409, b'{"error": {"message": "m", "code": "group_closed"}}', errors.Conflict),
        (410, b"gone", errors.SessionClosed),
        (429, b"<html>slow down</html>", errors.TooManyRequests),
        (500, b"Internal Server Error", AnyAgentError),
        (502, b"<html>bad gateway</html>", errors.ServiceUnavailable),
        (503, b"", errors.EngineUnavailable),
        (504, b"\xff", errors.ServiceUnavailable),
        (418, b"teapot", AnyAgentError),
        (400, b'{"error": "text"}', errors.InvalidRequest),
        (400, b"[]", errors.InvalidRequest),
    ],
)
def test_an_answer_of_another_server_becomes_an_error_by_its_status(
    status: int, content: bytes, kind: type[AnyAgentError]
) -> None:
    for after in ("soon", "", "-1", "\u00b2"):
        error = from_response(status, content, after)
        assert type(error) is kind
        assert error.retry_after is None
