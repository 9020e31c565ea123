"""Training on recorded sessions that another grader has graded: `any-agent regrade --train`.

``python -m trainer.regraded SESSIONS --run FOLDER --out DIR [key=value ...]``. From the trial's
latest checkpoint, with its optimizer, the steps are made as those of a run: the same baselines,
masks of old tokens, importance weights and settings. Nothing of the trial changes.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from any_agent.config import Config, load_config
from any_agent.errors import ConfigError
from any_agent.record.trajectory_file import read_trajectories
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import atomic_folder
from any_agent.runtime.command_line import CommandParser, guarded, parse
from any_agent.runtime.disk_space import DiskSpace
from any_agent.types import Trajectory
from trainer.adapter_files import FOLDER, save_adapter
from trainer.batch import Group, ZeroVarianceGroups, in_stable_order, versions_in
from trainer.manifests import ManifestStore
from trainer.policy import Policy
from trainer.publisher import WeightVersions
from trainer.run_checkpoints import RunCheckpoints
from trainer.step_maker import StepMaker
from trainer.weight_folders import save_pretrained


def run(arguments: argparse.Namespace) -> int:
    """Train, and write the model."""
    run_dir, out = RunDir(Path(arguments.run)), Path(arguments.out)
    config = _config(run_dir, arguments.overrides)
    checkpoints = RunCheckpoints(config, run_dir, DiskSpace())
    policy, _ = checkpoints.load(None)
    checkpoints.load_frozen(policy, config.train.frozen_models)
    versions, start = WeightVersions(run_dir.state), policy.steps
    print(f"trainer   from step {start}, {checkpoints.latest or config.model.path}")
    groups = _groups(Path(arguments.sessions), config, versions, start)
    Path(arguments.sessions).unlink()
    trained = _train(config, policy, checkpoints, versions, groups)
    if not trained:
        raise ConfigError(
            f"no session is left to train on at step {start}, so nothing is written. Sessions of "
            "older weights need a higher rollout.eta=N, and a group needs sessions whose new "
            "rewards differ"
        )
    with atomic_folder(out) as folder:
        save_pretrained(policy, checkpoints.tokenizer, folder)
        if policy.config.lora is not None:
            save_adapter(policy, folder / FOLDER)
    print(f"model     {out}: {policy.steps - start} steps on {trained} sessions")
    return 0


def _config(run_dir: RunDir, overrides: Sequence[str]) -> Config:
    """Return the settings of the run's last start, with these changed, for one process."""
    saved = run_dir.path / "config.yaml"
    if not saved.is_file():
        raise ConfigError(f"{saved} is not there: the trial was never started")
    config = load_config(saved, overrides, environ={})
    train = config.train.model_copy(update={"processes": 1})
    return config.model_copy(update={"train": train})


def _groups(path: Path, config: Config, versions: WeightVersions, step: int) -> list[Group]:
    """Return the groups that teach something at this step, the oldest first, and say what is left
    out. Only these are in memory at once."""

    def is_fresh(session: Trajectory) -> bool:
        made = versions.steps_of(versions_in([[session]])).values()
        return 0 <= step - max(made, default=step) <= config.rollout.eta

    fresh, old = set(), Counter[str]()
    for one in _read(path):
        if is_fresh(one):
            fresh.add(one.group_id)
        else:
            old[one.group_id] += 1
    # A session that is too old counts in the baseline of a group with others.
    groups: dict[str, list[Trajectory]] = {}
    for one in _read(path):
        if one.group_id in fresh:
            groups.setdefault(one.group_id, []).append(one)
    judge, reasons, kept = ZeroVarianceGroups(config.train), Counter[str](), list[Group]()
    for group in groups.values():
        if (reason := judge.reject_reason(group)) is not None:
            reasons[reason] += len(group)
        else:
            kept.append(in_stable_order(group) if config.rollout.deterministic else group)
    too_old = sum(count for group, count in old.items() if group not in fresh)
    words = f"of weights more than rollout.eta={config.rollout.eta} steps old, or newer than these"
    reasons += Counter({words: too_old})
    for reason, count in sorted(reasons.items()):
        print(f"left out  {count} sessions: {reason}")
    print(f"sessions  {sum(map(len, kept))} in {len(kept)} groups", flush=True)
    return kept


def _read(path: Path) -> Iterator[Trajectory]:
    with path.open("rb") as file:
        yield from read_trajectories(file)


def _train(
    config: Config,
    policy: Policy,
    checkpoints: RunCheckpoints,
    versions: WeightVersions,
    groups: Sequence[Group],
) -> int:
    """Make a step of each batch; return how many sessions were trained on."""
    trained = 0
    with tempfile.TemporaryDirectory() as nowhere:
        # The run's own manifests are of its own steps.
        steps = StepMaker(config, ManifestStore(Path(nowhere)), checkpoints)
        for batch_groups in _batches(groups, config.rollout.batch_size):
            taken = steps.manifest(policy, batch_groups, versions, [])
            if not taken.settings["lr"]:
                raise ConfigError(
                    f"train.lr_schedule={config.train.lr_schedule} has ended before step "
                    f"{taken.step}, with a learning rate of 0: add train.lr_schedule=constant"
                )
            batch = steps.batch(policy, batch_groups, taken)
            result = steps.optimize(policy, batch, taken)
            for reason, count in sorted(Counter(batch.rejected.values()).items()):
                print(f"left out  {count} sessions of this batch: {reason}")
            if result is None:
                continue
            trained += len(batch.trained)
            print(
                f"step {policy.steps:<4} {len(batch.trained)} sessions, "
                f"{result.stats.tokens} tokens, mean reward "
                f"{sum(batch.scores) / max(len(batch.scores), 1):.3f}, loss "
                f"{result.stats.loss:.4f}, gradient {result.grad_norm:.3g}, rate "
                f"{result.learning_rate:.3g}",
                flush=True,
            )
    return trained


def _batches(groups: Sequence[Group], size: int) -> Iterator[list[Group]]:
    """Yield the groups in batches of at least so many sessions, but for the last one."""
    batch: list[Group] = []
    for group in groups:
        batch.append(group)
        if sum(map(len, batch)) >= size:
            yield batch
            batch = []
    if batch:
        yield batch


def main(argv: Sequence[str] | None = None) -> int:
    parser = CommandParser(prog="any-agent regrade")
    parser.add_argument("sessions")
    parser.add_argument("--run", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("overrides", nargs="*")
    arguments = parse(parser, argv)

    def train() -> int:
        return run(arguments)

    return guarded(train)


if __name__ == "__main__":
    sys.exit(main())
