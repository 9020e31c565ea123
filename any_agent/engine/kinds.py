"""Kinds of inference engines: the registry that `engine.kind` names one of."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

from any_agent.engine.base import InferenceEngine, RemoteEngine
from any_agent.engine.model_fingerprint import ModelFingerprint
from any_agent.runtime.import_string import NamedRegistry

EngineOpener: TypeAlias = Callable[..., RemoteEngine]
"""Called with the engine's URL and :func:`open_engine`'s keyword arguments."""

_SGLANG = "any_agent.engine.sglang.client.SGLangEngine"
KINDS: NamedRegistry[EngineOpener] = NamedRegistry(
    # The embedded engine speaks SGLang's contract.
    "kind of engine",
    "engine.kind",
    embedded=_SGLANG,
    sglang=_SGLANG,
)


def register_engine(kind: str, opener: EngineOpener) -> EngineOpener:
    """Let `engine.kind` name ``opener`` in this process; ValueError for a name that is in use.

    Processes that the service starts know the built-in kinds and those that the setting `plugins`
    registers; `engine.kind` may also be an opener's dotted name, ``package.module.opener``.
    """
    return KINDS.register(kind, opener)


def split_adapter(url: str) -> tuple[str, str | None]:
    """Return the URL of an engine itself, and the name of its live adapter that ``url`` is of; None
    for the engine's own URL."""
    match = re.fullmatch(r"(.+)/adapters/([^/]+)/?", url)
    return (match[1], match[2]) if match else (url, None)


def open_engine(
    kind: str,
    url: str,
    *,
    decode: Callable[[Sequence[int]], str],
    shape: ModelFingerprint | None = None,
    update_mode: Literal["resume", "in_place"] = "resume",
    update_wait: float = 120.0,
    request_timeout: float = 600.0,
    key: str | None = None,
) -> RemoteEngine:
    """Make the client of an engine that runs at ``url``; nothing is sent yet.

    ``decode`` turns token ids into text; stop strings across a weight update need it. ``shape`` is
    that of the model that the engine should have. Calls wait at most ``update_wait`` seconds for a
    weight update, or for an engine that is away; ``request_timeout`` is in seconds without a byte.
    ``key`` is sent with every request. Raises ConfigError, with the known kinds, for another kind.
    """
    return KINDS.find(kind)(
        url,
        decode=decode,
        shape=shape,
        update_mode=update_mode,
        update_wait=update_wait,
        request_timeout=request_timeout,
        key=key,
    )


def load_engine_in_process(
    path: str,
    *,
    device: str = "cpu",
    dtype: str = "auto",
    context_length: int | None = None,
    weight_version: int = 0,
    adapters: Mapping[str, str] | None = None,
) -> InferenceEngine:
    """Load a checkpoint into an embedded engine of this process, an asynchronous context manager.

    ``adapters``: folders of LoRA adapters by the names that requests give as ``adapter``. Raises
    StartupError for a model that cannot be served, ConfigError for an adapter that does not fit.
    """
    from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions

    options = EngineOptions(
        device=device,
        dtype=dtype,
        context_length=context_length,
        weight_version=str(weight_version),
        adapters=adapters or {},
    )
    return EmbeddedEngine.load(path, options)
