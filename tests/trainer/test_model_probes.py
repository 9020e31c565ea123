"""What a model is tried for at load: fused layers, and rows that others beside them change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager
from torch.nn import functional

import trainer.logprobs
import trainer.model_probes
from any_agent.errors import StartupError
from tests.support.errors import fails_with
from tests.support.trainer.policies import (
    VOCAB,
    assert_same,
    dense_gradients,
    dense_logprobs,
    dense_loss,
    random_rows,
    trainer_gradients,
)
from tests.support.trainer.trees import relative, shaped_model, tree_rows
from tests.trainer.test_tree import computed
from trainer.compiling import compiled
from trainer.loss import LossConfig
from trainer.model import PolicyConfig, context_of
from trainer.model_probes import ModelProbe, rotates_by_length
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


def limited(model: Any) -> Any:
    """The first layer's experts, here one, take the first forty tokens of a batch."""
    mlp = model.model.layers[0].mlp
    original = mlp.forward

    def forward(x: Tensor) -> Tensor:
        taken = torch.arange(x.shape[0] * x.shape[1]).view(x.shape[:2]) < 40
        return original(x) * taken[..., None]

    mlp.forward = forward
    return model


def two_sets_of_angles() -> Any:
    """One for batches of at most 64 tokens a row, one for longer ones."""
    rope: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 10_000.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    lengths = {"max_position_embeddings": 256, "original_max_position_embeddings": 64}
    rope |= {"original_max_position_embeddings": 64}
    return shaped_model("llama", model_type="phi3", rope_parameters=rope, **lengths)


def scaled_beyond_the_context() -> Any:
    rope: dict[str, Any] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    return shaped_model("llama", max_position_embeddings=64, rope_parameters=rope)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (two_sets_of_angles, "scales positions by the longest row of a batch"),
        (lambda: limited(shaped_model("qwen3")), "other hidden states of a row beside other rows"),
    ],
)
def test_a_model_that_looks_at_neighbours_gets_each_row_alone(
    make: Callable[[], Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    policy = Policy(make())
    assert said in caplog.records[-1].getMessage()
    rows = [*random_rows(0, 4, longest=12), *random_rows(3, 2, longest=120)]
    assert max(len(row["input_ids"]) for row in rows) > 64
    assert all(one.ids.shape[0] == 1 for one in policy.runner.plan(rows, 10_000))
    for row, found in zip(rows, policy.runner.row_logprobs(rows), strict=True):
        expected = dense_logprobs(policy.model, row).detach()
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    loss, got = trainer_gradients(policy, rows)
    assert loss == pytest.approx(float(dense_loss(policy.model, rows, LossConfig()).detach()))
    assert_same(got, dense_gradients(policy, rows, LossConfig()), atol=1e-10)


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "factor": 4.0}, 64),
        ({"rope_type": "default"}, 64),
    ],
)
def test_the_context_is_that_of_scaled_positions(rope: dict[str, Any], most: int) -> None:
    rope |= {"rope_theta": 10_000.0}
    model = shaped_model("llama", max_position_embeddings=64, rope_parameters=rope)
    assert context_of(model) == most


@pytest.mark.parametrize("kind", ["deepseek_v2", "llama4_text", "gemma3_text"])
def test_rotations_of_other_shapes_are_understood(kind: str) -> None:
    """Those of the first two are one complex tensor; the third has two kinds of layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "head_dim": 8}
    config = AutoConfig.for_model(kind, vocab_size=VOCAB, intermediate_size=16, **shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    rotary = next(m for m in model.modules() if hasattr(m, "rope_type"))
    rotary = type(rotary)(config)
    assert not rotates_by_length(rotary, 4096, torch.zeros(1))


def test_rows_beyond_the_context_are_refused_which_would_change_those_beside_them() -> None:
    """Its angles would depend on the longest row so far."""
    policy = Policy(scaled_beyond_the_context())
    assert (policy.runner.packing, policy.runner.context) == ("tree", 64)
    rows = random_rows(3, 2, longest=120)
    with fails_with(ValueError, "context of 64"):
        policy.train(rows)
    assert policy.steps == 0


def test_a_policy_and_its_reference_get_the_same_passes() -> None:
    plain, odd = Policy(shaped_model("qwen3")).runner, Policy(limited(shaped_model("qwen3"))).runner
    odd.compute_like(plain)
    assert odd.packing == "alone"
    plain.compute_like(odd)
    assert plain.packing == "alone"


def test_a_model_with_noise_in_training_mode_is_refused() -> None:
    model = shaped_model("qwen3")
    original = model.model.layers[0].mlp.forward
    model.model.layers[0].mlp.forward = lambda x: functional.dropout(
        original(x), 0.3, training=model.training
    )
    assert Policy(model).runner.packing == "tree"
    with fails_with(StartupError, "gradient_checkpointing=false"):
        Policy(model, PolicyConfig(gradient_checkpointing=True))


def test_dropout_that_a_module_keeps_as_a_number_is_switched_off() -> None:
    shape: dict[str, Any] = {"word_embed_proj_dim": 32, "ffn_dim": 48}
    shape |= {"dropout": 0.4, "attention_dropout": 0.4}
    model = shaped_model("llama", model_type="opt", **shape)
    assert Policy(model, PolicyConfig(gradient_checkpointing=True)).runner.packing == "tree"
