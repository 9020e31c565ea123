"""A token's log-probability is log-softmax(logits / T) under the weights of its version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path

from any_agent.doctor.forward_pass import Forward
from any_agent.doctor.verdict import Check, Verdict
from any_agent.engine.sglang.probe import EngineProbe, reported_version
from any_agent.rundir.layout import RunDir, weights_folder

log = logging.getLogger(__name__)

LAW = Check("logprobs", "read the engine's log, and check that engine.urls names the right engine")
UNSCALED = (
    "start the engine so that it returns log-probabilities of the temperature-scaled distribution "
    "(SGLang: without SGLANG_RETURN_ORIGINAL_LOGPROB); until then train with sampling.temperature=1"
)
OTHER_WEIGHTS = (
    "load the weights of this version into the engine (/update_weights_from_disk), or restart it "
    "with them"
)
_COLD = 0.7
_TOKENS = 24
_LONG = 512
_CLOSE = {"float32": 2e-3}
_ROUGH = 0.1
"""The mean error in nats that bfloat16 explains; other weights or another scale exceed it."""
_MAX_BYTES = 4 << 30
"""The largest weights to compute with: a forward pass of more takes a CPU minutes."""


async def logprobs(
    engine: EngineProbe, model_path: str, run: RunDir | None, prompt: list[int]
) -> AsyncIterator[Verdict]:
    """Compare two temperatures, and the engine with a forward pass if its weights are here."""
    yield await _between_temperatures(engine, prompt)
    info = await engine.info()
    version = reported_version(info)
    if version is None:
        yield LAW.unchecked("forward pass", "the engine does not report its version")
        return
    found = find_weights(model_path, run, version, info.get("model_path"))
    if isinstance(found, str):
        yield LAW.unchecked("forward pass", found)
        return
    try:
        forward = await asyncio.to_thread(Forward, found)
    except Exception as error:
        log.debug("cannot load %s", found, exc_info=True)
        seen = f"the weights in {found} cannot be loaded: {type(error).__name__}"
        yield LAW.unchecked("forward pass", seen)
        return
    long = (prompt * (_LONG // len(prompt) + 1))[:_LONG]
    for case, ids, temperature in (
        ("forward pass, T=1", prompt, 1.0),
        (f"forward pass, T={_COLD:g}", prompt, _COLD),
        ("forward pass, long prompt", long, 1.0),
    ):
        yield await against_forward_pass(engine, forward, case, ids, temperature)


async def against_forward_pass(
    engine: EngineProbe, forward: Forward, case: str, ids: list[int], temperature: float = 1.0
) -> Verdict:
    """Compare the engine's log-probabilities of tokens after ``ids`` with these weights'."""
    close = _CLOSE.get(str((await engine.start_options()).get("dtype")), _ROUGH)
    reply = await engine.ask(ids, max_new_tokens=_TOKENS, temperature=temperature, ignore_eos=True)
    # After an update in between there is nothing to compare.
    version = reported_version(await engine.info())
    if set(reply.versions) != {version}:
        return LAW.unchecked(case, "the weights changed in between")
    true = await forward.logprobs(ids, reply.ids, temperature)
    off = _mean_difference(reply.logprobs, true)
    if off <= close:
        return LAW.passed(case, f"{len(true)} tokens, {off:.1e} off on average")
    if temperature != 1 and _mean_difference(
        reply.logprobs, await forward.logprobs(ids, reply.ids, 1.0)
    ) <= min(close, off):
        seen = f"at T={temperature:g} the log-probabilities are those of T=1, not scaled"
        return LAW.failed(case, seen, UNSCALED)
    seen = (
        f"{off:.2g} off on average from version {version} in {forward.folder}: other weights, or "
        "another prompt than was sent"
    )
    return LAW.failed(case, seen, OTHER_WEIGHTS)


def _mean_difference(one: list[float], other: list[float]) -> float:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True)) / max(1, len(one))


async def _between_temperatures(engine: EngineProbe, prompt: list[int]) -> Verdict:
    """Check that a token has another log-probability at another temperature.

    Only the two likeliest tokens are sampled: two samples seldom agree over a whole vocabulary.
    """
    case = "two temperatures"
    for length in (len(prompt), len(prompt) - 1, len(prompt) - 2, len(prompt) - 3):
        sampled: dict[float, dict[int, float]] = {1.0: {}, 2.0: {}}
        for _ in range(8):
            for temperature, known in sampled.items():
                reply = await engine.ask(
                    prompt[:length], max_new_tokens=1, temperature=temperature, top_k=2
                )
                known |= dict(zip(reply.ids, reply.logprobs, strict=True))
            both = sampled[1.0].keys() & sampled[2.0].keys()
            if both:
                break
        for token in both:
            one, two = sampled[1.0][token], sampled[2.0][token]
            if abs(one - two) > 0.01:
                seen = f"token {token} has {one:.3f} at T=1, {two:.3f} at T=2"
                return LAW.passed(case, seen)
    if not sampled[1.0].keys() & sampled[2.0].keys():
        return LAW.unchecked(case, "no token was sampled at both")
    if all(value > -1e-3 for known in sampled.values() for value in known.values()):
        return LAW.unchecked(case, "the model is certain of the next token")
    seen = f"token {token} has {one:.3f} at T=1 and at T=2: log-probabilities are not scaled"
    return LAW.failed(case, seen, UNSCALED)


def find_weights(path: str, run: RunDir | None, version: int, engine_path: object) -> Path | str:
    """Return the folder of a version's weights, or the reason why there is none.

    It is the run's published one, else the model's own (version 0), else the engine's.
    """
    published = weights_folder(run.weights, version) if run is not None else None
    if published is not None and published.is_dir():
        return _usable(published)
    if version == 0 and path:
        if not Path(path).is_dir():
            return f"no weights: {path} is a name on the hub, give a folder"
        return _usable(Path(path))
    if isinstance(engine_path, str) and Path(engine_path).is_dir():
        return _usable(Path(engine_path))
    return f"no weights: version {version} is not on this machine"


def _usable(folder: Path) -> Path | str:
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    if not sizes:
        return f"no weights: {folder} holds no safetensors"
    if sum(sizes) > _MAX_BYTES:
        return f"too large: {sum(sizes) / 2**30:.0f} GiB of weights in {folder}"
    return folder
