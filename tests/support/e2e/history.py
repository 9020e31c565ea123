"""The history of training that survived, put together from what a run's folder keeps.

A step's manifest names the sessions that it trained on, a checkpoint all those of its past. After
a kill the trainer goes on from the latest checkpoint and makes the later steps again, from their
manifests. So what survives is one chain of steps; here it is looked for whether each session is in
it once.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from any_agent.rundir.layout import RunDir, read_json
from any_agent.types import SessionState
from trainer.manifests import MAX_REMEMBERED, ConsumedSessions


@dataclass(frozen=True, slots=True)
class Manifest:
    """What one step consumed, in its order."""

    step: int
    trained: tuple[str, ...]
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class History:
    """The sessions that checkpoints say were trained on by step, and the manifests by step."""

    consumed: Mapping[int, tuple[str, ...]]
    manifests: Mapping[int, Manifest]
    forgotten: int = 0
    """The last step that a checkpoint, which remembers so many sessions at most, may lack."""

    def trained(self) -> list[str]:
        """Every session's training effects, one entry each."""
        oldest = min(self.consumed, default=0)
        out = list(self.consumed.get(oldest, ()))
        for step in sorted(self.manifests):
            if step > oldest:
                out += self.manifests[step].trained
        return out


def read_history(run: RunDir) -> History:
    """What the folder holds now."""
    newest = _saved_step(run)
    consumed = {}
    forgotten = 0
    for path in run.checkpoints.glob("step-*"):
        step = int(path.name.removeprefix("step-"))
        # A later one is of a history that was given up.
        if step <= newest:
            taken = consumed_in(path)
            if len(taken) >= MAX_REMEMBERED:
                steps = [one.step for one in taken.values() if one.step is not None]
                forgotten = max(forgotten, min(steps))
            consumed[step] = tuple(id for id, one in taken.items() if one.rejected is None)
    manifests = [_manifest(read_json(path)) for path in _manifests(run).values()]
    by_step = {manifest.step: manifest for manifest in manifests}
    return History(consumed, by_step, forgotten)


def consumed_in(checkpoint: Path) -> ConsumedSessions:
    """The sessions that a checkpoint remembers, and their fates."""
    sessions = ConsumedSessions()
    sessions.load(read_json(checkpoint / "trainer" / "state.json")["state"])
    return sessions


def unsaved(run: RunDir) -> list[Manifest]:
    """The steps that only manifests know: a trainer that died now has to make them again."""
    newest = _saved_step(run)
    return [_manifest(read_json(p)) for step, p in _manifests(run).items() if step > newest]


def last_step(run: RunDir) -> int:
    """The last step that was begun."""
    return max([_saved_step(run), *_manifests(run)])


def _manifests(run: RunDir) -> dict[int, Path]:
    paths = run.manifests.glob("step-*.json")
    return {int(path.stem.removeprefix("step-")): path for path in paths}


def _saved_step(run: RunDir) -> int:
    """Of the checkpoint from which the trainer goes on; 0 without one."""
    latest = run.checkpoints / "latest"
    if not latest.exists():
        return 0
    return int(latest.read_text(encoding="utf-8").strip().removeprefix("step-"))


def _manifest(plain: dict[str, Any]) -> Manifest:
    return Manifest(plain["step"], tuple(plain["trained"]), tuple(plain["rejected"]))


def trained_twice(history: History) -> list[str]:
    """Sessions with more than one training effect."""
    counts = Counter(history.trained())
    for checkpoint in history.consumed.values():
        counts.update(s for s, n in Counter(checkpoint).items() if n > 1)
    return sorted(session for session, count in counts.items() if count > 1)


def contradictions(history: History) -> list[str]:
    """Where checkpoints and manifests do not tell one chain of steps."""
    out = []
    steps = sorted(history.consumed)
    for before, after in pairwise(steps):
        said = {s for k, m in history.manifests.items() if before < k <= after for s in m.trained}
        grown = set(history.consumed[after]) - set(history.consumed[before])
        lost = set(history.consumed[before]) - set(history.consumed[after])
        if said != grown or (lost and not history.forgotten):
            out.append(
                f"checkpoints {before} and {after} differ by {len(grown)} sessions, the manifests "
                f"in between name {len(said)}"
            )
    oldest, last = min(steps, default=0), max([0, *steps, *history.manifests])
    missing = set(range(oldest + 1, last + 1)) - history.manifests.keys()
    if missing:
        out.append(f"no manifest of the steps {sorted(missing)[:10]}")
    return out


def effects_against_states(
    history: History,
    states: Mapping[str, SessionState | str],
    steps: Mapping[str, int | None],
) -> tuple[list[str], list[str]]:
    """(sessions that the journals call trained without an effect in the history, the converse).

    ``steps``: the step that took each session, by its journal.
    """
    effects = set(history.trained())
    said = {session for session, state in states.items() if state == SessionState.TRAINED}
    forgotten = {s for s in said if (steps.get(s) or math.inf) <= history.forgotten}
    return sorted(said - effects - forgotten), sorted(effects - said)


def given_up(before: Iterable[Manifest], history: History) -> list[int]:
    """The steps among ``before`` that the history made with other sessions, or not at all."""
    oldest = min(history.consumed, default=0)
    out = []
    for manifest in before:
        if manifest.step > oldest:
            same = history.manifests.get(manifest.step) == manifest
        else:
            # The checkpoint's sessions stand for the manifests that it made needless.
            same = set(manifest.trained) <= set(history.consumed[oldest])
        if not same:
            out.append(manifest.step)
    return out
