"""LoRA: the same policy as with merged weights, in the trainer, in every engine, after a resume."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trainer.lora
import trainer.tree_attention
from any_agent.config import Config, load_config
from any_agent.demo.models.tiny import save_tiny_model
from any_agent.engine.embedded.weight_loading import apply_weights, fit_weights
from any_agent.errors import ConfigError
from any_agent.rundir.layout import published_versions, weights_folder
from tests.support.trainer.adapters import (
    LORA,
    adapted_policy,
    all_gradients,
    full_policy,
    gradients_of_adapter,
    plain_sums,
    row_logprobs,
    stirred,
)
from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Killed, Lab, config_of, killed, outcome
from tests.support.trainer.policies import random_rows, small_policy
from tests.support.trainer.trees import SHAPES, shaped_model, shaped_policy, tree_rows
from trainer.checkpoint import load_checkpoint, save_checkpoint
from trainer.from_config import policy_config
from trainer.lora import Lora, adapter_tensors, layers, save_adapter
from trainer.policy import Policy, PolicyConfig
from trainer.weight_folders import holds_weights, publish_to_disk

CONFIG = PolicyConfig(lr=1e-3, threads=1, lora=LORA)


def weights_of(policy: Policy, dtype: torch.dtype | None = None) -> dict[str, torch.Tensor]:
    return {name: t.clone() for bucket in policy.buckets(3000, dtype) for name, t in bucket}


def train(policy: Policy, seeds: range) -> None:
    for seed in seeds:
        policy.train(random_rows(seed, dtype=torch.float32), 60)


# -- what is trained -------------------------------------------------------------------------------


def test_the_first_version_is_the_base_bit_for_bit(tiny_model_dir: Path) -> None:
    rows = random_rows(0, dtype=torch.float32)
    base, policy = Policy.load(tiny_model_dir), Policy.load(tiny_model_dir, CONFIG)
    expected, found = weights_of(base), weights_of(policy)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    for one, other in zip(row_logprobs(base, rows), row_logprobs(policy, rows), strict=True):
        assert torch.equal(one, other)


def only_the_adapter_is_trained(model: Path, folder: Path) -> None:
    policy = Policy.load(model, CONFIG)
    before = {n: p.detach().clone() for n, p in policy.model.named_parameters()}
    adapter = adapter_tensors(policy.model)
    assert [n for n, p in policy.model.named_parameters() if p.requires_grad] == list(adapter)
    assert len(adapter) == 2 * 2 * 7, "A and B of seven linear layers in two decoder layers"
    train(policy, range(2))
    for name, parameter in policy.model.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name]) != (name in adapter), name
    assert {id(p) for p in policy.optimizer.state} == {id(p) for p in adapter.values()}


def test_only_the_adapter_is_trained(tiny_model_dir: Path, tmp_path: Path) -> None:
    only_the_adapter_is_trained(tiny_model_dir, tmp_path)


def gradients_by_the_chain_rule(policy: Policy, rows: list[Any]) -> dict[str, torch.Tensor]:
    """From the gradient G of each whole weight: s B'G for A, s GA' for B."""
    full = full_policy(replaced(policy, packing="rows"))
    _, whole = all_gradients(full, rows)
    out = {}
    for name, layer in layers(policy.model).items():
        a, b = (getattr(layer, part)["default"].weight.detach() for part in ("lora_A", "lora_B"))
        scale = policy.config.lora.alpha / policy.config.lora.rank  # type: ignore[union-attr]
        out[f"{name}.lora_A.default.weight"] = scale * b.T @ whole[f"{name}.weight"]
        out[f"{name}.lora_B.default.weight"] = scale * whole[f"{name}.weight"] @ a.T
    return out


def replaced(policy: Policy, **config: Any) -> Policy:
    policy.config = replace(policy.config, **config)
    return policy


def gradients_are_those_of_whole_weights(**config: Any) -> None:
    for seed, budget in ((1, 40), (2, 9)):
        policy = adapted_policy(**config)
        for rows in (random_rows(seed), tree_rows(seed)):
            _, found = gradients_of_adapter(policy, rows, budget)
            expected = gradients_by_the_chain_rule(adapted_policy(**config), rows)
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert tensor.abs().max() > 1e-6, "comparing zeros proves nothing"
                torch.testing.assert_close(found[name], tensor, atol=1e-10, rtol=1e-8, msg=name)


@pytest.mark.parametrize(
    "config",
    [
        {"packing": "rows"},
        {"packing": "tree"},
        {"packing": "tree", "head_chunk": 3, "gradient_checkpointing": True},
        {"lora": Lora(3, 2, ("v_proj", "0.mlp.down_proj"))},
        {"lora": Lora(1, 1, ("1.mlp.down_proj",))},
    ],
    ids=["rows", "tree", "checkpointing", "some layers", "the last layer"],
)
def test_gradients_are_those_of_whole_weights(config: dict[str, Any]) -> None:
    gradients_are_those_of_whole_weights(**config)


def test_logprobs_are_those_of_whole_weights() -> None:
    policy = adapted_policy()
    full, rows = full_policy(policy), tree_rows(3)
    for one, other in zip(row_logprobs(policy, rows, 40), row_logprobs(full, rows), strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


def without_the_adapter_it_is_the_base(*_: Path) -> None:
    policy, rows = adapted_policy(torch.float32), tree_rows(4, torch.float32)
    base = small_policy(dtype=torch.float32)
    with_it = row_logprobs(policy, rows)
    with policy.without_adapter():
        for one, other in zip(row_logprobs(base, rows), row_logprobs(policy, rows), strict=True):
            assert torch.equal(one, other)
    again = row_logprobs(policy, rows)
    assert all(torch.equal(a, b) for a, b in zip(with_it, again, strict=True))
    assert not torch.equal(torch.cat(again), torch.cat(row_logprobs(base, rows)))
    # It is trained afterwards, as it was before.
    policy.train(rows, 40)
    assert all(p.requires_grad for p in adapter_tensors(policy.model).values())
    assert not torch.equal(torch.cat(row_logprobs(policy, rows)), torch.cat(again))
    with pytest.raises(ValueError, match=r"no adapter: train\.lora"), base.without_adapter():
        pass


def test_without_the_adapter_it_is_the_base_bit_for_bit() -> None:
    without_the_adapter_it_is_the_base()


# -- what is published -----------------------------------------------------------------------------


def published_is_trained(model: Path, folder: Path) -> float:
    """The greatest difference between log-probabilities of the trainer and of a fresh model from
    the published folder."""
    policy = stirred(Policy.load(model, CONFIG))
    rows = random_rows(5, dtype=torch.float32)
    trained = torch.cat(row_logprobs(policy, rows))
    path = publish_to_disk(policy, model, folder, 1)
    fresh = Policy(
        AutoModelForCausalLM.from_pretrained(path, dtype="auto"), PolicyConfig(threads=1)
    )
    base = torch.cat(row_logprobs(Policy.load(model), rows))
    assert (base - trained).abs().max() > 0.1, "an adapter that does nothing proves nothing"
    difference = float((torch.cat(row_logprobs(fresh, rows)) - trained).abs().max())
    assert difference < 1e-4, difference
    # As the engines get it in buckets.
    by_buckets = AutoModelForCausalLM.from_pretrained(model, dtype="auto")
    sent = dict(pair for bucket in policy.buckets(3000) for pair in bucket)
    apply_weights(by_buckets, fit_weights(by_buckets, sent))
    for name, tensor in by_buckets.state_dict().items():
        assert torch.equal(tensor, fresh.model.state_dict()[name]), name
    return difference


def test_engines_load_what_is_trained(
    tiny_model_dir: Path, tmp_path: Path, record_property: Any
) -> None:
    difference = published_is_trained(tiny_model_dir, tmp_path)
    record_property("figure", f"published and trained log-probabilities differ by {difference:.1e}")
    print(f"published and trained log-probabilities differ by {difference:.1e}")
    names = AutoModelForCausalLM.from_pretrained(tmp_path / "v00000001").state_dict().keys()
    assert names == AutoModelForCausalLM.from_pretrained(tiny_model_dir).state_dict().keys()


def merged_weights_are_exact(model: Path, folder: Path) -> None:
    """But for the rounding of float32, whose 24 bits are those of each number."""
    policy = stirred(Policy.load(model, CONFIG))
    found, expected = weights_of(policy), plain_sums(policy)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name].double(), tensor, atol=1e-6, rtol=1e-6, msg=name)


def test_merged_weights_are_exact_and_always_the_same(tiny_model_dir: Path, tmp_path: Path) -> None:
    merged_weights_are_exact(tiny_model_dir, tmp_path)
    policy = stirred(Policy.load(tiny_model_dir, CONFIG))
    once, again = weights_of(policy), weights_of(policy)
    half = weights_of(policy, torch.bfloat16)
    for name, tensor in once.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor.bfloat16(), half[name]), "rounded once, after the sum"


def a_folder_is_recognised_until_the_next_step(model: Path, folder: Path) -> None:
    policy = stirred(Policy.load(model, CONFIG))
    path = publish_to_disk(policy, model, folder, 1)
    assert holds_weights(path, policy)
    assert holds_weights(path, stirred(Policy.load(model, CONFIG)))
    train(policy, range(1))
    assert not holds_weights(path, policy)


def test_a_folder_is_recognised_until_the_next_step(tiny_model_dir: Path, tmp_path: Path) -> None:
    a_folder_is_recognised_until_the_next_step(tiny_model_dir, tmp_path)


# -- checkpoints -----------------------------------------------------------------------------------


def going_on_equals_never_having_stopped(model: Path, folder: Path) -> None:
    policy = Policy.load(model, CONFIG)
    train(policy, range(3))
    path = save_checkpoint(folder, policy, model, {"version": 3})
    train(policy, range(3, 5))
    again, state = load_checkpoint(path, CONFIG)
    assert state == {"version": 3} and again.steps == 3
    train(again, range(3, 5))
    mine, other = (dict(p.model.named_parameters()) for p in (policy, again))
    for name, tensor in mine.items():
        assert torch.equal(tensor, other[name]), name
        for key, moment in policy.optimizer.state.get(tensor, {}).items():
            assert torch.equal(moment, again.optimizer.state[other[name]][key]), (name, key)


def test_going_on_equals_never_having_stopped_bit_for_bit(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    going_on_equals_never_having_stopped(tiny_model_dir, tmp_path)


@pytest.fixture(scope="module")
def saved(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy = stirred(Policy.load(tiny_model_dir, CONFIG))
    train(policy, range(1))
    return save_checkpoint(tmp_path_factory.mktemp("run"), policy, tiny_model_dir, {"version": 1})


def a_checkpoint_is_complete(base: Path, folder: Path) -> None:
    """Model and adapter in it compute what the policy computes."""
    policy = stirred(Policy.load(base, CONFIG))
    path = save_checkpoint(folder, policy, base, {})
    rows = random_rows(8, dtype=torch.float32)
    expected = torch.cat(row_logprobs(policy, rows))
    settings = PolicyConfig(threads=1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    torch.testing.assert_close(
        torch.cat(row_logprobs(Policy(model, settings), rows)), expected, atol=1e-4, rtol=0
    )
    bare = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    by_peft = PeftModel.from_pretrained(bare, path / "adapter").merge_and_unload()
    by_peft.requires_grad_(True)
    torch.testing.assert_close(
        torch.cat(row_logprobs(Policy(by_peft, settings), rows)), expected, atol=1e-4, rtol=0
    )


def test_a_checkpoint_has_the_merged_model_and_the_adapter(
    saved: Path, tiny_model_dir: Path, tmp_path: Path
) -> None:
    a_checkpoint_is_complete(tiny_model_dir, tmp_path)
    config = json.loads((saved / "adapter" / "adapter_config.json").read_text())
    given = {name: config[name] for name in ("r", "lora_alpha", "lora_dropout", "peft_type")}
    assert given == {"r": 4, "lora_alpha": 12, "lora_dropout": 0.0, "peft_type": "LORA"}
    assert config["base_model_name_or_path"] == str(tiny_model_dir)
    assert config["target_modules"][:2] == ["down_proj", "gate_proj"]
    sizes = json.loads((saved / "manifest.json").read_text())["files"]
    assert (
        1 < sizes["trainer/optimizer.safetensors"] / sizes["adapter/adapter_model.safetensors"] < 3
    )
    assert sizes["trainer/optimizer.safetensors"] < sizes["model.safetensors"]


@pytest.mark.parametrize(
    ("lora", "said"),
    [
        (None, r"set train\.lora\.rank=4 and train\.lora\.alpha=12"),
        (replace(LORA, rank=8), r"rank 4, and train\.lora\.rank=8: set train\.lora\.rank=4"),
        (replace(LORA, alpha=8), r"alpha 12, and train\.lora\.alpha=8"),
        (replace(LORA, targets=("q_proj",)), r"other layers than .* train\.lora\.target_modules"),
    ],
)
def test_another_adapter_is_refused(saved: Path, lora: Lora | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_checkpoint(saved, replace(CONFIG, lora=lora))


def test_another_base_is_refused(saved: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    other = save_tiny_model(tmp_path / "model", seed=1)
    with pytest.raises(ConfigError, match=r"on other weights .* model\.safetensors differ"):
        load_checkpoint(saved, CONFIG, base=other)
    policy, _ = load_checkpoint(saved, CONFIG, base=tiny_model_dir)
    assert policy.steps == 1


def test_a_checkpoint_of_all_weights_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    policy = Policy.load(tiny_model_dir)
    path = save_checkpoint(tmp_path, policy, tiny_model_dir, {})
    with pytest.raises(ConfigError, match=r"without LoRA, and train\.lora is set: leave it out"):
        load_checkpoint(path, CONFIG)


# -- a run -----------------------------------------------------------------------------------------


SETTINGS = (
    *("train.lr=1e-2", "train.lora.rank=4", "train.lora.alpha=12"),
    *("train.checkpoint_every=2", "rollout.eta=9"),
)


def run_of(root: Path, model: Path, *more: str) -> Config:
    return config_of([f"root={root}", f"model.path={model}", *SETTINGS], *more)


def test_a_run_that_is_killed_goes_on_as_if_it_had_not_been(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after the third step, whose checkpoint is that of the second."""
    episodes = [pair(f"p{k}", turns=1 + k % 2) for k in range(4)]
    whole = Lab(run_of(tmp_path / "whole", tiny_model_dir, "train.steps=4"), list(episodes))
    assert whole.trainer.train()
    expected = outcome(whole)
    assert any("lora_A" in name for name in expected["tensors"])

    config = run_of(tmp_path / "killed", tiny_model_dir, "train.steps=4")
    first = Lab(config, list(episodes))
    first.trainer._publish = killed(first.trainer._publish, 3)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.trainer.train()
    second = Lab(config, episodes[3:], before=first)
    assert second.trainer.train()
    found = outcome(second)
    assert found["state"] == expected["state"]
    assert found["tensors"].keys() == expected["tensors"].keys()
    for name, tensor in expected["tensors"].items():
        assert torch.equal(found["tensors"][name], tensor), name

    # Its engines have what it trains, and a start that changes nothing publishes nothing.
    newest = max(published_versions(second.trainer.dir.weights))
    assert holds_weights(weights_folder(second.trainer.dir.weights, newest), second.trainer.policy)
    third = Lab(config, [], before=second)
    assert third.trainer.train() and not third.service.published


