"""Training on recorded sessions that another grader has graded: `any-agent regrade --train`.

``python -m trainer.regraded SESSIONS --run FOLDER --out DIR [key=value ...]``. From the trial's
latest checkpoint, with its optimizer, the steps are made as those of a run: the same baselines,
masks of old tokens, importance weights and settings. Nothing of the trial changes.
"""

from __future__ import annotations

import argparse
import statistics
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
from trainer.from_config import learning_rate
from trainer.manifests import ManifestStore
from trainer.policy import Policy
from trainer.publisher import WeightVersions
from trainer.run_checkpoints import RunCheckpoints
from trainer.step_maker import StepMaker
from trainer.weight_folders import copy_tokenizer, save_pretrained


def run(arguments: argparse.Namespace) -> int:
    """Train, and write the model; return 1 if there were ``problems`` before."""
    run_dir, out = RunDir(Path(arguments.run)), Path(arguments.out)
    sessions = Path(arguments.sessions)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        try:
            config = _config(run_dir, arguments.overrides)
            checkpoints = RunCheckpoints(config, run_dir, DiskSpace())
            policy, _ = checkpoints.load(None)
            # Its service may run on, and remove the checkpoint meanwhile.
            copy_tokenizer(checkpoints.tokenizer, scratch)
            checkpoints.load_frozen(policy, config.train.frozen_models)
            versions, start = WeightVersions(run_dir.state), policy.steps
            print(f"trainer   from step {start}, {checkpoints.latest or config.model.path}")
            groups = _groups(sessions, config, versions, start)
        finally:
            sessions.unlink()
        # The run's own manifests are of its own steps.
        steps = StepMaker(config, ManifestStore(scratch / "manifests"), checkpoints)
        trained = _train(config, policy, steps, versions, groups)
        if not trained:
            raise ConfigError(
                f"no session is left to train on at step {start}, so nothing is written. Sessions "
                "of older weights need a higher rollout.eta=N, and a group needs sessions whose "
                "new rewards differ"
            )
        with atomic_folder(out) as made:
            save_pretrained(policy, scratch, made)
            if policy.config.lora is not None:
                save_adapter(policy, made / FOLDER)
    print(f"model     {out}: {policy.steps - start} steps on {trained} sessions")
    return 1 if arguments.problems else 0


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
    least = min(config.sessions.min_group_size, config.sessions.group_size)
    for group in groups.values():
        if group[0].group_id != group[0].session_id and len(group) < least:
            reasons["of groups with fewer than sessions.min_group_size"] += len(group)
        elif (reason := judge.reject_reason(group)) is not None:
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
    steps: StepMaker,
    versions: WeightVersions,
    groups: Sequence[Group],
) -> int:
    """Make a step of each batch; return how many sessions were trained on."""
    batches, trained = list(_batches(groups, config.rollout.batch_size)), 0
    last = policy.steps + len(batches)
    if not learning_rate(config.train, last, steps.last_step):
        raise ConfigError(
            f"train.lr_schedule={config.train.lr_schedule} has ended at step {last}, with a "
            "learning rate of 0: add train.lr_schedule=constant"
        )
    for of_step in batches:
        taken = steps.manifest(policy, of_step, versions, [])
        batch = steps.batch(policy, of_step, taken)
        result = steps.optimize(policy, batch, taken)
        for reason, count in sorted(Counter(batch.rejected.values()).items()):
            print(f"left out  {count} sessions of this batch: {reason}")
        if result is None:
            continue
        trained += len(batch.trained)
        print(
            f"step {policy.steps:<4} {len(batch.trained)} sessions, {result.stats.tokens} tokens, "
            f"mean reward {statistics.fmean(batch.scores):.3f}, loss {result.stats.loss:.4f}, "
            f"gradient {result.grad_norm:.3g}, rate {result.learning_rate:.3g}",
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
    parser.add_argument("--problems", type=int, default=0)
    parser.add_argument("overrides", nargs="*")
    arguments = parse(parser, argv)

    def train() -> int:
        return run(arguments)

    return guarded(train)


if __name__ == "__main__":
    sys.exit(main())
