from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

import trainer.logprobs
from any_agent.demo.models.tiny import make_model
from any_agent.errors import StartupError
from tests.support.errors import fails_with
from tests.support.trainer.policies import (
    VOCAB,
    assert_same,
    computed,
    dense_entropies,
    dense_gradients,
    dense_logprobs,
    dense_loss,
    random_rows,
    small_policy,
    trainer_gradients,
)
from tests.support.trainer.updates import state_of
from trainer.logprobs import Taught
from trainer.loss import LossConfig
from trainer.model import PolicyConfig
from trainer.packing import micro_batches
from trainer.policy import Policy
from trainer.rows import Row, count_trained


@pytest.fixture(scope="module")
def policy() -> Policy:
    return small_policy(head_chunk=7)


@pytest.mark.parametrize("seed", range(3))
def test_loss_and_gradient_equal_the_dense_formula(policy: Policy, seed: int) -> None:
    rows = random_rows(seed)
    expected = dense_loss(policy.model, rows, LossConfig())
    loss, got = trainer_gradients(policy, rows)
    assert loss == pytest.approx(float(expected.detach()), abs=1e-10)
    assert_same(got, dense_gradients(policy, rows, LossConfig()), atol=1e-10)


def test_gradients_in_float32_are_close_to_the_dense_formula() -> None:
    rows = random_rows(5, dtype=torch.float32)
    expected = dense_gradients(small_policy(), rows, LossConfig())
    _, got = trainer_gradients(small_policy(dtype=torch.float32), rows)
    assert_same({k: t.double() for k, t in got.items()}, expected, atol=1e-5, rtol=1e-4)


def test_logprobs_and_entropies_equal_those_of_full_logits(policy: Policy) -> None:
    rows = random_rows(6)
    with torch.no_grad():
        got = computed(policy, rows)
        for k, row in enumerate(rows):
            mine = got.items.sequences == k
            torch.testing.assert_close(got.logprobs[mine], dense_logprobs(policy.model, row))
            torch.testing.assert_close(got.entropies[mine], dense_entropies(policy.model, row))