def test_a_start_with_another_rank_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    Lab(run_of(tmp_path, tiny_model_dir, "train.steps=1"), [pair("p")]).trainer.train()
    other = Lab(run_of(tmp_path, tiny_model_dir, "train.steps=2", "train.lora.rank=8"), [])
    with pytest.raises(ConfigError, match=r"rank 4, and train\.lora\.rank=8"):
        other.trainer.train()
    plain = [s for s in SETTINGS if "lora" not in s]
    settings = [f"root={tmp_path}", f"model.path={tiny_model_dir}", *plain]
    with pytest.raises(ConfigError, match=r"set train\.lora\.rank=4"):
        Lab(config_of(settings), []).trainer.train()


# -- settings --------------------------------------------------------------------------------------


def test_the_seed_decides_on_the_first_adapter() -> None:
    def first(seed: int) -> list[torch.Tensor]:
        torch.manual_seed(seed + 100)
        policy = small_policy(lora=replace(LORA, seed=seed % 2))
        return [p.detach() for p in adapter_tensors(policy.model).values()]

    one, same, other = first(0), first(2), first(1)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one[::2], other[::2], strict=True))
    assert not any(b.any() for b in one[1::2])


@pytest.mark.parametrize("name", ["q_prj", "lm_head", "embed_tokens", "input_layernorm"])
def test_a_layer_that_the_model_lacks_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"no linear layers {name} .* has down_proj, gate_proj"):
        small_policy(lora=Lora(targets=("q_proj", name)))


