"""A token's log-probability is log-softmax(logits / T) under the weights of its version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

from any_agent.doctor.verdict import Check, Verdict
from any_agent.doctor.weights import Forward, find_weights
from any_agent.engine.sglang.probe import EngineProbe, reported_version
from any_agent.rundir.layout import RunDir

log = logging.getLogger(__name__)

LAW = Check("logprobs")
UNSCALED = (
    "start the engine so that it tells log-probabilities of the temperature-scaled distribution "
    "(SGLang: without SGLANG_RETURN_ORIGINAL_LOGPROB); until then train with sampling.temperature=1"
)
OTHER_WEIGHTS = (
    "load the weights of this version into the engine (/update_weights_from_disk), or restart it "
    "with them"
)
DO = "see what engine.urls leads to, and what its log says"
_COLD = 0.7
_TOKENS = 24
_LONG = 512
_CLOSE = {"float32": 2e-3}
_ROUGH = 0.1
"""Nats, on average: what bfloat16 may be off. Other weights, or another scale, are off by more."""


async def logprobs(
    asker: EngineProbe, model_path: str, run: RunDir | None, prompt: list[int]
) -> AsyncIterator[Verdict]:
    """Against a fresh forward pass where the weights are here, and between two temperatures."""
    yield await _between_temperatures(asker, prompt)
    info = await asker.model_info()
    version = reported_version(info)
    if version is None:
        yield LAW.unchecked("forward pass", "the engine does not say which weights it has")
        return
    found = find_weights(model_path, run, version, info.get("model_path"))
    if found.folder is None:
        yield LAW.unchecked("forward pass", found.why)
        return
    try:
        forward = await asyncio.to_thread(Forward, found.folder)
    except Exception as error:
        log.debug("cannot load %s", found.folder, exc_info=True)
        said = f"the weights in {found.folder} cannot be loaded: {type(error).__name__}"
        yield LAW.unchecked("forward pass", said)
        return
    long = (prompt * (_LONG // len(prompt) + 1))[:_LONG]
    for case, ids, temperature in (
        ("forward pass, T=1", prompt, 1.0),
        (f"forward pass, T={_COLD:g}", prompt, _COLD),
        ("forward pass, long prompt", long, 1.0),
    ):
        yield await against_forward_pass(asker, forward, case, ids, temperature)


async def against_forward_pass(
    asker: EngineProbe, forward: Forward, case: str, ids: list[int], temperature: float = 1.0
) -> Verdict:
    """Whether what the engine says of tokens after ``ids`` is what these weights say."""
    close = _CLOSE.get(str((await asker.server_info()).get("dtype")), _ROUGH)
    answer = await asker.ask(ids, max_new_tokens=_TOKENS, temperature=temperature, ignore_eos=True)
    # An update may come in between; then there is nothing to compare.
    version = reported_version(await asker.model_info())
    if set(answer.versions) != {version}:
        return LAW.unchecked(case, "the weights have changed in between")
    true = await forward.logprobs(ids, answer.ids, temperature)
    off = _mean_difference(answer.logprobs, true)
    if off <= close:
        return LAW.passed(case, f"{len(true)} tokens, {off:.1e} off on average")
    if temperature != 1 and _mean_difference(
        answer.logprobs, await forward.logprobs(ids, answer.ids, 1.0)
    ) <= min(close, off):
        said = f"at T={temperature:g} the log-probabilities are those of T=1: they are not scaled"
        return LAW.failed(case, said, UNSCALED)
    said = (
        f"{off:.2g} off on average from version {version} in {forward.folder}: other weights, or "
        "not the prompt that was sent"
    )
    return LAW.failed(case, said, OTHER_WEIGHTS)


def _mean_difference(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / max(1, len(one))


async def _between_temperatures(asker: EngineProbe, prompt: list[int]) -> Verdict:
    """The same token at two temperatures has two log-probabilities.

    Of the two likeliest tokens, as two samples would seldom be the same one of a whole vocabulary.
    """
    case, most = "two temperatures", 0.0
    for length in (len(prompt), len(prompt) - 1, len(prompt) - 2, len(prompt) - 3):
        seen: dict[float, dict[int, float]] = {1.0: {}, 2.0: {}}
        for _ in range(8):
            for temperature, known in seen.items():
                answer = await asker.ask(
                    prompt[:length], max_new_tokens=1, temperature=temperature, top_k=2
                )
                known |= dict(zip(answer.ids, answer.logprobs, strict=True))
            both = seen[1.0].keys() & seen[2.0].keys()
            if both:
                break
        for token in both:
            one, two = seen[1.0][token], seen[2.0][token]
            most = max(most, abs(one - two))
            if most > 0.01:
                said = f"token {token} has {one:.3f} at T=1, {two:.3f} at T=2"
                return LAW.passed(case, said)
    if not seen[1.0].keys() & seen[2.0].keys():
        return LAW.unchecked(case, "no token was sampled at both")
    if all(value > -1e-3 for known in seen.values() for value in known.values()):
        return LAW.unchecked(case, "the model is certain of what comes next: nothing to see")
    said = f"the same at T=1 and at T=2 (token {token}: {one:.3f}): they are not scaled"
    return LAW.failed(case, said, UNSCALED)
