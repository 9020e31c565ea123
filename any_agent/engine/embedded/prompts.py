"""Prompts whose key/value states are there, so that an equal one is not computed again."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TypeAlias

from torch import Tensor

from any_agent.engine.embedded.kv_cache import KVCache, PromptStates
from any_agent.engine.embedded.request import EngineRequest

_Key: TypeAlias = tuple[str | None, tuple[int, ...]]
"""An adapter and a prompt's ids: another adapter has other states for the same ids."""
MAX_KEPT_TOKENS = 2048


@dataclass(slots=True)
class _Prompt:
    logits: Tensor
    """The logits after the prompt's last token, [vocabulary]."""
    holders: list[EngineRequest] = field(default_factory=list)
    """The running requests with this prompt."""
    states: PromptStates | None = None
    """A copy of its states, while no request runs."""


class KnownPrompts:
    """The distinct prompts that the current weights computed.

    The requests of a group have one prompt: the first is computed, and the others get a copy of its
    states, also when its last request has ended, until newer prompts need the room. Requests of
    another adapter share nothing with them. They are forgotten with the weights.
    """

    def __init__(self, cache: KVCache) -> None:
        self._cache = cache
        self._prompts: dict[_Key, _Prompt] = {}
        self._kept: OrderedDict[_Key, None] = OrderedDict()
        """The prompts without a running request, the oldest first."""

    def unknown(self, requests: list[EngineRequest]) -> list[EngineRequest]:
        """Return the first request of each prompt that is not known."""
        first: dict[_Key, EngineRequest] = {}
        for request in requests:
            key = request.prompt
            if key not in self._prompts:
                first.setdefault(key, request)
        return list(first.values())

    def add(self, request: EngineRequest, logits: Tensor) -> None:
        """Add a request whose prompt was computed, with the logits after its last token."""
        self._prompts[request.prompt] = _Prompt(logits, [request])

    def copy(self, request: EngineRequest, running: list[EngineRequest]) -> None:
        """Activate a row with the states of a request's prompt, which is known."""
        key, length = request.prompt, len(request.input_ids)
        prompt = self._prompts[key]
        states = prompt.states
        if states is None:
            states = self._cache.prompt_states(running.index(prompt.holders[0]), length)
        else:
            prompt.states = None
            del self._kept[key]
        self._cache.add_prompt(states, length)
        prompt.holders.append(request)
        request.cached_tokens = length

    def logits_of(self, request: EngineRequest) -> Tensor:
        return self._prompts[request.prompt].logits

    def release(self, request: EngineRequest, row: int) -> None:
        """Take away a request that ended, before its row is dropped."""
        key, length = request.prompt, len(request.input_ids)
        prompt = self._prompts.get(key)
        if prompt is None or request not in prompt.holders:
            return  # it was computed by earlier weights
        prompt.holders.remove(request)
        if prompt.holders:
            return
        if length > MAX_KEPT_TOKENS or (request.finish and request.finish.error):
            del self._prompts[key]
            return
        states = self._cache.prompt_states(row, length)
        prompt.states = [(keys.clone(), values.clone()) for keys, values in states]
        self._kept[key] = None
        while sum(len(ids) for _, ids in self._kept) > MAX_KEPT_TOKENS:
            del self._prompts[self._kept.popitem(last=False)[0]]

    def clear(self, adapter: str | None = None) -> None:
        """Forget the prompts of one adapter; None: all, since all lie on the model."""
        for key in [key for key in self._prompts if adapter in (None, key[0])]:
            del self._prompts[key]
            self._kept.pop(key, None)
