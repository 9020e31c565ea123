"""Turns a checked call into sampled choices, each with the interaction that records it."""

from __future__ import annotations

import time
import uuid
from array import array
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from any_agent.chat import ChatFormat, MessageDelta, ParsedMessage, chain_keys
from any_agent.chat.output.stream_parser import StreamParser
from any_agent.completions.call_types import (
    Choice,
    Completed,
    Completion,
    Delta,
    Prepared,
    RequestRecord,
    choice_ids,
    recorded_of,
)
from any_agent.completions.legacy_prompt import digests, find_text_past, text_key, text_prompt_of
from any_agent.completions.logprobs import PackedTopLogprobs
from any_agent.completions.params.call import ChatCall
from any_agent.completions.params.sampling import choice_seed
from any_agent.completions.prompt import ParentMatch, Prompt, parent_of, prompt_of
from any_agent.completions.structured_output import forced_ids, grammar_of_answer, one_call_stops
from any_agent.completions.untrainable import OF_ADAPTER, untrainable_reason
from any_agent.engine import InferenceEngine
from any_agent.errors import (
    ContextLengthExceeded,
    EngineUnavailable,
    InvalidRequest,
    VersionGone,
)
from any_agent.record import InteractionTree, lacks_texts
from any_agent.types import (
    GenerationHyperparameters,
    IdArray,
    Interaction,
    Message,
    ModelRequest,
    id_array,
    logprob_array,
    runs_of,
)

VERSION_GONE = "version_gone"
"""The reason of a call that a weight update cut off in a session pinned to one version."""


@dataclass(frozen=True, slots=True)
class ContinuationPoint:
    """The recorded interactions that a call continues, before anything is rendered."""

    chat: ChatFormat
    """The chat format with the request's template arguments."""
    matches: tuple[ParentMatch, ...]
    """The match of a chat request, or those of a legacy completion's prompts."""

    @property
    def new_characters(self) -> int:
        """The size of the text to render and encode."""
        return sum(match.new_characters for match in self.matches)


