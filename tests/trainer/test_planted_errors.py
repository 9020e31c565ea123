"""Each law fails when the error it guards against is planted; unplanted, it holds.

An error is a change of the product's text, made in the functions that run. `tests/mutants.toml` has
more of them.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from tests.support.trainer.policies import (
    assert_same,
    dense_gradients,
    random_rows,
    small_policy,
    trainer_gradients,
)
from tests.trainer import test_adapter_files as adapter_files
from tests.trainer import test_advantage as advantage
from tests.trainer import test_batch as batch
from tests.trainer import test_kl_reward as kl_reward
from tests.trainer import test_lora as lora
from tests.trainer import test_packing as packing
from tests.trainer import test_roles as roles
from tests.trainer import test_teacher as teacher
from tests.trainer import test_tree as tree
from tests.trainer import test_trl as trl
from tests.trainer import test_truncated as truncated
from tests.trainer import test_updates as updates
from tests.trainer.test_surrogates import CONFIGS, equals_the_formula
from trainer.lora import Lora
from trainer.loss import LossConfig, PolicyLoss


def dense_law(packing: str = "tree") -> None:
    policy = small_policy(head_chunk=7, packing=packing)
    rows = random_rows(0)
    _, got = trainer_gradients(policy, rows, token_budget=60)
    assert_same(got, dense_gradients(policy, rows, LossConfig()), atol=1e-10)


def values_of_some_layers_law() -> None:
    config = {"lora": Lora(3, 2, ("v_proj", "0.mlp.down_proj"))}
    lora.test_gradients_are_those_of_whole_weights(config)


LAWS: dict[str, Callable[..., Any]] = {
    "dense": dense_law,
    "padded": partial(dense_law, "rows"),
    "trl": partial(trl.preset_equals_trl, "grpo"),
    "worked example": advantage.test_advantages_of_the_documents_worked_example_hold,
    "staleness": packing.test_staleness_counts_steps_and_keeps_what_is_exactly_eta_old,
    "trees": partial(tree.test_logprobs_loss_and_gradients_are_those_of_rows, "qwen3", 10_000),
    "divided trees": partial(tree.test_logprobs_loss_and_gradients_are_those_of_rows, "qwen3", 9),
    "divided weights": partial(tree.test_a_process_of_several_gives_each_row_its_own_logprobs, 9),
    "updates": partial(updates.test_several_updates_equal_the_plain_definition, "rows", 2),
    "inputs": partial(updates.test_the_loss_gets_what_was_computed_before, "tree", 9),
    "high entropy": partial(
        updates.test_only_the_tokens_of_the_highest_entropies_are_trained_on, 9
    ),
    "undo": updates.test_an_update_that_is_not_finite_undoes_the_step,
    **{name: partial(equals_the_formula, name) for name in CONFIGS},
    "returns": partial(
        kl_reward.test_a_token_loses_what_follows_from_it_with_reinforce_pp, "reinforce_pp"
    ),
    "trl vespo": partial(trl.test_losses_over_given_logprobs_equal_those_of_trl, "vespo", 1),
    "trl gmpo": partial(trl.test_losses_over_given_logprobs_equal_those_of_trl, "gmpo", 0),
    "length-weighted": partial(advantage.advantages_equal_their_formula, "opo", "none"),
    "roles": roles.roles_law,
    "truncated": truncated.truncated_law,
    "reverse distillation": teacher.distillation_law,
    "forward distillation": partial(teacher.distillation_law, "forward"),
    "divided distillation": partial(teacher.distillation_law, "reverse", "tree", 9),
    "distillation of any loss": partial(teacher.test_every_loss_gets_the_same_distillation, "gspo"),
    "rewards beside a teacher": teacher.test_the_rewards_weight_scales_every_advantage,
    "squares": updates.second_moment_law,
    **{
        f"rejection {k}": partial(updates.rejection_law, f"rejection_{k}")
        for k in ("k1", "k2", "k3")
    },
    "success": advantage.test_maxrl_divides_by_the_mean_score_and_refuses_negative_ones,
    "trl gspo": partial(trl.test_losses_over_given_logprobs_equal_those_of_trl, "gspo", 0),
    "trl dr_grpo": partial(trl.preset_equals_trl, "dr_grpo"),
    "trl cispo": partial(trl.preset_equals_trl, "cispo"),
    "trl rloo": partial(trl.test_rloo_advantages_and_gradients_equal_those_of_trl, False, 0.0),
    "trl rloo, kl": partial(trl.test_rloo_advantages_and_gradients_equal_those_of_trl, False, 0.2),
    "batch of groups": partial(
        advantage.advantages_equal_their_formula, "reinforce_pp_baseline", "batch"
    ),
    "deviation of the batch": partial(advantage.advantages_equal_their_formula, "grpo", "batch"),
    **{f"mean, {name}": partial(batch.mean_law, name) for name in ("session", "turn", "constant")},
    "long outputs": batch.test_long_outputs_lose_reward_each_by_itself,
    "values of some layers": values_of_some_layers_law,
    "switched off": lora.test_without_the_adapter_it_is_the_base_bit_for_bit,
}
OF_ADAPTERS: dict[str, Callable[[Path, Path], Any]] = {
    "merged": lora.merged_weights_are_exact,
    "published": lora.published_is_trained,
    "recognised": lora.test_a_folder_is_recognised_until_the_next_step,
    "only the adapter": lora.test_training_an_adapter_changes_no_weight_of_the_base,
    "resumed": adapter_files.test_going_on_equals_never_having_stopped_bit_for_bit,
    "complete": adapter_files.a_checkpoint_is_complete,
}
"""Laws of a model and an empty folder."""


PLANTED = r"""
the label's own hidden state | padded
    packing: cat([own - 1 + place -> cat([own + place
shifted mask | dense + padded
    rows: = row["loss_mask"].nonzero()[:, 0] -> = row["loss_mask"][:-1].nonzero()[:, 0] + 1
missing temperature | dense + trl
    logprobs: None), temperatures[edges]) -> None), torch.ones_like(temperatures[edges]))
