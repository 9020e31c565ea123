"""Seeded draws: from the right distribution, and from nothing but seed, position and logits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from any_agent.engine import SGLangEngine, agenerate
from any_agent.engine.embedded.engine import EmbeddedEngine, EngineOptions
from any_agent.engine.embedded.model_loader import LoadedModel
from any_agent.engine.embedded.sampler import BatchSampler
from any_agent.errors import InvalidRequest
from any_agent.types import GenerationHyperparameters as Sampling
from any_agent.types import ModelResponse
from tests.support.engine.embedded import prompt, request
from tests.support.engine.process import EngineProcess
from tests.support.errors import fails_with

LOGITS = torch.log(torch.tensor([0.3, 0.22, 0.17, 0.12, 0.09, 0.06, 0.03, 0.01]))
DRAWS = 8000
BEYOND = 24.32
"""Chi-square of seven degrees of freedom exceeds it once in a thousand times."""


def draw(cases: Iterable[tuple[int, int]], **sampling: Any) -> list[int]:
    """One draw from `LOGITS` for each (seed, position), in batches."""
    cases = list(cases)
    out: list[int] = []
    for at in range(0, len(cases), 100):
        part = cases[at : at + 100]
        sampler = BatchSampler([Sampling(seed=s, **sampling) for s, _ in part], torch.device("cpu"))
        logits = LOGITS.expand(len(part), -1)
        out += sampler.sample(logits, torch.Generator(), [p for _, p in part])[0]
    return out


def chi_square(ids: list[int], expected: torch.Tensor) -> float:
    counts = torch.bincount(torch.tensor(ids), minlength=len(expected)).double()
    wanted = expected.double() * len(ids)
    return ((counts - wanted) ** 2 / wanted).sum().item()


@pytest.mark.parametrize(
    ("cases", "temperature"),
    [
        ([(seed, 7) for seed in range(DRAWS)], 1.0),
        ([(seed, 7) for seed in range(-(2**63), -(2**63) + DRAWS)], 1.0),
        ([(seed << 32, 7) for seed in range(DRAWS)], 1.0),
        ([(11, position) for position in range(DRAWS)], 1.0),
        ([(k, DRAWS - k) for k in range(DRAWS)], 1.0),
        ([(seed, 3) for seed in range(DRAWS)], 0.5),
        ([(seed, 3) for seed in range(DRAWS)], 2.0),
    ],
    ids=["seeds", "negative seeds", "high bits", "positions", "both", "colder", "warmer"],
)
def test_draws_have_the_distribution_of_the_softmax(
    cases: list[tuple[int, int]], temperature: float
) -> None:
    ids = draw(cases, temperature=temperature)
    assert chi_square(ids, torch.softmax(LOGITS / temperature, -1)) < BEYOND


def test_top_k_and_top_p_cut_seeded_draws() -> None:
    assert set(draw(((s, 0) for s in range(500)), top_k=2)) == {0, 1}
    assert set(draw(((s, 0) for s in range(500)), top_p=0.5)) == {0, 1}
    assert set(draw(((s, 0) for s in range(50)), temperature=0.0)) == {0}


def test_draws_at_neighbouring_positions_and_seeds_are_independent() -> None:
    """Of equal halves: the four pairs are equally frequent, in a sequence and across seeds."""
    for step in ((0, 1), (1, 0)):
        first = draw((seed, 5) for seed in range(DRAWS))
        second = draw((seed + step[0], 5 + step[1]) for seed in range(DRAWS))
        above = torch.tensor([first, second]) > 0
        pairs = (2 * above[0].int() + above[1].int()).tolist()
        p = torch.tensor([0.3, 0.7])
        # Three degrees of freedom.
        assert chi_square(pairs, torch.outer(p, p).flatten()) < 16.27


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    alone = [draw([(seed, 9)])[0] for seed in range(40)]
    assert draw((seed, 9) for seed in range(40)) == alone
    configs = [Sampling(seed=s) if s % 2 else Sampling() for s in range(40)]
    sampler = BatchSampler(configs, torch.device("cpu"))
    for neighbours in (1, 2):
        generator = torch.Generator().manual_seed(neighbours)
        ids, _, _ = sampler.sample(LOGITS.expand(40, -1), generator, [9] * 40)
        assert ids[1::2] == alone[1::2]


async def test_a_seed_repeats_whatever_else_runs(loaded: LoadedModel) -> None:
    options = EngineOptions(max_running_requests=8, seed=0)
    async with EmbeddedEngine(loaded, options) as engine:
        asked = [request(f"{k}", prompt(5 + 3 * k), seed=k, max_new_tokens=60) for k in range(6)]
        alone = [(await agenerate(engine, r)).output_ids for r in asked]
        noise = [request(f"n{k}", prompt(9, k), max_new_tokens=40) for k in range(4)]
        together = await asyncio.gather(*(agenerate(engine, r) for r in [*noise, *asked]))
        assert [each.output_ids for each in together[4:]] == alone
    assert len({tuple(ids) for ids in alone}) == 6


async def test_a_resubmission_goes_on_as_if_nothing_had_been(engine: EmbeddedEngine) -> None:
    full = await agenerate(engine, request("a", prompt(8), seed=5, max_new_tokens=60))
    for at in (1, 20, 59):
        ids = prompt(8) + full.output_ids[:at]
        rest = await agenerate(engine, request(f"b{at}", ids, seed=5, max_new_tokens=60 - at))
        assert rest.output_ids == full.output_ids[at:]
        assert rest.output_logprobs == pytest.approx(full.output_logprobs[at:], abs=1e-5)


@pytest.mark.parametrize("seed", [2**63, -(2**63) - 1])
async def test_seeds_beyond_64_bits_are_refused(engine: EmbeddedEngine, seed: int) -> None:
    with fails_with(InvalidRequest, "seed"):
        engine.submit(request("x", prompt(4), seed=seed))
    limit = 2**63 - 1 if seed > 0 else -(2**63)
    assert (await agenerate(engine, request("y", prompt(4), seed=limit))).output_ids


@pytest.mark.service
def test_two_engine_processes_sample_alike_bit_for_bit(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """With one request at a time, also if they come in another order."""
    outputs = []
    for order in (1, -1):
        with EngineProcess(tmp_path) as engine:
            engine.start(tiny_model_dir, "--max-running-requests", "1")
            outputs.append(asyncio.run(_served(engine.url, order)))
    assert outputs[0] == outputs[1]
    assert len({tuple(r.output_ids) for r in outputs[0]}) == len(outputs[0])


async def _served(url: str, order: int) -> list[ModelResponse]:
    """Eight seeded requests, sent in one order and told in the same one."""
    client = SGLangEngine(url, decode=lambda _: "")
    asked = [request(f"{k}", prompt(4 + 11 * k, k), seed=k, max_new_tokens=80) for k in range(8)]
    try:
        calls = [asyncio.create_task(agenerate(client, r)) for r in asked[::order]]
        return (await asyncio.gather(*calls))[::order]
    finally:
        await client.close()
