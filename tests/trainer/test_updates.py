"""A train step of several updates is what its definition says, and all of it or nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import trainer.policy
from tests.support.errors import fails_with
from tests.support.trainer.policies import (
    dense_entropies,
    dense_logprobs,
    random_rows,
    small_policy,
)
from tests.support.trainer.trees import tree_rows
from tests.support.trainer.updates import SEQUENCE_LEVEL, state_of
from trainer.loss import LOSSES, LossConfig, LossInputs, LossStats
from trainer.policy import Policy
from trainer.rows import Row, count_trained
from trainer.surrogates import grpo
from trainer.updates import StepConfig, divide, with_high_entropies, with_outliers

PARTS = [[0, 2, 4], [1, 3, 5, 6]]


@dataclass(slots=True)
class Recorder:
    """GRPO's loss, and what each call of it got, one entry per token."""

    calls: list[dict[str, Tensor]] = field(default_factory=list)
    sequence_ratio: bool = True
    sequence_product: bool = True
    clipped_ratio: bool = True

    def __call__(
        self, logprobs: Tensor, inputs: LossInputs, **more: Any
    ) -> tuple[Tensor, LossStats]:
        given = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
        got = {name: value for name, value in given.items() if value is not None}
        self.calls.append({"logprobs": logprobs.detach()} | got)
        return grpo(logprobs, inputs, **more)


def plain_step(
    policy: Policy, rows: Sequence[Row], parts: Sequence[Sequence[int]], epochs: int
) -> None:
    """A train step as its definition says it: row by row, on full logits."""
    config = LossConfig()
    with torch.no_grad():
        proximal = [dense_logprobs(policy.model, row) for row in rows]
    for _ in range(epochs):
        for part in parts:
            policy.optimizer.zero_grad()
            total = sum(int(rows[k]["loss_mask"].sum()) for k in part)
            for k in part:
                row, mask = rows[k], rows[k]["loss_mask"].bool()
                logprobs = dense_logprobs(policy.model, row)
                a = row["advantages"].to(logprobs)
                ratio = torch.exp(logprobs - proximal[k])
                bounded = ratio.clamp(1 - config.eps_low, 1 + config.eps_high) * a
                weight = torch.exp(proximal[k] - row["logprobs"][mask]).clamp(max=config.is_cap)
                (-(weight * torch.minimum(ratio * a, bounded)).sum() / total).backward()
            norm = torch.nn.utils.clip_grad_norm_(
                policy.model.parameters(), policy.config.grad_clip
            )
            assert torch.isfinite(norm)
            policy.optimizer.step()
    policy.optimizer.zero_grad()


def assert_close(one: list[Tensor], other: list[Tensor], atol: float) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=atol, rtol=0)


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("kind", ["rows", "tree"])
@pytest.mark.service
def test_several_updates_equal_the_plain_definition(kind: str, epochs: int) -> None:
    """Two steps, so that the second one begins with an optimizer that has a state."""
    policy, expected = small_policy(lr=1e-3), small_policy(lr=1e-3)
    for seed in (0, 2):
        rows = random_rows(seed, 7) if kind == "rows" else tree_rows(seed)[:7]
        result = policy.train(rows, 9, None, StepConfig(epochs), PARTS)
        plain_step(expected, rows, PARTS, epochs)
        assert result.updates == 2 * epochs
    assert policy.steps == 2
    assert_close(state_of(policy), state_of(expected), 1e-9)
    start = state_of(small_policy())
    moved = [float((a - b).norm()) for a, b in zip(state_of(policy), start, strict=False)]
    assert max(moved) > 1e-2, "comparing what did not move proves nothing"


def test_one_update_makes_no_further_pass_and_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy(lr=1e-3)
    monkeypatch.setattr(trainer.policy, "Snapshot", lambda _: pytest.fail("a copy"))
    monkeypatch.setattr(policy.runner, "logprobs", lambda passes: pytest.fail("a further pass"))
    result = policy.train(random_rows(0), 30)
    assert result.updates == 1


