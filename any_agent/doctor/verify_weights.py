"""Verify that engines serve the run's weights.

``python -m any_agent.doctor.verify_weights --config FILE URL ...`` prints a line of JSON for each
engine, whose outcome is passed, failed or unchecked. It is a process of its own, because it
computes a forward pass, and the launcher does not import torch.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from any_agent.auth.access import run_dir_of
from any_agent.config import Config, load_resolved
from any_agent.doctor.forward_pass import Forward
from any_agent.doctor.logprobs import LAW, OTHER_WEIGHTS, against_forward_pass, find_weights
from any_agent.doctor.verdict import Verdict
from any_agent.engine import split_adapter
from any_agent.engine.sglang.probe import probe_engine, reported_version
from any_agent.errors import AnyAgentError

PROMPT = [3 + (31 * k) % 89 for k in range(48)]  # A prompt of ids that every vocabulary has
CASE = "the run's weights"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m any_agent.doctor.verify_weights")
    parser.add_argument("--config", required=True, help="the run's resolved YAML")
    parser.add_argument("urls", nargs="+")
    args = parser.parse_args()
    try:
        config = load_resolved(args.config)
    except AnyAgentError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    for url, verdict in zip(args.urls, asyncio.run(verify_weights(config, args.urls)), strict=True):
        row = {"url": url, "outcome": verdict.outcome.value, "seen": verdict.seen}
        print(json.dumps(row), flush=True)
    return 0


async def verify_weights(config: Config, urls: Sequence[str]) -> list[Verdict]:
    """Compare each engine with a forward pass of its version's weights.

    These are the run's or, for version 0, the model's. Of a shared engine its model is compared,
    on which the run's adapter lies.
    """
    loaded: dict[Path, Forward] = {}
    verdicts = []
    for url in urls:
        try:
            verdicts.append(await _verify(config, url, loaded))
        except AnyAgentError as error:
            verdicts.append(LAW.unchecked(CASE, error.message))
    return verdicts


async def _verify(config: Config, url: str, loaded: dict[Path, Forward]) -> Verdict:
    base, adapter = split_adapter(url)
    run = run_dir_of(config) if adapter is None else None
    async with probe_engine(base, key=config.engine.secret_key) as engine:
        version = reported_version(await engine.info())
        if version is None:
            return LAW.failed(CASE, "the engine does not report its version", OTHER_WEIGHTS)
        found = find_weights(config.model.path, run, version, None)
        if isinstance(found, str):
            return LAW.unchecked(CASE, found)
        if found not in loaded:
            try:
                loaded[found] = await asyncio.to_thread(Forward, found)
            except Exception as error:
                return LAW.unchecked(CASE, f"{found} cannot be loaded: {type(error).__name__}")
        return await against_forward_pass(engine, loaded[found], CASE, PROMPT)


if __name__ == "__main__":
    sys.exit(main())