def test_a_missing_peft_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    train = load_config(None, ["train.lora.rank=4", "train.seed=3"], environ={}).train
    assert policy_config(train).lora == Lora(4, 32, (), 3)
    monkeypatch.setattr(trainer.lora, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'pip install "any-agent-rl\[lora\]"'):
        policy_config(train)
    assert policy_config(load_config(None, [], environ={}).train).lora is None


@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_of_model(shape: str) -> None:
    """Tied embeddings and heads among them."""
    policy = stirred(shaped_policy(shape, lora=LORA))
    rows = tree_rows(6)
    model = shaped_model(shape)
    model.load_state_dict(weights_of(policy), strict=False)
    expected = row_logprobs(Policy(model, PolicyConfig()), rows)
    assert weights_of(policy).keys() == weights_of(shaped_policy(shape)).keys()
    for one, other in zip(row_logprobs(policy, rows, 40), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-10, rtol=0)


EXPERTS: dict[str, dict[str, Any]] = {
    # The first layer is dense, with names that experts have in other layers.
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
    "mixtral": {"num_local_experts": 4},
}


@pytest.mark.parametrize("kind", EXPERTS)
def test_experts_stay_as_they_are(kind: str, tmp_path: Path) -> None:
    """They are no linear layers; what is published is loaded by its names in files all the same."""
    shape = EXPERTS[kind] | {"model_type": kind, "num_experts_per_tok": 2}
    base = shaped_model("llama", torch.float32, **shape)
    base.save_pretrained(tmp_path / "base")
    policy = stirred(Policy.load(tmp_path / "base", CONFIG))
    kinds = {name.rpartition(".")[2] for name in layers(policy.model)}
    assert kinds == {"q_proj", "k_proj", "v_proj", "o_proj"}
    rows = tree_rows(9, torch.float32)
    expected = torch.cat(row_logprobs(policy, rows))
    folder = tmp_path / "published"
    folder.mkdir()
    save_file(weights_of(policy), folder / "model.safetensors", metadata={"format": "pt"})
    policy.model.config.save_pretrained(folder)
    save_adapter(policy, folder / "adapter")
    bare = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    by_peft = PeftModel.from_pretrained(bare, folder / "adapter").merge_and_unload()
    for model in (by_peft, AutoModelForCausalLM.from_pretrained(folder)):
        model.requires_grad_(True)
        found = torch.cat(row_logprobs(Policy(model, PolicyConfig(threads=1)), rows))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    with pytest.raises(ConfigError, match=r"^train\.lora\.target_modules: "):
        Policy.load(tmp_path / "base", replace(CONFIG, lora=Lora(targets=("gate_proj", "up_proj"))))


