"""What an agent may ask this engine for; no engine must be able to do all of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import asdict

from any_agent.doctor.verdict import Check, Verdict
from any_agent.engine.sglang.probe import EngineProbe

LAW = Check("parameters")
DO = "is this an engine that speaks SGLang's native contract?"
_MEANING = {
    "top_logprobs": "top_logprobs",
    "penalties": "frequency_penalty, presence_penalty, repetition_penalty",
    "min_p": "min_p",
    "logit_bias": "logit_bias",
    "grammar": "response_format",
    "structural_tag": "response_format together with tools",
    "seed": "seed in eval sessions",
}


async def parameters(asker: EngineProbe) -> AsyncIterator[Verdict]:
    """One row for each group; what is declined is refused by name, not ignored."""
    for name, able in asdict(await asker.engine.capabilities()).items():
        said = _MEANING.get(name, name)
        if able:
            yield LAW.passed(name, f"can be asked for: {said}")
        else:
            yield LAW.declined(name, f"this engine has none of it: {said}")
    info = await asker.server_info()
    incremental = info.get("incremental_streaming_output")
    if incremental is False:
        yield LAW.declined(
            "incremental streams",
            "each event repeats the whole output: long ones are costly; start the engine with "
            "--incremental-streaming-output",
        )
    elif incremental:
        yield LAW.passed("incremental streams", "each event holds its new tokens only")
