"""Every token carries the version of the weights that sampled it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from any_agent.doctor.verdict import Check, Verdict
from any_agent.engine.sglang.probe import EngineProbe, reported_version

LAW = Check("versions")
DO = "restart the engine with the run's newest weights and their version (--weight-version)"


async def versions(
    asker: EngineProbe, prompt: list[int], published: int | None
) -> AsyncIterator[Verdict]:
    """What the engine says of itself, of its tokens, and what the run says."""
    info = await asker.model_info()
    told, version = info.get("weight_version"), reported_version(info)
    if version is None:
        said = f"the engine calls its weights {told!r}, which is no number and not 'default'"
        yield LAW.failed("reported", said, DO)
        return
    yield LAW.passed("reported", f"{told!r}")
    if published is None:
        yield LAW.unchecked("published", "what the run has published is not known here")
    elif published == version:
        yield LAW.passed("published", f"{version}, as the run's newest")
    else:
        said = f"the engine serves version {version}, the run's newest is {published}"
        yield LAW.failed("published", said, DO)
    answer = await asker.ask(prompt, max_new_tokens=4, ignore_eos=True)
    # An update may come in between: what was told before or after is right.
    after = reported_version(await asker.model_info())
    if set(answer.versions) <= {version, after}:
        yield LAW.passed("tokens", f"{len(answer.versions)} tokens of version {version}")
    else:
        said = f"tokens of version {answer.versions}, from an engine that serves {version}"
        yield LAW.failed("tokens", said, DO)