def test_a_model_without_linear_layers_is_refused() -> None:
    config = GPT2Config(n_embd=32, n_head=4, n_layer=1, vocab_size=48)
    with pytest.raises(ConfigError, match="GPT2LMHeadModel has no linear layers for a LoRA"):
        Policy(GPT2LMHeadModel(config), PolicyConfig(lora=LORA))


# -- planted errors --------------------------------------------------------------------------------

original_merged = trainer.lora.merged
original_add_adapter = trainer.lora.add_adapter
original_attention = trainer.tree_attention.tree_attention


def doubled(model: Any, *arguments: Any) -> list[torch.Tensor]:
    for layer in layers(model).values():
        layer.scaling["default"] *= 2
    try:
        return original_merged(model, *arguments)
    finally:
        for layer in layers(model).values():
            layer.scaling["default"] /= 2


def forgotten(model: Any, stored: Any, names: Any, whole: Any) -> list[torch.Tensor]:
    every = {**stored, **adapter_tensors(model)}
    return [whole(every[name]) for name in names]


def stale(model: Any, stored: Any, names: Any, whole: Any) -> list[torch.Tensor]:
    """Merged once."""
    known = model.__dict__.setdefault("known", {})
    for name in names:
        if name not in known:
            known[name] = original_merged(model, stored, [name], whole)[0].clone()
    return [known[name] for name in names]


