"""A request that nobody waits for any more ends."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

from any_agent.doctor.verdict import Check, Verdict
from any_agent.engine.sglang.probe import EngineProbe

LAW = Check("aborts")
DO = (
    "update the engine: one that goes on sampling after /abort_request wastes its slots, and "
    "weight updates wait for it"
)
_TIMEOUT = 15.0


async def aborts(asker: EngineProbe, prompt: list[int]) -> AsyncIterator[Verdict]:
    """Aborted after its first tokens, and told so."""
    context = await asker.engine.context_length()
    limit = max(1, min(context - len(prompt) - 8, 4096))
    rid = f"doctor-{uuid.uuid4().hex}"
    reason: str | None = None
    count = 0
    told = False
    try:
        async with asyncio.timeout(_TIMEOUT):
            chunks = asker.stream(prompt, rid, max_new_tokens=limit, ignore_eos=True)
            async with aclosing(chunks):
                async for chunk in chunks:
                    count += len(chunk.output_ids)
                    reason = chunk.stop_reason
                    if reason is not None:
                        break
                    if not told:
                        await asker.abort(rid)
                        told = True
    except TimeoutError:
        yield LAW.failed("request", f"still sampled {_TIMEOUT:g} s after it was aborted", DO)
        return
    if reason == "abort":
        yield LAW.passed("request", f"ended after {count} of {limit} tokens")
    elif count >= limit:
        yield LAW.unchecked("request", f"all {limit} tokens were there before the abort")
    else:
        yield LAW.failed("request", f"aborted, and its end is called {reason}", DO)
