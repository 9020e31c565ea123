"""Commands that ask a running service under an operator's or a tenant's key."""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from any_agent.errors import Forbidden, Unauthenticated
from any_agent.keys import OPERATOR_KEYS, SESSION_KEYS, operator_key
from any_agent.runtime.command_line import option

if TYPE_CHECKING:
    from any_agent.client.rl_client import RLClient

DEFAULT_URL = "http://127.0.0.1:8000"
_URL_FROM = "ANY_AGENT_URL"
"""The only variable that names the service here: an operator's key must not reach what
OPENAI_BASE_URL names, which may be another provider."""
PATIENCE = 2.0
"""Seconds of retries while the service does not answer."""
_TIMEOUT = 15.0  # seconds that one answer may take
KEY_HELP = (
    f"Give it with --key, or in the environment variable {', '.join(OPERATOR_KEYS[:-1])} or "
    f"{OPERATOR_KEYS[-1]} (the last only if it holds a key of any-agent)."
)
_REMEDY = (
    f"give one with --key or in {OPERATOR_KEYS[0]} (an operator's: any-agent keys create --scope "
    "admin)"
)

_REASONS = {
    "zero_variance": "zero_variance: taught nothing, its group scored alike",
    "group_too_small": "group_too_small: its group had too few members",
    "untrainable": "untrainable: none of its calls can be trained on",
    "stale": "stale: all of its tokens were too old",
    "truncated": "truncated: all of its outputs were cut off (train.mask_truncated)",
    "too_long": "too_long: one of its rows is above train.max_row_tokens or the model's context",
    "unusable": "unusable: the trainer cannot compute it; its log says why",
}
"""Reasons that the trainer gives, with what they mean."""


def add_client_arguments(parser: argparse.ArgumentParser, holder: str) -> None:
    """Add ``--url`` and ``--key``; ``holder``: whose key it must be."""
    parser.set_defaults(tenants_key="tenant" in holder)
    option(parser, "--url URL", f"the service (default: {_URL_FROM}, else {DEFAULT_URL})")
    option(parser, "--key KEY", f"{holder} key; safer in the environment")


def with_client(arguments: argparse.Namespace, act: Callable[[RLClient], Awaitable[int]]) -> int:
    """Run an action with a client of the service that the arguments name; return its exit code.

    Raises AnyAgentError; a refused key's error says where the key came from.
    """
    import asyncio

    from any_agent.client.rl_client import RLClient

    key, key_from = operator_key(arguments.key)
    arguments.url = _url(arguments.url)

    async def run() -> int:
        client = RLClient(arguments.url, admin_key=key, timeout=_TIMEOUT, retry_for=PATIENCE)
        async with client:
            return await act(client)

    try:
        return asyncio.run(run())
    except (Unauthenticated, Forbidden) as error:
        used = "no key was given" if key is None else f"the key came from {key_from}"
        also = f" or {SESSION_KEYS[0]} (a tenant's)" if arguments.tenants_key else ""
        error.message += f" ({used}); {_REMEDY}{also}"
        raise


def _url(given: str | None) -> str:
    """Return the address of the option, the variable or the default; ConfigError if it is none."""
    from any_agent.client.environment import is_placeholder
    from any_agent.client.service_url import checked_url, names_file

    found, named_by = given, "--url"
    if not found:
        found, named_by = os.environ.get(_URL_FROM, "").strip(), _URL_FROM
    if not found or is_placeholder(found):
        return DEFAULT_URL
    return found if names_file(found) else checked_url(found, named_by)


def reason_text(reason: str | None) -> str:
    """Return the reason for a session's state in words, "" without any."""
    return _REASONS.get(reason, reason) if reason else ""
