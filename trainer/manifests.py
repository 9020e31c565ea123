"""Manifests: the sessions of each train step, durable before the step changes anything.

A trainer that resumes from a checkpoint repeats the later steps from their manifests.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count, groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from any_agent.errors import AnyAgentError, ConfigError, TrainingError
from any_agent.rollout import Consumed
from any_agent.rundir.layout import numbered, write_json
from any_agent.runtime.atomic_files import write_atomic
from any_agent.types import Row, SampledSession
from any_agent.workflow.tensor_checks import PER_TOKEN
from trainer.loss import LossConfig

FORMAT = 4
# fmt: off
SETTINGS = (
    "discount", "normalize_std", "dynamic_sampling", "max_row_tokens", "preset",
    "advantage_estimator", "aggregation", "constant_length", "overlong_length", "overlong_buffer",
    "overlong_penalty", "minibatches", "epochs_per_batch", "kl_reward_coef", "reference_model",
    "reward_coef", "teacher", "group_by", "mask_truncated",
    "lr", "betas", "weight_decay", "grad_clip", "loss",
    *(constant.name for constant in fields(LossConfig) if constant.name != "name"),
)
# fmt: on
"""The settings of `train` that decide what a step does."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """One step: its sessions in their order, and all settings that decide what it does."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")
    step: int
    """The number of train steps once this one is made."""
    groups: list[list[str]]
    """Every session of the batch by its group, also those with nothing to train on."""
    trained: list[str]
    rejected: dict[str, str]
    """Reasons by session."""
    tokens: list[int]
    """Trained tokens of each row."""
    versions: dict[int, int]
    """The train steps behind each weight version that sampled a token."""
    eta: int
    settings: dict[str, Any]
    """The settings of `train` that the step was made with, :data:`SETTINGS`: `lr` is its own
    learning rate."""
    pass_tokens: dict[str, int]
    """The passes that were chosen, :attr:`trainer.pass_runner.PassRunner.chosen`."""
    positions: list[int]
    """The items of the dataset that this step finishes: those of its groups, and those that were
    left out since the step before, because they gave nothing to train on."""
    frozen: dict[str, dict[str, Any]]
    """The name and the weights of the reference model and the teacher, by their roles."""
    origin: dict[str, Any] | None
    """:attr:`trainer.run_checkpoints.RunCheckpoints.origin`."""

    def __post_init__(self) -> None:
        if odd := self.settings.keys() ^ set(SETTINGS):
            raise ValueError(f"settings: {', '.join(sorted(odd))} is missing or unknown")

    @property
    def sessions(self) -> list[str]:
        return [id for group in self.groups for id in group]

    def require_same(
        self, trained: Sequence[str], rejected: Mapping[str, str], tokens: Sequence[int]
    ) -> None:
        """Raise TrainingError where these differ from what the step trained on."""
        if (trained, rejected, tokens) == (self.trained, self.rejected, self.tokens):
            return
        differ = set(trained) ^ set(self.trained)
        differ |= {id for id, _ in rejected.items() ^ self.rejected.items()}
        how = f"in {', '.join(sorted(differ)[:8])}" if differ else "in their order or tokens"
        raise TrainingError(
            f"step {self.step} cannot be repeated exactly: its {len(self.sessions)} sessions "
            f"have changed {how}; it trained on {sum(self.tokens)} tokens, now there are "
            f"{sum(tokens)}"
        )


_MANIFEST = TypeAdapter(Manifest)


class ManifestStore:
    """The manifests of a run, one file per step, and beside it the rows of its sampled sessions."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, manifest: Manifest, sampled: Sequence[SampledSession] = ()) -> None:
        """Write a manifest durably, and remove those of later steps: an abandoned history's."""
        if sampled:
            # First: a manifest names nothing that is missing.
            write_sessions(self._rows(manifest.step), sampled)
        write_json(self.path(manifest.step), {"format": FORMAT, **asdict(manifest)})
        for step in self.steps():
            if step > manifest.step:
                self.remove(step)

    def read(self, step: int) -> Manifest:
        """Read a step's manifest; errors as :func:`_unreadable`."""
        path = self.path(step)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data.pop("format") != FORMAT:
                raise ValueError("it was written by another version of any-agent")
            manifest = _MANIFEST.validate_python(data)
            if manifest.step != step:
                raise ValueError(f"it is of step {manifest.step}")
            return manifest
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)[0]
            problem = f"{'.'.join(map(str, found['loc']))}: {found['msg']}"
            raise _unreadable(path, ValueError(problem)) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _unreadable(path, error) from error

    def sampled(self, step: int) -> Mapping[str, SampledSession]:
        """Return a step's sessions that no rank's journal has, by id; raises as :meth:`read`."""
        return read_sessions(self._rows(step))

    def after(self, step: int) -> list[int]:
        """Return the later steps with a manifest; TrainingError where one in between is missing."""
        later = [taken for taken in self.steps() if taken > step]
        if later != list(range(step + 1, step + 1 + len(later))):
            raise TrainingError(
                f"the newest usable checkpoint is of step {step}, but of the later steps only "
                f"{_listed(later)} have manifests in {self._folder}; remove these files to "
                "continue from that checkpoint without them"
            )
        return later

    def steps(self) -> list[int]:
        return list(numbered(self._folder, r"step-(\d{8,})\.json"))

    def remove(self, step: int) -> None:
        self.path(step).unlink(missing_ok=True)
        self._rows(step).unlink(missing_ok=True)

    def set_aside(self, steps: Sequence[int]) -> None:
        """Rename the manifests of steps that cannot be repeated to `lost-*`, for people to read.

        ``steps`` are the last ones, in their order.
        """
        for step in reversed(steps):  # the last first: an interruption leaves no gap
            for path in (self._rows(step), self.path(step)):
                if path.exists():
                    path.replace(path.with_name(path.name.replace("step-", "lost-", 1)))

    def prune(self, oldest: int) -> None:
        """Remove the manifests that no resume needs: those up to the oldest checkpoint's step."""
        for step in self.steps():
            if step <= oldest:
                self.remove(step)

    def path(self, step: int) -> Path:
        """Return the path of a step's manifest."""
        return self._folder / f"step-{step:08d}.json"

    def _rows(self, step: int) -> Path:
        return self.path(step).with_suffix(".safetensors")