def test_the_report_of_several_updates_averages_their_figures() -> None:
    rows = random_rows(5, 7)
    policy, alone = small_policy(lr=1e-3), small_policy(lr=1e-3)
    result = policy.train(rows, 30, None, StepConfig(2, lr=2e-3), PARTS)
    first = alone.train([rows[k] for k in PARTS[0]], 30, None, StepConfig(lr=2e-3))
    second = alone.train([rows[k] for k in PARTS[1]], 30)
    assert result.stats.tokens == 2 * count_trained(rows)
    assert result.learning_rate == 2e-3
    # The second update's ratio moves away from 1, so only the first one is the same.
    assert result.grad_norm != first.grad_norm
    assert 0.5 < result.grad_norm / ((first.grad_norm + second.grad_norm) / 2) < 2
    assert abs(result.stats.loss) < abs(first.stats.loss) + abs(second.stats.loss)
    assert result.stats.means()["ratio"] != 1.0


@settings(deadline=None, max_examples=8)
@given(st.integers(0, 10_000), st.integers(1, 90), st.randoms())
@pytest.mark.service
def test_neither_order_nor_pass_size_changes_several_updates(
    seed: int, budget: int, shuffler: random.Random
) -> None:
    rows = random_rows(seed, 5)
    places = list(range(5))
    shuffler.shuffle(places)
    owners = [(k // 2, str(k)) for k in range(5)]
    one, other = small_policy(lr=1e-3), small_policy(lr=1e-3)
    one.train(rows, None, None, StepConfig(2), divide(rows, owners, 2))
    moved = [rows[k] for k in places]
    parts = divide(moved, [owners[k] for k in places], 2)
    other.train(moved, budget, None, StepConfig(2), parts)
    assert_close(state_of(one), state_of(other), 1e-8)


def test_the_optimizer_uses_the_settings_of_the_step() -> None:
    """A gradient that is clipped to nearly nothing leaves moments of that size."""
    policy = small_policy()
    how = StepConfig(lr=1e-2, betas=(0.5, 0.75), weight_decay=0.25, grad_clip=1e-3)
    result = policy.train(random_rows(0), None, None, how)
    assert result.grad_norm > 1e-3, "the norm before it is clipped"
    (group,) = policy.optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (1e-2, (0.5, 0.75), 0.25)
    moments = [s["exp_avg"] for s in policy.optimizer.state.values()]
    norm = torch.sqrt(sum((m / 0.5).square().sum() for m in moments))
    assert float(norm) == pytest.approx(1e-3, rel=1e-3)


def test_a_step_without_what_it_needs_is_refused() -> None:
    policy = small_policy()
    for rows, parts in ((random_rows(0), [[0, 1], []]), ([], None)):
        with fails_with(ValueError, "nothing"):
            policy.train(rows, None, None, None, parts)
    with fails_with(ValueError, "reference model"):
        policy.train(random_rows(0), None, LossConfig(kl_coef=0.1))
    assert policy.steps == 0


@pytest.mark.parametrize("kind", ["rows", "tree"])
@pytest.mark.parametrize("budget", [9, 10_000])
def test_the_loss_gets_what_was_computed_before(kind: str, budget: int) -> None:
    """Every input against full logits of the policy as it was at that time."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder()
        patch.setattr(LOSSES, "find", lambda name: recorder)
        policy = small_policy(lr=1e-3)
        rows = random_rows(1, 7) if kind == "rows" else tree_rows(0)[:7]
        before = [dense_logprobs(policy.model, row).detach() for row in rows]
        frozen = [values - 0.25 for values in before]
        mismatch = [
            values - row["logprobs"][row["loss_mask"].bool()]
            for values, row in zip(before, rows, strict=True)
        ]
        policy.reference = lambda passes: [v - 0.25 for v in policy.runner.logprobs(passes)]
        accumulate, found = policy.accumulate, []

        def spied(*given: Any) -> Any:
            now = [dense_logprobs(policy.model, row).detach() for row in rows]
            recorder.calls.clear()
            result = accumulate(*given)
            calls = recorder.calls
            found.append((now, {name: torch.cat([c[name] for c in calls]) for name in calls[0]}))
            return result

        patch.setattr(policy, "accumulate", spied)
        policy.train(rows, budget, SEQUENCE_LEVEL, StepConfig(2), PARTS)
    assert len(found) == 4
    for number, (now, got) in enumerate(found):
        rows_there = []
        for k in PARTS[number % 2]:
            drift, weight = now[k] - before[k], mismatch[k].mean()
            # Each token's weight is that of the row, at most 5.
            product = (drift.sum() + len(now[k]) * weight.clamp(max=math.log(5.0))).clamp(max=20.0)
            bounds = {"max": 5.0} if rows[k]["advantages"] > 0 else {"min": -0.9}
            means = drift.mean(), drift.clamp(**bounds).mean()
            of_row = (one.expand_as(now[k]) for one in (*means, weight, product))
            rows_there.append(torch.stack([now[k], before[k], frozen[k], *of_row], 1))
        expected = torch.cat(rows_there)
        ratio = got.get("sequence_log_ratio", torch.zeros_like(got["logprobs"]))
        assert ("sequence_log_ratio" in got) == (number > 0)
        clipped = got.get("sequence_clipped_ratio", torch.zeros_like(ratio))
        assert ("sequence_clipped_ratio" in got) == (number > 0)
        names = ("logprobs", "proximal", "reference")
        of_rows = got["sequence_log_weight"], got["sequence_product"].log()
        columns = [*(got[name] for name in names), ratio, clipped, *of_rows]
        assert_close([sorted_rows(torch.stack(columns, 1))], [sorted_rows(expected)], 1e-9)
    assert float(found[-1][1]["sequence_log_ratio"].abs().max()) > 1e-4


REJECTIONS = {
    "rejection_k1": lambda d: abs(math.fsum(d) / len(d)),
    "rejection_k2": lambda d: math.fsum(x * x for x in d) / len(d) / 2,
    "rejection_k3": lambda d: math.fsum(math.exp(x) - 1 - x for x in d) / len(d),
}


@pytest.mark.parametrize("bound", REJECTIONS)
@pytest.mark.parametrize("budget", [9, 10_000])
def test_rows_beyond_a_bound_of_their_divergence_are_rejected(bound: str, budget: int) -> None:
    """By each mean over a row, from full logits of the policy before the first update."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder()
        patch.setattr(LOSSES, "find", lambda name: recorder)
        policy = small_policy(lr=1e-3)
        rows = tree_rows(0)[:7]
        before = [dense_logprobs(policy.model, row).detach() for row in rows]
        given = [row["logprobs"][row["loss_mask"].bool()] for row in rows]
        for k in (1, 4):  # in these the policy is the less likely one
            given[k] = 2 * before[k] - given[k]
            mask = rows[k]["loss_mask"].bool()
            own = rows[k]["logprobs"].masked_scatter(mask, given[k].to(rows[k]["logprobs"]))
            rows[k] = rows[k] | {"logprobs": own}
            given[k] = own[mask]
        ratios = [(now - mu).tolist() for now, mu in zip(before, given, strict=True)]
        means = [REJECTIONS[bound](d) for d in ratios]
        limit = sorted(means)[3] * 1.001
        gone = [mean > limit for mean in means]
        assert sum(gone) == 3
        policy.train(rows, budget, LossConfig(**{bound: limit}), StepConfig(2), PARTS)
    expected = [
        torch.stack([now, torch.full_like(now, float(out))], 1)
        for now, out in zip(before, gone, strict=True)
    ]
    for number in range(4):
        part = PARTS[number % 2]
        wanted = sorted_rows(torch.cat([expected[k] for k in part]))
        tokens, calls = len(wanted), []
        while tokens > 0:
            calls.append(recorder.calls.pop(0))
            tokens -= len(calls[-1]["logprobs"])
        columns = [torch.cat([c[name] for c in calls]) for name in ("proximal", "rejected")]
        assert_close([sorted_rows(torch.stack(columns, 1))], [wanted], 1e-9)


@pytest.mark.parametrize("budget", [9, 10_000])
def test_the_largest_squares_are_left_out_until_the_others_keep_the_bound(budget: int) -> None:
    """One after the other, in float64, in the minibatch of each update, by the policy of then."""
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder()
        patch.setattr(LOSSES, "find", lambda name: recorder)
        policy = small_policy(lr=1e-3)
        rows = tree_rows(0)[:7]
        accumulate, seen = policy.accumulate, []

        def spied(*given: Any) -> Any:
            now = [dense_logprobs(policy.model, row).detach() for row in rows]
            recorder.calls.clear()
            result = accumulate(*given)
            names = ("logprobs", "outlier")
            found = [torch.cat([call[name] for call in recorder.calls]) for name in names]
            seen.append((now, torch.stack(found, 1)))
            return result

        patch.setattr(policy, "accumulate", spied)
        bound = 1.5
        policy.train(rows, budget, LossConfig(second_moment=bound), StepConfig(2), PARTS)
    assert len(seen) == 4
    for number, (now, found) in enumerate(seen):
        tokens = [
            (value, (value - mu) ** 2)
            for k in PARTS[number % 2]
            for value, mu in zip(
                now[k].tolist(),
                rows[k]["logprobs"][rows[k]["loss_mask"].bool()].tolist(),
                strict=True,
            )
        ]
        left = sorted(square for _, square in tokens)
        assert math.fsum(left) / len(left) > bound
        while left and math.fsum(left) / len(left) > bound:
            left.pop()
        assert 0 < len(left) < len(tokens)
        largest = left[-1]
        marked = [[value, float(square > largest + 1e-9)] for value, square in tokens]
        wanted = torch.tensor(marked, dtype=found.dtype)
        assert_close([sorted_rows(found)], [sorted_rows(wanted)], 1e-9)
        kept = found[:, 1] == 0
        assert int(kept.sum()) == len(left)


@pytest.mark.parametrize(
    ("squares", "bound", "gone"),
    [
        ([], 1.0, []),
        ([4.0, 1.0, 1.0], 2.0, [0, 0, 0]),  # their mean is the bound
        ([4.0, 1.0, 1.0], 1.9, [1, 0, 0]),
        ([4.0, 4.0, 1.0], 2.9, [1, 1, 0]),  # equal ones together
        ([4.0, 9.0], 3.9, [1, 1]),  # none keeps it
    ],
)
def test_a_bound_of_the_second_moment_leaves_out_as_few_tokens_as_it_can(
    squares: list[float], bound: float, gone: list[int]
) -> None:
    count = len(squares)
    row = {"loss_mask": torch.ones(count), "logprobs": torch.zeros(count, dtype=torch.float64)}
    logprobs = torch.tensor(squares, dtype=torch.float64).sqrt()
    (found,) = with_outliers([row], [logprobs], bound, None)
    assert found["outlier"].tolist() == gone


def second_moment_law() -> None:
    test_the_largest_squares_are_left_out_until_the_others_keep_the_bound(9)


def rejection_law(bound: str) -> None:
    test_rows_beyond_a_bound_of_their_divergence_are_rejected(bound, 9)


def sorted_rows(table: Tensor) -> Tensor:
    """Rows in a fixed order, whatever passes they came from."""
    return table[sorted(range(len(table)), key=lambda k: table[k].round(decimals=7).tolist())]


@pytest.mark.parametrize("budget", [9, 10_000])
def test_only_the_tokens_of_the_highest_entropies_are_trained_on(budget: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        recorder = Recorder()
        patch.setattr(LOSSES, "find", lambda name: recorder)
        policy = small_policy()
        rows = tree_rows(0)[:7]
        with torch.no_grad():
            logprobs, entropies = (
                torch.cat([of(policy.model, row) for row in rows])
                for of in (dense_logprobs, dense_entropies)
            )
        policy.train(rows, budget, LossConfig("sapo", top_entropy=0.3, is_level="sequence"))
        calls = recorder.calls
        found = [torch.cat([c[name] for c in calls]) for name in ("logprobs", "high_entropy")]
    # In one update pi_prox is the policy itself, and needs no values of its own.
    assert all("sequence_log_weight" in call and "proximal" not in call for call in calls)
    chosen = entropies >= entropies.quantile(0.7) - 1e-9
    expected = torch.stack([logprobs, chosen.double()], 1)
    assert 0.25 < float(expected[:, 1].mean()) < 0.4
    assert_close([sorted_rows(torch.stack(found, 1))], [sorted_rows(expected)], 1e-9)


@given(st.integers(0, 2**32), st.floats(0.05, 0.95), st.sampled_from(["float32", "float64"]))
def test_tokens_of_the_same_entropy_are_chosen_together(seed: int, share: float, of: str) -> None:
    """Rounding differs between packs and processes; what is trained on does not."""
    draw = torch.Generator().manual_seed(seed)
    dtype = getattr(torch, of)
    exact = torch.rand(5, dtype=dtype, generator=draw)[torch.randint(5, (40,), generator=draw)] * 4
    last_digit = torch.finfo(dtype).eps
    noise = (torch.rand(40, dtype=dtype, generator=draw) - 0.5) * 20 * last_digit * (1 + exact)
    row = {"loss_mask": torch.ones(40)}
    chosen = [
        with_high_entropies([row], [entropies], share, None)[0]["high_entropy"] > 0
        for entropies in (exact, exact + noise)
    ]
    assert torch.equal(*chosen)
    assert float(chosen[0].double().mean()) >= share - 1 / 40
    for value in exact.unique():
        assert len(chosen[0][exact == value].unique()) == 1


def test_an_update_that_is_not_finite_undoes_the_step() -> None:
    policy = small_policy(lr=1e-3)
    bad = random_rows(8, 7)
    bad[PARTS[1][0]]["logprobs"] = bad[PARTS[1][0]]["logprobs"] * float("nan")
    for made in range(2):  # the optimizer has no state at first
        before = state_of(policy)
        with fails_with(FloatingPointError, "micro-batch"):
            policy.train(bad, 30, None, StepConfig(2), PARTS)
        assert policy.steps == made
        after = state_of(policy)
        assert len(before) == len(after)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        assert all(p.grad is None for p in policy.model.parameters())
        policy.train(random_rows(9, 7), 30, None, StepConfig(2), PARTS)


def test_other_errors_undo_the_step_too(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = small_policy(lr=1e-3)
    before, accumulate, calls = state_of(policy), policy.accumulate, []

    def failing(*given: Any) -> Any:
        if calls:
            assert not torch.equal(state_of(policy)[0], before[0])
            raise torch.OutOfMemoryError("out of memory")
        calls.append(accumulate(*given))
        return calls[0]

    monkeypatch.setattr(policy, "accumulate", failing)
    with pytest.raises(torch.OutOfMemoryError):
        policy.train(random_rows(0, 7), 30, None, None, PARTS)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(policy), strict=True))


def owned(shape: list[list[int]]) -> tuple[list[Row], list[tuple[int, str]]]:
    """Rows of groups of sessions with these numbers of rows, every row another."""
    owners = [
        (g, f"{g}-{s}")
        for g, group in enumerate(shape)
        for s, n in enumerate(group)
        for _ in range(n)
    ]
    return random_rows(len(owners), len(owners)), owners


SHAPES = st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(SHAPES, st.integers(1, 9), st.randoms())
def test_a_batch_is_divided_by_groups_or_sessions(
    shape: list[list[int]], count: int, shuffler: random.Random
) -> None:
    rows, owners = owned(shape)
    parts = divide(rows, owners, count)
    assert divide(rows, owners, 1) == [list(range(len(rows)))]
    assert sorted(k for part in parts for k in part) == list(range(len(rows)))
    sessions = set(owners)
    assert len(parts) == min(count, len(sessions)) and all(parts)
    whole = [owner[0] for owner in owners] if len(shape) >= count else owners
    for unit in set(whole):
        assert sum(any(whole[k] == unit for k in part) for part in parts) == 1
    # Whatever the order.
    places = list(range(len(rows)))
    shuffler.shuffle(places)
    moved = divide([rows[k] for k in places], [owners[k] for k in places], count)
    assert [sorted(places[k] for k in part) for part in moved] == parts


def test_minibatches_have_about_as_many_tokens() -> None:
    rows, owners = owned([[1] * 4] * 8)
    parts = divide(rows, owners, 4)
    loads = [count_trained([rows[k] for k in part]) for part in parts]
    assert max(loads) < 1.3 * min(loads)
    assert all(len({owners[k][0] for k in part}) == 2 for part in parts)