class Completer:
    """Turns calls into completions of one engine with one chat format."""

    def __init__(
        self,
        engine: InferenceEngine,
        chat: ChatFormat,
        *,
        context_length: int,
        keeps_cache: bool = False,
        id_tag: str = "",
        adapters: Collection[str] = (),
    ) -> None:
        """``keeps_cache``: weight updates keep the cache of calls under way (`in_place`).
        ``id_tag``: the beginning of the hexadecimal part of ids. ``adapters``: the names of models
        that are adapters of the engine; every other name is the engine's model."""
        self.engine = engine
        self.chat = chat
        self.context_length = context_length
        self._keeps_cache = keeps_cache
        self._id_tag = id_tag
        self._adapters = frozenset(adapters)

    def find(self, call: ChatCall, tree: InteractionTree | None) -> ContinuationPoint:
        """Find what the call continues, at little cost; ContextLengthExceeded or InvalidRequest."""
        chat = self.format_of(call)
        longest = self.context_length
        if call.prompts:
            found = [find_text_past(given, tree, chat, longest) for given in call.prompts]
        else:
            found = [parent_of(call, tree, chat, context_length=longest)]
        return ContinuationPoint(chat, tuple(found))

    def prepare(
        self, call: ChatCall, tree: InteractionTree | None, past: ContinuationPoint | None = None
    ) -> Prepared:
        """Continue the parent's ids exactly, or render the messages anew; in any thread.

        Raises TemplateError, ContextLengthExceeded or InvalidRequest; nothing is recorded.
        """
        past = past or self.find(call, tree)
        id = f"{call.id_prefix}{self._id_tag}{uuid.uuid4().hex[len(self._id_tag) :]}"
        ids = choice_ids(id, call.n * max(1, len(call.prompts)))
        gconfig = self._sampling(call, past.chat)
        choices_of = self._text_choices if call.prompts else self._chat_choices
        choices = choices_of(call, past, tree, gconfig, ids)
        return Prepared(
            id=id,
            call=call,
            chat=past.chat,
            choices=choices,
            prompt_tokens=sum(len(choice.prompt.ids) for choice in choices[:: call.n]),
            created_at=time.time(),
        )

    def format_of(self, call: ChatCall) -> ChatFormat:
        """Return the chat format with the request's template arguments.

        InvalidRequest for unknown arguments, and for arguments that contradict each other.
        """
        kwargs = dict(call.template_kwargs)
        if call.reasoning_effort is not None:
            by_effort = self.chat.effort_kwargs(call.reasoning_effort)
            _require_agreement(call.reasoning_effort, by_effort, kwargs)
            kwargs = {**by_effort, **kwargs}
        return self.chat.variant(kwargs) if kwargs else self.chat

    def _sampling(self, call: ChatCall, chat: ChatFormat) -> GenerationHyperparameters:
        stop_ids = {*call.gconfig.stop_token_ids, *chat.stop_token_ids}
        if call.tools and not call.parallel_tool_calls:
            stop_ids |= set(one_call_stops(chat))
        elif call.tools and call.legacy_functions:
            # Where no token ends a call, the answer shows only its first one.
            stop_ids |= set(chat.one_call_stop_ids() or ())
        return call.gconfig.new(stop_token_ids=tuple(sorted(stop_ids)))

    def _chat_choices(
        self,
        call: ChatCall,
        past: ContinuationPoint,
        tree: InteractionTree | None,
        gconfig: GenerationHyperparameters,
        ids: list[str],
    ) -> tuple[Choice, ...]:
        prompt = prompt_of(call, past.matches[0], tree, past.chat)
        forced: tuple[int, ...] = ()
        if call.forced_call is not None:
            forced = forced_ids(past.chat, prompt, call.forced_call)
            prompt = replace(prompt, ids=np.concatenate([prompt.ids, id_array(forced)]))
        elif gconfig.grammar is not None:
            gconfig = gconfig.new(
                grammar=grammar_of_answer(past.chat, prompt, call, gconfig.grammar)
            )
        gconfig = self._fitting(gconfig, prompt, call)
        new = call.messages[prompt.covered :]
        return tuple(
            Choice(k, id, prompt, new, prompt.key, _with_seed(gconfig, k), forced)
            for k, id in enumerate(ids)
        )

    def _text_choices(
        self,
        call: ChatCall,
        past: ContinuationPoint,
        tree: InteractionTree | None,
        gconfig: GenerationHyperparameters,
        ids: list[str],
    ) -> tuple[Choice, ...]:
        choices: list[Choice] = []
        for given, match in zip(call.prompts, past.matches, strict=True):
            prompt = text_prompt_of(given, match, tree, past.chat)
            fitting = self._fitting(gconfig, prompt, call)
            new: list[Message] = [{"role": "prompt", "content": prompt.added}]
            for _ in range(call.n):
                k = len(choices)
                choices.append(Choice(k, ids[k], prompt, new, b"", _with_seed(fitting, k)))
        return tuple(choices)

    def _fitting(
        self, gconfig: GenerationHyperparameters, prompt: Prompt, call: ChatCall
    ) -> GenerationHyperparameters:
        """Limit the tokens to what the context leaves; ContextLengthExceeded if it leaves none."""
        room = self.context_length - len(prompt.ids)
        if room < 1:
            what = "prompt is" if call.prompts else "messages are"
            if call.tools:
                what = "messages and tools are"
            raise ContextLengthExceeded(
                f"this model's maximum context length is {self.context_length} tokens, of which "
                f"the answer needs at least one, but the {what} {len(prompt.ids)} tokens long; "
                f"shorten {'it' if call.prompts else 'them'}",
                param=call.prompt_parameter,
            )
        return gconfig.new(max_new_tokens=min(gconfig.max_new_tokens, room))

    async def run(
        self,
        prepared: Prepared,
        index: int = 0,
        *,
        session_id: str,
        stream: bool,
        pinned: int | None = None,
    ) -> AsyncGenerator[Completed]:
        """Sample one choice: yield deltas once they are certain (in a stream), then the Completion.

        Closing the generator cancels the choice in the engine; nothing is recorded then.
        ``pinned``: every token must be of this weight version. VersionGone if none is; if some
        are, the Completion is cut off where they end, aborted and untrainable
        (:data:`VERSION_GONE`).
        """
        call, choice = prepared.call, prepared.choices[index]
        parser = _parser(prepared.chat, call, choice.id, choice.prompt.ids, choice.forced)
        request = ModelRequest(
            choice.id,
            choice.prompt.ids,
            choice.gconfig,
            top_logprobs=call.top_logprobs,
            adapter=call.model if call.model in self._adapters else None,
        )
        sampled = _Sampled()
        matched: str | None = None
        async with aclosing(self.engine.generate(request, stream=stream)) as chunks:
            async for chunk in chunks:
                ids, logprobs, top = chunk.output_ids, chunk.logprobs, chunk.top_logprobs
                sampled.ids.extend(ids)
                sampled.logprobs.extend(logprobs)
                sampled.versions.extend(chunk.versions)
                sampled.adapter = chunk.adapter or sampled.adapter
                if top is not None:
                    sampled.top.extend(top)
                if chunk.bound is not None:
                    sampled.bound.extend(chunk.bound)
                deltas = parser.feed(ids)
                if pinned is not None and any(v != pinned for v in chunk.versions):
                    if sampled.versions[0] != pinned:
                        raise VersionGone.of(pinned, sampled.versions[0])
                    cut = parser.finish()[1]
                    yield self._completion(
                        prepared, choice, cut, "abort", session_id, sampled, VERSION_GONE
                    )
                    return
                parsed = None
                if chunk.stop_reason is not None:
                    matched = chunk.matched_stop if isinstance(chunk.matched_stop, str) else None
                    rest, parsed = parser.finish()
                    deltas += rest
                if stream:
                    first = deltas[0] if deltas else MessageDelta()
                    yield Delta(first, ids, logprobs, top, index)
                    for delta in deltas[1:]:
                        yield Delta(delta, [], [], None, index)
                if parsed is not None:
                    reason = chunk.stop_reason or "stop"
                    yield self._completion(
                        prepared, choice, parsed, reason, session_id, sampled, matched_stop=matched
                    )
                    return
        raise EngineUnavailable(
            "the engine closed the stream without a finish reason", retry_after=2
        )

    def recorded_answer(self, call: ChatCall, tree: InteractionTree, id: str) -> Interaction:
        """Return a recorded answer to the same call; texts that were not kept come from its ids."""
        interaction = tree[id]
        if not lacks_texts(interaction):
            return interaction
        prompt = tree.prompt_ids(id).tolist()
        forced = prompt[len(prompt) - interaction.request.get("forced", 0) :]
        parser = _parser(self.format_of(call), call, id, prompt, tuple(forced))
        parser.feed(interaction.output_ids.tolist())
        parsed = parser.finish()[1]
        return replace(interaction, output_message=_message(call, parsed))

    def _completion(
        self,
        prepared: Prepared,
        choice: Choice,
        parsed: ParsedMessage,
        stop_reason: str,
        session_id: str,
        sampled: _Sampled,
        untrainable: str | None = None,
        matched_stop: str | None = None,
    ) -> Completion:
        call, prompt = prepared.call, choice.prompt
        message = _message(call, parsed)
        finish = "tool_calls" if parsed.tool_calls and stop_reason == "stop" else stop_reason
        output_ids = np.array(sampled.ids, dtype=np.int32)
        request: RequestRecord = {
            "overridden": call.overrides,
            "recorded": recorded_of(call),
            "mixed_cache": self._keeps_cache and len(set(sampled.versions)) > 1,
        }
        request.update(call.kept)  # type: ignore[typeddict-item]
        if call.ignored:
            request["ignored"] = list(call.ignored)
        if choice.forced:
            request["forced"] = len(choice.forced)
        if parsed.order:
            request["order"] = [list(each) for each in parsed.order]
        if matched_stop in choice.gconfig.stop:
            request["matched_stop"] = choice.gconfig.stop.index(matched_stop)
        if sampled.top:
            request["top_logprobs"] = sampled.top.to_json()
        if sampled.adapter is not None:
            request["adapter"] = sampled.adapter
            untrainable = untrainable or OF_ADAPTER
        reason = untrainable or untrainable_reason(choice.gconfig, output_ids, sampled.bound)
        if reason is None and any(sampled.bound):
            request["bound"] = runs_of(sampled.bound)
        if call.prompts:
            kept = self._digests(prepared, choice, output_ids, parsed)
            request["text"] = kept
            key = text_key(kept)
        else:
            (key,) = chain_keys([message], call.tools, start=choice.key)
        interaction = Interaction(
            id=choice.id,
            session_id=session_id,
            parent_id=prompt.parent_id,
            # A copy: a view would keep the whole prompt in memory.
            prompt_delta_ids=np.array(prompt.ids[prompt.inherited :], dtype=np.int32),
            output_ids=output_ids,
            output_logprobs=logprob_array(sampled.logprobs),
            output_versions=np.array(sampled.versions, dtype=np.int32),
            message_delta=choice.message_delta,
            output_message=message,
            finish_reason=finish,
            gconfig=choice.gconfig,
            model=call.model,
            tools=None if prompt.parent_id else call.tools,
            continuation=prompt.continuation,
            branch_reason=prompt.branch_reason,
            untrainable_reason=reason,
            request=request,
            created_at=prepared.created_at,
        )
        return Completion(choice, interaction, key)

    def _digests(
        self, prepared: Prepared, choice: Choice, output_ids: IdArray, parsed: ParsedMessage
    ) -> dict[str, Any]:
        """Return the digests by which a prompt that continues a legacy completion is known."""
        text = parsed.content
        if choice.gconfig.stop:
            # The text includes the stop string, as the ids do: an agent continues both or neither.
            parser = prepared.chat.text_parser(())
            parser.feed(output_ids.tolist())
            text = parser.finish()[1].content
        given = prepared.call.prompts[choice.index // prepared.call.n]
        return digests(given, np.concatenate([choice.prompt.ids, output_ids]), text)


class _Sampled:
    """The output of a choice so far, packed: many and long choices are sampled at once."""

    __slots__ = ("adapter", "bound", "ids", "logprobs", "top", "versions")

    def __init__(self) -> None:
        self.ids = array("i")
        self.logprobs = array("d")
        self.versions = array("i")
        self.top = PackedTopLogprobs()
        self.bound = array("b")
        self.adapter: str | None = None


def _parser(
    chat: ChatFormat, call: ChatCall, id: str, prompt_ids: Any, forced: tuple[int, ...]
) -> StreamParser:
    """Return the parser of an answer; ``id`` is the interaction's, a seed of its calls' ids."""
    stop = call.gconfig.stop
    if call.prompts:
        return chat.text_parser(stop)
    return chat.stream_parser(
        prompt_ids=prompt_ids,
        tools=call.callable_tools or None,
        stop=stop,
        forced=forced,
        call_seed=id.encode(),
        custom=call.custom,
    )


def _with_seed(gconfig: GenerationHyperparameters, choice: int) -> GenerationHyperparameters:
    """Derive a seed for the choice, so that the agent's seed gives each choice another sample."""
    if gconfig.seed is None:
        return gconfig
    return gconfig.new(seed=choice_seed(gconfig.seed, choice))


def _require_agreement(effort: str, by_effort: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    for name, value in by_effort.items():
        if given.get(name) not in (None, value, effort):
            raise InvalidRequest(
                f"reasoning_effort={effort} and chat_template_kwargs.{name} contradict each "
                "other: leave one out",
                param="reasoning_effort",
            )


def _message(call: ChatCall, parsed: ParsedMessage) -> Message:
    if call.prompts:
        return {"role": "completion", "content": parsed.content}
    return parsed.to_message()
