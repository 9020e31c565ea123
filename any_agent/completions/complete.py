"""From a checked chat call to a completion and the interaction that records it."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from any_agent.chat import ChatFormat, MessageDelta, ParsedMessage, chain_keys
from any_agent.completions.params import ChatCall
from any_agent.completions.prompt import find_prompt
from any_agent.engine import InferenceEngine
from any_agent.errors import ContextLengthExceeded, EngineUnavailable, VersionGone
from any_agent.record import InteractionTree, lacks_texts
from any_agent.types import (
    Continuation,
    GenerationHyperparameters,
    IdArray,
    Interaction,
    Message,
    ModelRequest,
    id_array,
    logprob_array,
)

VERSION_GONE = "version_gone"
"""Why a call is untrainable that a weight update cut off in a session pinned to one version."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call whose prompt is rendered and fits: nothing about the request can fail any more."""

    id: str
    call: ChatCall
    prompt_ids: IdArray
    prompt_delta_ids: IdArray
    message_delta: list[Message]
    parent_id: str | None
    continuation: Continuation
    branch_reason: str | None
    gconfig: GenerationHyperparameters
    key: bytes
    """Chain key over the request's messages and tools."""
    created_at: float


@dataclass(frozen=True, slots=True)
class Delta:
    """Newly certain text, and the tokens sampled since the last delta."""

    message: MessageDelta
    output_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of a call: the answer, and what is to be recorded."""

    prepared: Prepared
    parsed: ParsedMessage
    interaction: Interaction
    key: bytes
    """Chain key under which a continuation finds the interaction."""


Completed = Delta | Completion


class Completer:
    """Turns chat calls into completions of one engine with one chat format."""

    def __init__(
        self,
        engine: InferenceEngine,
        chat: ChatFormat,
        *,
        context_length: int,
        keeps_cache: bool = False,
    ) -> None:
        """``keeps_cache``: weight updates keep the cache of calls under way (`in_place`)."""
        self.engine = engine
        self.chat = chat
        self.context_length = context_length
        self._keeps_cache = keeps_cache

    def prepare(self, call: ChatCall, tree: InteractionTree | None) -> Prepared:
        """Find the parent in the tree, continue its ids exactly or render anew.

        Raises TemplateError, ContextLengthExceeded or InvalidRequest; nothing is recorded.
        """
        prompt = find_prompt(call, tree, self.chat, context_length=self.context_length)
        room = self.context_length - len(prompt.ids)
        if room < 1:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.context_length} tokens, but the "
                f"messages are {len(prompt.ids)} tokens long; shorten them",
                param="messages",
            )
        gconfig = call.gconfig
        stop_ids = {*gconfig.stop_token_ids, *self.chat.stop_token_ids}
        return Prepared(
            id=f"chatcmpl-{uuid.uuid4().hex}",
            call=call,
            prompt_ids=prompt.ids,
            # A copy: a view would keep the whole prompt in memory.
            prompt_delta_ids=prompt.ids[prompt.inherited :].copy(),
            message_delta=call.messages[prompt.covered :],
            parent_id=prompt.parent_id,
            continuation=prompt.continuation,
            branch_reason=prompt.branch_reason,
            gconfig=gconfig.new(
                max_new_tokens=min(gconfig.max_new_tokens, room),
                stop_token_ids=tuple(sorted(stop_ids)),
            ),
            key=prompt.key,
            created_at=time.time(),
        )

    async def run(
        self, prepared: Prepared, *, session_id: str, stream: bool, pinned: int | None = None
    ) -> AsyncGenerator[Completed]:
        """Deltas as they become certain (when streaming), then the Completion.

        Closing the generator cancels the call in the engine; nothing is recorded then. ``pinned``:
        every token must be of this weight version. VersionGone if none is; if some are, the
        Completion is cut off where they end, aborted and untrainable (:data:`VERSION_GONE`).
        """
        call = prepared.call
        parser = self.chat.stream_parser(
            prompt_ids=prepared.prompt_ids, tools=call.tools, stop=prepared.gconfig.stop
        )
        request = ModelRequest(prepared.id, prepared.prompt_ids, prepared.gconfig)
        ids: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        async with aclosing(self.engine.generate(request, stream=stream)) as chunks:
            async for chunk in chunks:
                ids += chunk.output_ids
                logprobs += chunk.logprobs
                versions += chunk.versions
                deltas = parser.feed(chunk.output_ids)
                if pinned is not None and any(v != pinned for v in chunk.versions):
                    if versions[0] != pinned:
                        raise VersionGone.of(pinned, versions[0])
                    cut = parser.finish(matched_stop=None)[1]
                    yield self._completion(
                        prepared, cut, "abort", session_id, ids, logprobs, versions, VERSION_GONE
                    )
                    return
                parsed = None
                if chunk.stop_reason is not None:
                    matched = chunk.matched_stop if isinstance(chunk.matched_stop, str) else None
                    rest, parsed = parser.finish(matched_stop=matched)
                    deltas += rest
                if stream:
                    fresh = (chunk.output_ids, chunk.logprobs)
                    for delta in deltas or [MessageDelta()]:
                        yield Delta(delta, *fresh)
                        fresh = ([], [])
                if parsed is not None:
                    reason = chunk.stop_reason or "stop"
                    yield self._completion(
                        prepared, parsed, reason, session_id, ids, logprobs, versions
                    )
                    return
        raise EngineUnavailable("the engine ended without an end", retry_after=2)

    def said_again(self, call: ChatCall, tree: InteractionTree, id: str) -> Interaction:
        """A recorded answer to the same call; its texts, if they were not kept, by its ids."""
        interaction = tree[id]
        if not lacks_texts(interaction):
            return interaction
        parser = self.chat.stream_parser(
            prompt_ids=tree.prompt_ids(id).tolist(), tools=call.tools, stop=call.gconfig.stop
        )
        parser.feed(interaction.output_ids.tolist())
        parsed = parser.finish(matched_stop=None)[1]
        return replace(interaction, output_message=parsed.to_message())

    def _completion(
        self,
        prepared: Prepared,
        parsed: ParsedMessage,
        stop_reason: str,
        session_id: str,
        ids: list[int],
        logprobs: list[float],
        versions: list[int],
        untrainable: str | None = None,
    ) -> Completion:
        message = parsed.to_message()
        call = prepared.call
        finish = "tool_calls" if parsed.tool_calls and stop_reason == "stop" else stop_reason
        interaction = Interaction(
            id=prepared.id,
            session_id=session_id,
            parent_id=prepared.parent_id,
            prompt_delta_ids=id_array(prepared.prompt_delta_ids),
            output_ids=id_array(ids),
            output_logprobs=logprob_array(logprobs),
            output_versions=id_array(versions),
            message_delta=prepared.message_delta,
            output_message=message,
            finish_reason=finish,
            gconfig=prepared.gconfig,
            model=call.model,
            tools=None if prepared.parent_id else call.tools,
            continuation=prepared.continuation,
            branch_reason=prepared.branch_reason,
            untrainable_reason=untrainable or _untrainable(prepared.gconfig, ids),
            request={
                "overridden": call.overrides,
                "recorded": call.recorded,
                "mixed_cache": self._keeps_cache and len(set(versions)) > 1,
            },
            created_at=prepared.created_at,
        )
        (key,) = chain_keys([message], call.tools, start=prepared.key)
        return Completion(prepared, parsed, interaction, key)


def _untrainable(gconfig: GenerationHyperparameters, ids: list[int]) -> str | None:
    if not ids:
        return "no tokens were sampled"
    if gconfig.temperature == 0 or gconfig.top_p != 1 or gconfig.top_k > 0:
        return "sampled from a truncated distribution"
    return None