def thawed(model: Any, lora: Lora) -> None:
    original_add_adapter(model, lora)
    model.model.norm.weight.requires_grad_(True)


def without_alpha(model: Any, lora: Lora) -> None:
    original_add_adapter(model, lora)
    for layer in layers(model).values():
        layer.scaling["default"] = 1.0


def keys_decide(module: Any, query: Any, key: Any, value: Any, *rest: Any, **others: Any) -> Any:
    """Values that a later pass uses get a gradient only if keys do."""
    out = original_attention(module, query, key, value, *rest, **others)
    tree = others.get("tree")
    if tree is not None and module.layer_idx in tree.kept and not key.requires_grad:
        kept = tree.kept[module.layer_idx]
        tree.kept[module.layer_idx] = replace(
            kept, leaves=(kept.leaves[0], kept.leaves[1].detach())
        )
    return out


def nothing(*_: Any) -> None: ...


def values_of_some_layers(*_: Path) -> None:
    gradients_are_those_of_whole_weights(lora=Lora(3, 2, ("v_proj", "0.mlp.down_proj")))


Law = Callable[[Path, Path], object]
PLANTED: dict[str, tuple[str, Any, Law]] = {
    "the merge doubles the scale": ("trainer.policy.merged", doubled, merged_weights_are_exact),
    "engines get twice the adapter": ("trainer.policy.merged", doubled, published_is_trained),
    "engines get the base": ("trainer.policy.merged", forgotten, published_is_trained),
    "the merge is stale": (
        "trainer.policy.merged",
        stale,
        a_folder_is_recognised_until_the_next_step,
    ),
    "alpha is ignored": ("trainer.policy.add_adapter", without_alpha, merged_weights_are_exact),
    "a base weight is trained": ("trainer.policy.add_adapter", thawed, only_the_adapter_is_trained),
    "the adapter is not loaded": (
        "trainer.lora.load_adapter",
        nothing,
        going_on_equals_never_having_stopped,
    ),
    "the adapter's prefix is missing": ("trainer.lora._PREFIX", "", a_checkpoint_is_complete),
    "the checkpoint's model is the base": (
        "trainer.policy.merged",
        forgotten,
        a_checkpoint_is_complete,
    ),
    "the adapter stays on": (
        "trainer.policy.switched_off",
        nullcontext,
        without_the_adapter_it_is_the_base,
    ),
}


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("error", PLANTED)
def test_a_planted_error_is_noticed(
    error: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, wrong, law = PLANTED[error]
    monkeypatch.setattr(place, wrong)
    with pytest.raises(AssertionError):
        law(tiny_model_dir, tmp_path)


def test_that_values_need_gradients_although_keys_do_not_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    values_of_some_layers()
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, trainer.tree_attention.NAME, keys_decide)
    with pytest.raises(AssertionError):
        values_of_some_layers()
