"""A model whose layers torch.compile fuses computes what it did, or it is left as it was."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import trainer.logprobs
import trainer.model_probes
from any_agent.errors import StartupError
from tests.support.errors import fails_with
from tests.support.trainer.trees import relative, shaped_model, tree_rows
from tests.trainer.test_tree import computed
from trainer.compiling import compiled
from trainer.model import PolicyConfig
from trainer.model_probes import ModelProbe
from trainer.policy import Policy
from trainer.world import layers_of, leave

Use = Callable[[Any], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Use]:
    """Set what compiles the graphs that are found: a kernel for a CPU takes half a minute."""

    def use(backend: Any) -> None:
        def with_backend(function: Any, **options: Any) -> Any:
            return compiled(function, backend=backend, **options)

        for module in (trainer.model_probes, trainer.logprobs):
            monkeypatch.setattr(module, "compiled", with_backend)
        trainer.logprobs.compiled_once.cache_clear()
        torch.compiler.reset()

    yield use
    trainer.logprobs.compiled_once.cache_clear()


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    leave()


def policy(**settings: Any) -> Policy:
    model = shaped_model("qwen3", torch.float32)
    for module in model.modules():
        # Its norms in float64, each a kernel of its own.
        vars(module).pop("forward", None)
    return Policy(model, PolicyConfig(**settings))


@pytest.mark.service
@pytest.mark.parametrize(("packing", "checkpointing"), [("tree", True), ("rows", False)])
def test_gradients_are_those_of_layers_as_they_are(
    packing: str, checkpointing: bool, use: Use
) -> None:
    """Over passes of many sizes, some of them descendants of others."""
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return aot_eager(graph, inputs)

    use(counting)
    rows = tree_rows(1, torch.float32, count=20)
    expected, loss, gradients = computed(policy(packing="rows"), rows)
    one = policy(packing=packing, compile=True, gradient_checkpointing=checkpointing)
    assert one.runner.packing == packing and one.runner.fused
    assert graphs
    assert all(p.grad is None for p in one.model.parameters())
    found, again, got = computed(one, rows, 60)
    assert again == pytest.approx(loss, rel=1e-5)
    assert relative(torch.cat(found), torch.cat(expected)) < 1e-5
    for name, tensor in got.items():
        assert relative(tensor, gradients[name]) < 1e-4, name


def bent(graph: Any, _: Any) -> Any:
    def call(*inputs: Any) -> Any:
        return tuple(1.5 * t if isinstance(t, Tensor) else t for t in graph(*inputs))

    return call


def failing(graph: Any, _: Any) -> Any:
    raise RuntimeError("no compiler is here")


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.service
def test_without_a_compiler_nothing_is_compiled(
    dtype: torch.dtype | None, use: Use, caplog: pytest.LogCaptureFixture, no_group: None
) -> None:
    """Weights that are divided, as for bfloat16, are whole only within a pass: none was begun."""
    use(failing)
    rows = tree_rows(2, torch.float32, count=10)
    expected = policy(dtype=dtype, lr=1e-3)
    with caplog.at_level(logging.WARNING, "trainer.pass_runner"):
        one = policy(dtype=dtype, lr=1e-3, compile=True)
    (record,) = caplog.records
    said = record.getMessage()
    assert said.startswith("torch.compile does not work here (") and "no compiler is here" in said
    assert said.endswith("nothing is compiled, which is slower on a GPU")
    assert not one.runner.fused
    assert not any("forward" in vars(layer) for layer in layers_of(one.model))
    for _ in range(2):
        assert one.train(rows) == expected.train(rows)


@pytest.mark.parametrize(("backend", "reason"), [(failing, "cannot"), (bent, "otherwise")])
@pytest.mark.service
def test_layers_that_do_not_compile_are_refused(
    backend: Any, reason: str, monkeypatch: pytest.MonkeyPatch, use: Use
) -> None:
    use("eager")
    monkeypatch.setattr(
        trainer.model_probes, "compiled", lambda f, **_: compiled(f, backend=backend, dynamic=True)
    )
    with fails_with(StartupError, "Qwen3ForCausalLM", reason, "train.compile=false"):
        policy(compile=True)


def test_recurrent_layers_are_left_as_they_are() -> None:
    mixed = shaped_model("qwen3", layer_types=["linear_attention", "full_attention"])
    probe = ModelProbe(mixed, lambda *_: torch.zeros(0), torch.float64, torch.device("cpu"))
    reason = probe.use_compiled_layers("rows", 100)
    assert reason is not None and "plain attention (linear_attention)" in reason


def test_nothing_is_compiled_unless_that_is_wanted(use: Use) -> None:
    use(failing)
    one = policy()
    assert not one.runner.fused
    computed(one, tree_rows(2, torch.float32, count=10))