def plain_label_logprobs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperatures: Tensor,
    labels: Tensor,
    owners: Tensor,
    fused: bool,
    entropy_gradient: bool,
    taught: Taught | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return what `label_logprobs` returns; autograd makes its gradient."""
    table = functional.linear(hidden, weight, bias) / temperatures.to(hidden.dtype)[:, None]
    table = table.log_softmax(-1)
    entropies = -(table.exp() * table).sum(-1)
    entropies = entropies if entropy_gradient else entropies.detach()
    divergences = None
    if taught is not None:
        theirs = functional.linear(taught.hidden, taught.weight, taught.bias)
        theirs = (theirs / temperatures.to(hidden.dtype)[:, None]).log_softmax(-1)
        divergences = functional.kl_div(
            *((table, theirs) if taught.forward else (theirs, table)),
            reduction="none",
            log_target=True,
        ).sum(-1)[owners]
    return table[owners, labels], entropies[owners], divergences


@pytest.mark.parametrize("towards", [None, "reverse", "forward"])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), tokens=st.integers(1, 6), labels=st.integers(1, 12))
def test_the_gradients_of_the_head_equal_those_of_autograd(
    towards: str | None,
    entropy_gradient: bool,
    with_bias: bool,
    seed: int,
    tokens: int,
    labels: int,
) -> None:
    """Also where one token has several labels, equal ones among them, or none."""
    generator = torch.Generator().manual_seed(seed)

    def random_tensor(*shape: int) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (3 * made).requires_grad_()

    leaves = [random_tensor(tokens, 5), random_tensor(7, 5)]
    bias = random_tensor(7) if with_bias else None
    given_once = (
        *(*leaves, bias, torch.rand(tokens, generator=generator) + 0.5),
        torch.randint(7, (labels,), generator=generator),
        torch.randint(tokens, (labels,), generator=generator).sort().values,
    )
    leaves += [bias] if bias is not None else []
    taught = None
    if towards is not None:
        theirs = [random_tensor(*shape).detach() for shape in ((tokens, 3), (7, 3), (7,))]
        taught = Taught(*theirs, towards == "forward")  # type: ignore[arg-type]
    factors = torch.randn(3, labels, generator=generator, dtype=torch.float64)
    both = (
        function(*given_once, False, entropy_gradient, taught)
        for function in (trainer.logprobs.label_logprobs, plain_label_logprobs)
    )
    found, expected = ([one for one in out if one is not None] for out in both)
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    assert found[1].requires_grad == entropy_gradient
    for mine, theirs in zip(
        *(
            torch.autograd.grad((factors[: len(out)] * torch.stack(out)).sum(), leaves)
            for out in (found, expected)
        ),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-11, rtol=1e-11)


def logits_kept_for_backward(rows: list[Row]) -> list[tuple[int, ...]]:
    """Shapes [..., vocab] that autograd holds on to after the forward pass."""
    kept = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        computed(small_policy(head_chunk=5), rows)
    return [shape for shape in kept if shape and shape[-1] == VOCAB]


def test_logits_are_not_kept_for_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(7, 8)
    assert logits_kept_for_backward(rows) == []

    monkeypatch.setattr(trainer.logprobs, "label_logprobs", plain_label_logprobs)
    assert logits_kept_for_backward(rows), "the check sees what a plain forward pass keeps"


def test_logits_are_computed_for_trained_tokens_only_chunk_by_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = random_rows(7, 8)
    seen: list[int] = []
    original = trainer.logprobs.label_logprobs

    def spy(hidden: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor | None]:
        seen.append(hidden.shape[0])
        return original(hidden, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(trainer.logprobs, "label_logprobs", spy)
    trainer_gradients(small_policy(head_chunk=5), rows)
    n = count_trained(rows)
    assert n > 40 and max(seen) == 5
    assert sum(seen) == n


def test_a_large_vocabulary_has_smaller_chunks_on_a_cpu() -> None:
    assert small_policy().runner.head_chunk == 1024
    model = make_model(150_000, 0, hidden_size=8, layers=1, context=64)
    assert Policy(model).runner.head_chunk == 223
    assert Policy(model, PolicyConfig(head_chunk=7)).runner.head_chunk == 7


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_changes_no_weight_and_names_its_place(bad: float) -> None:
    policy, rows = small_policy(packing="rows"), random_rows(11)
    before = state_of(policy)
    rows[2]["logprobs"][-1] = bad
    number = micro_batches(rows, 1).index([2])
    place = f"micro-batch {number}, row 2, position {len(rows[2]['input_ids']) - 1}"
    with fails_with(FloatingPointError, place):
        policy.train(rows, 1)
    assert policy.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(policy), strict=True))
    assert all(p.grad is None for p in policy.model.parameters())


@pytest.mark.parametrize(("packing", "id"), [("tree", -1), ("tree", VOCAB), ("rows", 10**6)])
def test_an_id_that_the_model_lacks_is_named(packing: Literal["tree", "rows"], id: int) -> None:
    policy, rows = small_policy(packing=packing), random_rows(11)
    before = state_of(policy)
    rows[2]["input_ids"][-1] = id
    with fails_with(ValueError, f"row 2 has the token id {id}", f"0 to {VOCAB - 1}"):
        policy.train(rows)
    assert policy.steps == 0 and not policy.optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(policy), strict=True))


def test_a_row_without_trained_tokens_has_no_logprobs(policy: Policy) -> None:
    row, other = random_rows(0)[:2]
    bare = row | {"loss_mask": torch.zeros_like(row["loss_mask"])}
    none, some = policy.runner.row_logprobs([bare, other])
    assert none.shape == (0,)
    torch.testing.assert_close(some, dense_logprobs(policy.model, other).detach())
    assert policy.runner.row_logprobs([bare])[0].shape == (0,)


def test_a_model_is_loaded_exactly_in_float32(tiny_model_dir: Path) -> None:
    policy = Policy.load(tiny_model_dir, PolicyConfig(threads=1))
    plain = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    for a, b in zip(policy.model.parameters(), plain.parameters(), strict=True):
        assert a.dtype == torch.float32 and torch.equal(a, b)
    assert policy.runner.packing == "tree"


@pytest.mark.parametrize("how", ["gone", "shorter"])
def test_missing_weights_are_an_error_not_random_numbers(
    tiny_model_dir: Path, tmp_path: Path, how: str
) -> None:
    from safetensors.torch import load_file, save_file

    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny_model_dir / name).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    if how == "shorter":
        tensors["lm_head.weight"] = head[:-1].contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with fails_with(StartupError, "lm_head.weight"):
        Policy.load(tmp_path)


def test_models_that_bend_their_logits_are_refused() -> None:
    model = small_policy().model

    original = model.forward

    def forward(*args: object, **kwargs: object) -> object:
        out = original(*args, **kwargs)
        out.logits = 30 * torch.tanh(out.logits / 30)
        return out

    model.forward = forward
    with fails_with(StartupError, "output head"):
        Policy(model)