def _unreadable(path: Path, error: Exception) -> AnyAgentError:
    """Return ConfigError for a file without the right content, TrainingError for one that perhaps
    can be read later."""
    what = error.strerror if isinstance(error, OSError) else error
    kind = TrainingError if isinstance(error, OSError) else ConfigError
    return kind(
        f"{path} cannot be read: {what}; training needs it to repeat its step exactly: restore it "
        "from a copy, or remove the files of this and of all later steps from its folder to "
        "continue from the checkpoint before them without these steps"
    )


def _listed(steps: list[int]) -> str:
    return ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")


MAX_REMEMBERED = 65_536  # session ids: many times what can be finalized and not yet acknowledged


class ConsumedSessions(dict[str, Consumed]):
    """The fate of each session that a batch took, the oldest first, so that none counts twice."""

    def add(self, trained: Iterable[str], rejected: Mapping[str, str], step: int | None) -> None:
        """Record the sessions that ``step``, or no step, took; ``rejected`` has the reasons."""
        self |= dict.fromkeys(trained, Consumed(step))
        # One object for all sessions of a fate: there are tens of thousands of them.
        fates = {why: Consumed(step, why) for why in rejected.values()}
        self |= {id: fates[why] for id, why in rejected.items()}
        for id in list(islice(self, max(0, len(self) - MAX_REMEMBERED))):
            del self[id]

    def dump(self) -> dict[str, Any]:
        """Return the record as plain JSON: sessions in a row with one fate share an entry."""
        fates = groupby(self.items(), key=itemgetter(1))
        listed = [{**fate._asdict(), "sessions": [id for id, _ in same]} for fate, same in fates]
        return {"consumed": listed}

    def load(self, state: Mapping[str, Any]) -> None:
        """Add what :meth:`dump` returned."""
        for entry in state["consumed"]:
            self |= dict.fromkeys(entry["sessions"], Consumed(entry["step"], entry["rejected"]))


_HEADER = ("session_id", "group_id", "task_id", "temperatures", "roles")
"""The fields of a sampled session, but for its rows, which the file's header has."""


def write_sessions(path: Path, sessions: Sequence[SampledSession]) -> None:
    """Write a step's sampled sessions durably; an earlier file is replaced.

    Sessions of external agents are in their ranks' journals; the sessions that a workflow of this
    process returned are nowhere else. The file has the tensors of each row by the row's number, and
    in its header what belongs to which session.
    """
    rows = [row for session in sessions for row in session.rows]
    # A copy of each in its own order: safetensors writes the memory of a view as it lies.
    tensors = {
        f"{k}/{name}": np.array(row[name], order="C")
        for k, row in enumerate(rows)
        for name in (*PER_TOKEN, "rewards")
        if name in row
    }
    header = [{name: getattr(session, name) for name in _HEADER} for session in sessions]
    write_atomic(path, save(tensors, metadata={"sessions": json.dumps(header)}))


def read_sessions(path: Path) -> dict[str, SampledSession]:
    """Return the sessions by their ids, in the order of writing; {} without a file.

    Raises as :func:`_unreadable`.
    """
    if not path.exists():
        return {}
    try:
        rows: dict[int, Row] = {}
        with safe_open(path, framework="numpy") as file:
            header = json.loads(file.metadata()["sessions"])
            for key in file.keys():  # noqa: SIM118
                number, name = key.split("/")
                rows.setdefault(int(number), {})[name] = file.get_tensor(key)
        numbers = count()
        return {
            one["session_id"]: SampledSession(
                rows=[rows[next(numbers)] for _ in one["temperatures"]],
                **{name: one[name] for name in _HEADER},
            )
            for one in header
        }
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise _unreadable(path, error) from error
