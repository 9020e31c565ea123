"""A recorded call beside the answer of another service, and how they differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from any_agent.chat.conversation_hash import same_arguments
from any_agent.completions.untrainable import has_modified_distribution
from any_agent.record import InteractionTree
from any_agent.runtime.command_line import printable
from any_agent.types import GenerationHyperparameters, Interaction, Message
from proxy_ext.export.comparison import Comparison
from proxy_ext.export.endpoint import Answer, SampledToken
from proxy_ext.export.forced_logprobs import sampling_scale

_BENDING = ("logit_bias", "penalty", "grammar")
"""Reasons for which log-probabilities are not the model's own."""
_LEAST_LOGPROB = -9999.0
"""OpenAI's log-probability of a token that is never sampled."""

Spelling = Callable[[int], tuple[bytes, str]]
"""A function of a token id, which returns its bytes and its text."""


@dataclass(slots=True)
class AnsweredCall:
    """One recorded call, and the answer of another service to it."""

    number: int
    interaction_id: str
    recorded: Message
    recorded_finish_reason: str
    recorded_prompt_tokens: int
    recorded_output_tokens: int
    answer: Message | None = None
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """None, too, where the service does not say how many."""
    text_differs_at: int | None = None
    """The first character that differs, from 0; None for an equal text."""
    reasoning_differs_at: int | None = None
    """The same of the reasoning, where the service returns any."""
    calls_equal: bool | None = None
    finish_reason_equal: bool | None = None
    comparison: Comparison | None = None
    """Over the tokens before the first one that differs."""
    compared_tokens: int = 0
    not_compared: str | None = None
    """The reason why log-probabilities are not compared."""
    problem: str | None = None
    """The reason why there is no answer."""

    @property
    def same(self) -> bool | None:
        """True for an equal text, equal calls and an equal end; None without an answer."""
        if self.answer is None:
            return None
        equal = self.text_differs_at is None and self.reasoning_differs_at is None
        return bool(equal and self.calls_equal and self.finish_reason_equal)

    def differences(self) -> str:
        """Return in words what differs from the record, "" for nothing."""
        out = []
        if self.text_differs_at is not None:
            out.append(f"text differs at character {self.text_differs_at}")
        if self.reasoning_differs_at is not None:
            out.append(f"reasoning differs at character {self.reasoning_differs_at}")
        if self.calls_equal is False:
            out.append("tool calls differ")
        if self.finish_reason_equal is False:
            now = printable(str(self.finish_reason))
            out.append(f"finish reason {now}, recorded {self.recorded_finish_reason}")
        return "; ".join(out)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"same": self.same}


@dataclass(slots=True)
class Sums:
    """The figures over all calls."""

    sessions: int = 0
    calls: int = 0
    answered: int = 0
    same: int = 0
    text_equal: int = 0
    calls_equal: int = 0
    finish_reason_equal: int = 0
    output_tokens: int = 0
    """The tokens of the answers whose number the service says, as the next one."""
    recorded_output_tokens: int = 0
    compared_calls: int = 0
    compared_tokens: int = 0
    difference_mean: float | None = None
    """The mean difference of the compared tokens' log-probabilities, nats."""
    difference_max: float | None = None
    not_compared: dict[str, int] = field(default_factory=dict)
    """The calls whose log-probabilities are not compared, by the reason."""

    def add(self, call: AnsweredCall) -> None:
        """Count one call."""
        self.calls += 1
        if call.answer is None:
            return
        self.answered += 1
        self.same += bool(call.same)
        self.text_equal += call.text_differs_at is None
        self.calls_equal += bool(call.calls_equal)
        self.finish_reason_equal += bool(call.finish_reason_equal)
        if call.output_tokens is not None:
            self.output_tokens += call.output_tokens
            self.recorded_output_tokens += call.recorded_output_tokens
        if call.not_compared is not None:
            before = self.not_compared.get(call.not_compared, 0)
            self.not_compared[call.not_compared] = before + 1
        if (found := call.comparison) is not None:
            tokens = self.compared_tokens + call.compared_tokens
            sum_before = (self.difference_mean or 0.0) * self.compared_tokens
            added = found.difference_mean * call.compared_tokens
            self.difference_mean = (sum_before + added) / tokens
            self.difference_max = max(self.difference_max or 0.0, found.difference_max)
            self.compared_calls += 1
            self.compared_tokens = tokens


def unanswered(tree: InteractionTree, node: Interaction, number: int) -> AnsweredCall:
    """Return a call to which there is no answer yet."""
    return AnsweredCall(
        number,
        node.id,
        node.output_message,
        node.finish_reason,
        len(tree.prompt_ids(node.id)),
        len(node.output_ids),
    )


def compare(call: AnsweredCall, answer: Answer) -> None:
    """Set what differs, log-probabilities aside."""
    call.answer = answer.message
    call.finish_reason = answer.finish_reason
    call.prompt_tokens, call.output_tokens = answer.prompt_tokens, answer.output_tokens
    call.text_differs_at = _differs_at(call.recorded, answer.message, "content")
    if answer.message.get("reasoning_content"):
        call.reasoning_differs_at = _differs_at(call.recorded, answer.message, "reasoning_content")
    before, now = (message.get("tool_calls") or () for message in (call.recorded, answer.message))
    functions = [
        (one["function"], other["function"]) for one, other in zip(before, now, strict=False)
    ]
    call.calls_equal = len(before) == len(now) and all(
        one["name"] == other["name"] and same_arguments(one["arguments"], other["arguments"])
        for one, other in functions
    )
    call.finish_reason_equal = answer.finish_reason == call.recorded_finish_reason


def _differs_at(recorded: Message, now: Message, name: str) -> int | None:
    one, other = (str(message.get(name) or "") for message in (recorded, now))
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))


def why_not(
    node: Interaction, gconfig: GenerationHyperparameters, call: AnsweredCall, answer: Answer
) -> str | None:
    """Return why log-probabilities of the record and the answer are not of the same kind."""
    if answer.tokens is None:
        return "the service returns none that can be read"
    if not len(node.output_ids):
        return "no token is recorded"
    bent = has_modified_distribution(node.gconfig)
    if bent in _BENDING or any(name in node.request for name in ("bound", "forced")):
        return f"what was sampled was bent ({bent if bent in _BENDING else 'grammar'})"
    if answer.replaced:
        return f"the service replaced {', '.join(answer.replaced)}"
    scale, asked = map(sampling_scale, (node.gconfig, gconfig))
    if scale != asked:
        return f"recorded at temperature {scale:g}, answered at another: see --sampling recorded"
    if scale != 1 and not answer.own:
        return f"recorded at temperature {scale:g}, by which the service may not scale its own"
    if call.prompt_tokens not in (None, call.recorded_prompt_tokens):
        return "the prompt has another number of tokens there"
    return None


def compare_logprobs(
    call: AnsweredCall, node: Interaction, tokens: list[SampledToken], spelling: Spelling
) -> None:
    """Compare the tokens before the first one that differs: their contexts are the same."""
    recorded, now = [], []
    pairs = zip(node.output_ids.tolist(), node.output_logprobs.tolist(), tokens, strict=False)
    for id, logprob, token in pairs:
        if token.text not in spelling(id):
            break
        recorded.append(max(logprob, _LEAST_LOGPROB))
        now.append(max(token.logprob, _LEAST_LOGPROB))
    call.comparison, call.compared_tokens = Comparison.of(recorded, now), len(now)
    if not now:
        call.not_compared = "the tokens differ from the first one on"