one temperature for all rows | dense
    logprobs: None), temperatures[edges]) -> None), temperatures[edges] * 0 + temperatures.mean())
baseline over turns | worked example
    advantage: return [score for session in group if (score := session.score) is not None]
    -> return [r for s in group for r, c in zip(s.rewards, s.counted) if c]
deviation not offset | trl
    advantage: _equal(pool) else std + STD_FLOOR -> _equal(pool) else std + 1e-2
staleness off by one | staleness
    rows: age > eta -> age >= eta
staleness off by one, lenient | staleness
    rows: age > eta -> age > eta + 1
versions for steps | staleness
    rows: step - step_of_version[version], eta -> max(step_of_version) - version, eta
N of the micro-batch | dense
    loss: sum() / total_tokens -> sum() / logprobs.numel()
no importance weight | dense
    loss: log_weight = proximal - inputs.behaviour -> log_weight = 0 * proximal
no cap | dense
    loss: clamp(config.is_floor, config.is_cap) -> clamp(config.is_floor)
gradient through the weight | trl
    loss: = importance_weight(proximal, -> = importance_weight(logprobs,
a sibling is seen | trees
    trie: causal + within + _past_blocks(past, home, offset, lengths, levels)
    -> [Block(0, total, 0, total, None, True)]
an ancestor pass is forgotten | divided trees
    trie: causal + within + _past_blocks(past, home, offset, lengths, levels) -> causal + within
a lost gradient of keys and values | divided trees
    tree_attention: [tensor for tensor, _ in used], [grad for _, grad in used] -> [], []
one item for two rows | trees
    packing: places = order[ends[number] : ends[number + 1]]
    -> places = order[ends[number] : ends[number + 1]]; edges = np.stack([sources[places],
    items.labels.numpy()[places]]); places = places[np.sort(np.unique(edges, axis=1,
    return_index=True)[1])]
advantages averaged over an edge | trees
    packing: sources = np.concatenate(trie.sources)
    -> sources = np.concatenate(trie.sources); edges = np.stack([sources, items.labels.numpy()]);
    edges = np.unique(edges, axis=1, return_inverse=True)[1].ravel(); a =
    items.inputs["advantages"].numpy(); a[:] = (np.bincount(edges, a) / np.bincount(edges))[edges]
parts of attention weighted alike | trees
    tree_attention: torch.sigmoid(part - lse) -> torch.full_like(part, 0.5)
rows numbered by their pass | divided weights
    packing: one = one if len(one.items) else replace(one, items=idle.items)
    -> one = replace(one, items=replace(one.items, sequences=torch.full_like(one.items.sequences,
    place)))
no proximal policy | updates
    policy: rows = with_values(rows, "proximal", proximal) -> pass
N of the whole batch | updates
    policy: [count_trained(part) for part in parts] -> [200 for part in parts]
sums over a row | inputs
    updates: of_row.double().sum() / max(len(of_row), 1) -> of_row.double().sum()
entropies of one row | high entropy
    updates: [(e >= least) -> [(e >= np.quantile(e.numpy(), 1 - share))
products of another row | inputs
    updates: out.append(row | {"sequence_product"
    -> out.append(rows[(len(out) + 1) % len(rows)] | {"sequence_product"
VESPO's signs are swapped | vespo + trl vespo
    surrogates: inputs.sequence_product, inputs.advantages < 0
    -> inputs.sequence_product, inputs.advantages >= 0
VESPO without its decay | vespo
    surrogates: + lam * (1 - whole)) -> )
VESPO weighs tokens as well | trl vespo
    loss: torch.ones_like(weight) if self.sequence_product else weight -> weight
clipped at one side | dual clip
    surrogates: ratio if config.dual_clip is None else ratio.clamp(max=config.dual_clip) -> ratio
rows of all signs are dropped | off policy
    loss: (inputs.advantages < 0) & (divergence -> (divergence
the updates are no divergence | off policy
    loss: divergence = divergence - inputs.sequence_log_ratio -> pass
no lower bound | two bounds
    loss: raw.clamp(config.is_floor, -> raw.clamp(0.0,
k3 without its linear part | k3_unbiased + k3 + trl cispo
    loss: torch.exp(-d) + d - 1 -> torch.exp(-d) - 1
the whole divergence for each token | returns
    kl_reward: += factor * ( -> += 0 * (
a token's own divergence given back | returns
    kl_reward: divergence.cumsum(0) - divergence -> divergence.cumsum(0)
a reward for divergence | returns
    kl_reward: .double() - values).nan -> .double() * -1 + values).nan
no divergence in the reward | trl rloo, kl
    kl_reward: rewards=[r - next(lost, 0.0) if one else r -> rewards=[r
moments are not undone | undo
    updates: in state.items():\n                    local_part
    -> in ():\n                    local_part
nothing is undone | undo
    policy: before.restore() -> pass
the wrong sign | dense
    loss: loss = per_token.sum() -> loss = -per_token.sum()
a token's ratio for the row's | trl gspo
    surrogates: ratio * torch.exp(inputs.sequence_log_ratio) -> torch.exp(logprobs - proximal)
a row's ratio without gradient | gspo
    surrogates: ratio = torch.exp(logprobs - logprobs.detach()) -> ratio = 0 * logprobs + 1
GMPO's clipped tokens learn | gmpo + trl gmpo
    surrogates: torch.where(inside, torch.exp(logprobs - logprobs.detach()), 1.0)
    -> torch.exp(logprobs - logprobs.detach())
ratios are not clipped in the mean | inputs
    updates: clipped.append(clipped_log_ratio(values, proximal, inputs.advantages, config))
    -> clipped.append(values - proximal)
DPPO leaves nothing out | dppo
    surrogates: .masked_fill(low | high, 0.0) -> .masked_fill(low & high, 0.0)
OPO without its lengths | length-weighted
    advantage: [(s.length, score) for s -> [(1, score) for s
a row is rejected on one side alone | rejection k1
    loss: (d.mean().abs(), -> (d.mean(),
k2 of a row's mean | rejection k2
    loss: d.square().mean() / 2 -> d.mean().square() / 2
k3 of the other direction | rejection k3
    loss: (torch.expm1(d) - d).mean() -> (torch.expm1(-d) + d).mean()
rejected rows are trained on | rejected rows + second moment
    loss: (inputs.rejected, inputs.outlier) -> (inputs.outlier,)
a bound of single squares | squares
    updates: means = np.cumsum(every) / np.arange(1, len(every) + 1) -> means = every
outliers are trained on | second moment
    loss: left_behind | (gone > 0) -> left_behind
cut outputs are trained on | truncated
    batch: mask_cut(row) if masks else row -> row
the kinds are swapped | reverse distillation + forward distillation
    pass_runner: kind == "forward") -> kind != "forward")
distributions at one temperature | reverse distillation + forward distillation
    logprobs: exact / temperatures.to(exact.dtype)[:, None], -1) -> exact, -1)
the divergence's own gradient is forgotten | reverse distillation
    logprobs: (ours - theirs - divergences[:, None]) -> (ours - theirs)
another token's teacher | forward distillation
    logprobs: taught.hidden[edges]) -> taught.hidden[edges].flip(0))
N of the micro-batch for the teacher | divided distillation
    loss: config.teacher_coef / total_tokens -> config.teacher_coef / divergences.numel()
tokens taught alike | distillation of any loss
    loss: u = 1.0 if inputs.token_weights is None else inputs.token_weights -> u = 1.0
the reward keeps its weight | rewards beside a teacher
    batch: {"advantages": config.reward_coef * row["advantages"]} -> {}
one baseline for all roles | roles
    advantage: counted=[own == role for own in self.counted_roles] -> counted=self.counted
MaxRL divides by nothing | success
    advantage: scale = baseline if baseline else 1.0 -> scale = 1.0
CISPO drops clipped tokens | cispo
    surrogates: -ratio.clamp(low, high) * inputs.advantages * logprobs
    -> _clipped(torch.exp(logprobs - proximal), inputs.advantages, config).loss
REINFORCE clips | reinforce
    surrogates: return Surrogate(-ratio * inputs.advantages, ratio)
    -> return _clipped(ratio, inputs.advantages, config)
REINFORCE forgets pi_prox | reinforce
    surrogates: ratio = torch.exp(logprobs - proximal)\n    return
    -> ratio = torch.exp(logprobs - logprobs.detach())\n    return
SAPO's temperatures are swapped | sapo
    surrogates: positive = inputs.advantages > 0 -> positive = inputs.advantages < 0
k2 without its half | k2
    loss: d.square() / 2 -> d.square()
masked weights are truncated | masked
    loss: raw.masked_fill(beyond, 0.0) -> raw.clamp(max=config.is_cap)
a token's weight for the row's | truncated rows
    loss: log_weight = inputs.sequence_log_weight -> pass
the importance weight on all terms | all terms
    loss: + config.kl_coef * kl -> + weight * config.kl_coef * kl
no weights of tokens | trl dr_grpo
    loss: per_token = per_token * inputs.token_weights -> pass
entropies without gradient | trl cispo
    pass_runner: self.fused, entropy_gradient) -> self.fused, False)
the own score in the baseline | trl rloo
    advantage: (math.fsum(pool) - score) / (len(pool) - 1) -> math.fsum(pool) / len(pool)
dropped groups in the batch's deviation | deviation of the batch + batch of groups
    advantage: strict=True) if stay for score in pool] -> strict=True) for score in pool]
sessions counted once a row | mean, session + mean, constant
    batch: sessions if rows]
    -> sessions for rows in [[row] for row in rows]]; sessions = [[row] for rows in sessions for
    row in rows]
rows counted once a session | mean, turn
    batch: turns * n if aggregation == "turn" else ->
a penalty above the length | long outputs
    advantage: length - (config.overlong_length - buffer) -> length - config.overlong_length
values need a gradient only where keys do | values of some layers
    tree_attention: requires_grad_(one.requires -> requires_grad_(key.requires
the merge doubles the scale | merged + published
    lora: alpha=layer.scaling -> alpha=2 * layer.scaling
engines get the base | published + complete
    lora: if layer is not None and name.endswith(".weight"): -> if False:
the merge is stale | recognised
    lora: out.append(tensor)
    -> out.append(model.__dict__.setdefault("known", {}).setdefault(name, tensor.clone()))
alpha is ignored | merged
    lora: lora_alpha=lora.alpha -> lora_alpha=lora.rank
a base weight is trained | only the adapter
    lora: generator = -> model.model.norm.weight.requires_grad_(True); generator =
the adapter is not loaded | resumed
    adapter_files: load_shards(folder, tensors, "the adapter") -> pass
the adapter's prefix is missing | complete
    adapter_files: _PREFIX + name -> name
the adapter stays on | switched off
    lora: layer.enable_adapters(False) -> pass
"""
"""A name, the laws that the error breaks, and below it an edit: the module, old and new text."""


PLANTS = {
    name: (" ".join(map(str.strip, edit.splitlines())), laws.split(" + "))
    for name, laws, edit in re.findall(r"^(\S.*) \| (.*)\n((?:    .*\n)+)", PLANTED, re.M)
}


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """The functions of a module or class, without those within functions."""
    for one in code.co_consts:
        if isinstance(one, CodeType) and "<" not in one.co_name:
            yield from [one] if one.co_flags & inspect.CO_OPTIMIZED else codes_of(one)


def functions_of(owner: Any, module: str) -> Iterator[FunctionType]:
    """The functions of a module or class, as they are below decorators."""
    for one in list(vars(owner).values()):
        if isinstance(one, PolicyLoss):
            one = one.surrogate
        one = inspect.unwrap(getattr(one, "__func__", one))
        if isinstance(one, FunctionType):
            yield one
        elif isinstance(one, type) and one.__module__ == module:
            yield from functions_of(one, module)


def plant(edit: str, patch: pytest.MonkeyPatch) -> None:
    """Give the functions of a module of the trainer the code that they have after an edit."""
    place, _, change = edit.partition(": ")
    old, arrow, new = f"{change} ".replace("\\n", "\n").partition(" -> ")
    module = importlib.import_module(f"trainer.{place}")
    text = inspect.getsource(module)
    assert arrow and text.count(old) == 1, f"{place}.py has {text.count(old)} times {old!r}"
    codes = {
        code.co_qualname: code
        for code in codes_of(compile(text.replace(old, new.strip()), str(module.__file__), "exec"))
    }
    for one in functions_of(module, module.__name__):
        code = codes.get(one.__code__.co_qualname)
        if code is not None and code != one.__code__:
            patch.setattr(one, "__code__", code)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.service
def test_each_law_holds_while_no_error_is_planted(law: str) -> None:
    LAWS[law]()


@pytest.mark.filterwarnings("ignore:Found missing adapter keys")
@pytest.mark.parametrize("error", PLANTS)
@pytest.mark.service
def test_each_planted_error_breaks_its_laws(
    error: str, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit, laws = PLANTS[error]
    plant(edit, monkeypatch)
    for law in laws:
        with pytest.raises(AssertionError):
            if law in LAWS:
                LAWS[law]()
            else:
                OF_ADAPTERS[law](tiny_model_dir, tmp_path / law)
