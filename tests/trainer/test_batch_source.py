"""Training on a dataset: every item is done with once, whatever dies and when."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from any_agent import stats_tracker
from any_agent.errors import ConfigError, TrainingError
from any_agent.workflow import GroupedRolloutWorkflow
from tests.support.errors import fails_with
from tests.support.trainer.datasets import Alternating, DataLab
from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Lab, Method, assert_same_outcome, config_of, outcome
from trainer import loop
from trainer.manifests import ManifestStore

STEPS = 5
RUN = (
    *(f"train.steps={STEPS}", "train.checkpoint_every=2", "train.lr=1e-3", "train.seed=1"),
    *("rollout.deterministic=true", "rollout.eta=0", "rollout.batch_size=4"),
    *("rollout.max_concurrent=4", "sessions.group_size=2", "train_dataset.shuffle=false"),
)


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    return [f"root={tmp_path}", f"model.path={tiny_model_dir}", *RUN]


@pytest.fixture(scope="module")
def undisturbed(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("whole")
    lab = DataLab(config_of([f"root={root}", f"model.path={tiny_model_dir}", *RUN]))
    assert lab.trainer.train()
    return outcome(lab)


def positions(lab: DataLab) -> list[list[int]]:
    """Of each step whose manifest is kept."""
    manifests = ManifestStore(lab.trainer.dir.manifests)
    return [manifests.read(step).positions for step in manifests.steps()]


def test_a_run_over_a_dataset_trains_on_each_item_once(settings: list[str]) -> None:
    # What earlier runs of this process recorded, and no step took.
    stats_tracker.export_all()
    lab = DataLab(config_of(settings, "train.checkpoint_every=9"), items=12)
    assert lab.trainer.train()
    assert [(line["step"], line["reward"], line["sessions"]) for line in lab.metrics] == [
        (step, 0.5, 4) for step in range(1, STEPS + 1)
    ]
    # Five steps of two items each, and each item was run as often as its group is large.
    assert lab.left == {"length": 12, "seed": 1, "shuffle": False, "low": 10, "beyond": []}
    assert [lab.runs[n] for n in range(10)] == [2] * 10
    # What workflows record is in the line of a step, here the executor's own count. (Those of the
    # next step may have ended before it is written.)
    shares = [line["stats"].get("rollout/accepted") for line in lab.metrics]
    assert shares[0] == 1 and set(shares) <= {1, None}
    assert [line["epoch"] for line in lab.metrics] == [round(n / 12, 4) for n in (2, 4, 6, 8, 10)]
    # The ranks have nothing to do with it, but hear of the run and of its weights.
    assert lab.executor.acks == []
    assert lab.service.published == [(step, step) for step in range(1, STEPS + 1)]
    assert lab.service.states[0] == ("training", 0) and lab.service.states[-1][0] == "finished"


def test_what_a_step_took_is_beside_its_manifest(settings: list[str]) -> None:
    lab = DataLab(config_of(settings, "train.checkpoint_every=9", "train.steps=2")).die("step", 2)
    assert positions(lab) == [[0, 1], [2, 3]]
    found = ManifestStore(lab.trainer.dir.manifests).sampled(2)
    assert [session.group_id for session in found.values()] == ["data-2"] * 2 + ["data-3"] * 2
    assert [row["versions"].tolist() for s in found.values() for row in s.rows] == [
        [-1, -1, -1, 1, 1]
    ] * 4
    (rows,) = lab.trainer.dir.manifests.glob("step-00000002*.safetensors")
    rows.write_bytes(rows.read_bytes()[:50])
    with fails_with(ConfigError, rows.name):
        DataLab(lab.trainer.config, before=lab).trainer.train()


@pytest.mark.parametrize(
    ("boundary", "when"),
    [
        *(("batch", 1), ("batch", 4), ("manifest", 1), ("manifest", 3), ("step", 2)),
        *(("published", 3), ("settled", 1), ("settled", 4)),
        *(("before checkpoint", 1), ("checkpoint", 1)),
    ],
)
@pytest.mark.service
def test_a_trainer_that_dies_anywhere_ends_as_one_that_does_not(
    settings: list[str], undisturbed: dict[str, Any], boundary: str, when: int
) -> None:
    first = DataLab(config_of(settings)).die(boundary, when)
    again = DataLab(config_of(settings), before=first)
    assert again.trainer.train()
    assert_same_outcome(undisturbed, outcome(again))


def test_items_that_teach_nothing_are_counted_and_not_repeated_in_the_epoch(
    settings: list[str],
) -> None:
    """Items 1 and 4 teach nothing, item 2 fails: none of them comes again in this epoch."""
    config = config_of(settings, "train.steps=3", "train.checkpoint_every=9")
    lab = DataLab(config, Alternating(dull=(1, 4), failing=(2,)))
    assert lab.trainer.train()
    assert lab.metrics[-1]["rejected"] == {"failed": 2, "zero_variance": 4}
    # The checkpoint at the end knows all of it: six items were trained on, three were left out.
    assert positions(lab) == []
    assert (lab.left["low"], lab.left["beyond"]) == (9, [])
    assert [lab.runs[n] for n in range(9)] == [2] * 9


def test_a_replayed_step_brings_what_was_left_out_before_it(settings: list[str]) -> None:
    config = config_of(settings, "train.steps=3", "train.checkpoint_every=9")
    first = DataLab(config, Alternating(dull=(1,), failing=(2,))).die("published", 2)
    assert sorted(n for step in positions(first) for n in step) == [0, 1, 2, 3, 4, 5]
    again = DataLab(config, before=first)
    assert again.trainer.train()
    assert sorted(again.runs) == [6, 7]
    assert [line["step"] for line in again.metrics] == [1, 2, 3]


def test_the_data_ends_before_the_steps_do(settings: list[str]) -> None:
    said: list[str] = []
    config = config_of(settings, "train.steps=9", "train.epochs=1", "rollout.eta=1")
    lab = DataLab(config, items=5)
    lab.trainer.report.say = said.append
    evaluated: list[tuple[int, bool]] = []
    lab.trainer.evaluate = lambda step, last: evaluated.append((step, last))
    assert lab.trainer.train()
    # The fifth item alone is no whole batch, and is trained on all the same.
    assert [line["sessions"] for line in lab.metrics] == [4, 4, 2]
    assert said == ["data      all items are finished, at step 3"]
    assert evaluated == [(0, False), (1, False), (2, False), (3, False), (3, True)]
    assert lab.service.states[-1] == ("finished", 3)
    again = DataLab(config, items=5, before=lab)
    assert again.trainer.train() and again.runs == {}


def test_the_rate_falls_until_the_epochs_end(settings: list[str]) -> None:
    falls = ("train.lr=1e-3", "train.lr_schedule=linear", "train.epochs=2")

    def rates(items: int, *more: str, before: Lab | None = None) -> tuple[Lab, list[float]]:
        lab = DataLab(config_of(settings, *falls, *more), items=items, before=before)
        assert lab.trainer.train()
        return lab, [1e3 * line["learning_rate"] for line in lab.metrics]

    # Two items make a step, and six of them three steps.
    assert rates(3, "train.steps=100")[1] == pytest.approx([1, 2 / 3, 1 / 3])
    assert rates(3, "train.steps=2", "trial=shorter")[1] == pytest.approx([1, 1 / 2])
    begun, _ = rates(4, "train.steps=2", "trial=begun")
    larger = ("rollout.batch_size=6", "rollout.max_concurrent=6", "train.steps=100", "trial=begun")
    # Four of eight items made two steps. The others make two more, not all eight three steps.
    assert rates(4, *larger, before=begun)[1] == pytest.approx([1, 1 / 2, 1 / 2, 1 / 4])


def test_the_number_of_steps_follows_from_the_epochs(settings: list[str]) -> None:
    """A warm-up that is longer is refused; a workflow that makes groups itself makes more."""
    workflow = GroupedRolloutWorkflow(Alternating(), 2)
    lab = DataLab(config_of(settings, "train.epochs=2"), workflow, items=3)
    assert lab.source.last_step(0) == 6
    longer = ("train.steps=100", "train.epochs=2", "train.warmup_steps=3")
    with fails_with(ConfigError, "warmup_steps=3", "3 steps"):
        DataLab(config_of(settings, *longer), items=3)
    DataLab(config_of(settings, *longer), items=4)


def test_other_settings_do_not_change_steps_that_are_made_again(
    settings: list[str], undisturbed: dict[str, Any]
) -> None:
    first = DataLab(config_of(settings)).die("published")
    others = ["sampling.temperature=0.5", "train.discount=0.5", "train.steps=1", "rollout.eta=3"]
    hot = DataLab(config_of(settings, *others), before=first)
    assert hot.trainer.train()
    again = DataLab(config_of(settings), before=hot)
    assert again.trainer.train()
    assert_same_outcome(undisturbed, outcome(again))


def test_a_dataset_run_goes_on_after_steps_of_external_agents(settings: list[str]) -> None:
    assert DataLab(config_of(settings, "train.steps=2")).trainer.train()
    outside = Lab(config_of(settings, "train.steps=3", "rollout.eta=9"), [pair("p")], version=2)
    assert outside.trainer.train()
    again = DataLab(config_of(settings, "train.steps=4"), before=outside)
    assert again.trainer.train()
    assert sorted(again.runs) == [4, 5]


def test_a_killed_step_is_made_again_before_agents_outside_take_their_turn(
    settings: list[str],
) -> None:
    """Its items are done with, whoever trains when it is made again, also before a checkpoint."""
    first = DataLab(config_of(settings)).die("published")
    outside = Lab(config_of(settings, "train.steps=1"), [], before=first)
    assert outside.trainer.train()
    again = DataLab(config_of(settings, "train.steps=2"), before=outside)
    assert again.trainer.train()
    assert sorted(again.runs) == [2, 3]
    assert again.left == {"length": 10, "seed": 1, "shuffle": False, "low": 4, "beyond": []}


def test_a_repeated_step_that_is_not_finite_is_left_out(settings: list[str]) -> None:
    config = config_of(settings, "train.checkpoint_every=9")
    again = DataLab(config, before=DataLab(config).die("manifest"))
    errors = [FloatingPointError("nan")]

    def failing_once(step: Method, _: bool) -> Method:
        def made(*args: Any, **kwargs: Any) -> Any:
            if errors:
                raise errors.pop()
            return step(*args, **kwargs)

        return made

    again.at("step", failing_once)
    again.die("published", 2)
    # The next step's manifest says of its items, too, that they are done with.
    assert positions(again) == [[0, 1, 2, 3]]


def test_items_without_a_result_at_the_end_are_not_run_after_a_restart(settings: list[str]) -> None:
    config = config_of(settings, "train.steps=9", "train.epochs=1", "train.checkpoint_every=1")
    lab = DataLab(config, Alternating(dull=(2,)), items=3)
    assert lab.trainer.train()
    again = DataLab(config, items=3, before=lab)
    assert again.trainer.train() and again.runs == {}


@pytest.mark.timeout(120)
def test_a_timeout_of_the_dataset_ends_the_training(settings: list[str]) -> None:
    class Away(list[dict[str, Any]]):
        def __getitem__(self, k: Any) -> Any:
            raise TimeoutError("the file server is away")

    lab = DataLab(config_of(settings), rows=Away([{}] * 10))
    with fails_with(TrainingError, "the file server is away"):
        lab.trainer.train()


class Waiting(Alternating):
    """Runs of item 3 wait until something was told; item 0 is dull."""

    def __init__(self, told: Callable[[], bool]) -> None:
        super().__init__(dull=(0,))
        self._told = told

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> Any:
        while data["n"] == 3 and not self._told():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return await super().arun_episode(engine, data)


def test_a_long_wait_is_announced_with_what_has_come_so_far(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ANNOUNCE_INTERVAL", 0.01)
    monkeypatch.setattr(loop, "FIRST_ANNOUNCE", 0.01)
    lines: list[str] = []

    def told() -> bool:
        said = r"\d of 4 sessions came; left out so far: 2 zero_variance"
        return any(re.search(said, line) for line in lines)

    lab = DataLab(config_of(settings, "train.steps=2"), Waiting(told))
    lab.trainer.report.say = lines.append
    assert lab.trainer.train()
    assert told(), lines


def test_a_run_is_not_resumed_over_a_dataset_of_another_length(settings: list[str]) -> None:
    config = config_of(settings, "train.steps=1")
    assert DataLab(config).trainer.train()
    with fails_with(ConfigError, "7 items", "10"):
        DataLab(config, items=7).trainer.train()


@pytest.mark.parametrize(
    ("limit", "how", "accepts", "reason"),
    [
        ("max_failures=6", {"failing": range(10)}, True, ("6 episodes", "fails")),
        ("max_failures=6", {"rejected": range(10)}, True, ("6 episodes", "no model call")),
        # A run of each item is kept, so no row of failures ever gets long.
        ("max_dull_groups=20", {"halved": True}, True, ("20 groups", "20 group_too_small")),
        ("max_dull_groups=20", {"dull": range(10)}, True, ("20 zero_variance", "0.5")),
        ("max_dull_groups=20", {}, False, ("20 groups", "20 not_accepted")),
    ],
)
def test_items_that_never_teach_anything_end_training_with_the_reason(
    settings: list[str], limit: str, how: dict[str, Any], accepts: bool, reason: tuple[str, ...]
) -> None:
    config = config_of(settings, f"rollout.{limit}")
    lab = DataLab(config, Alternating(**how), accept=lambda _: accepts)
    with fails_with(TrainingError, *reason):
        lab.trainer.train()
    assert lab.trainer.policy.steps == 0


def test_an_item_that_teaches_something_begins_the_count_anew(settings: list[str]) -> None:
    """Of ten items eight are dull in a row, in each pass."""
    config = config_of(settings, "rollout.max_dull_groups=9")
    assert DataLab(config, Alternating(dull=range(2, 10))).trainer.train()


def test_items_that_teach_nothing_are_run_less_also_after_a_restart(settings: list[str]) -> None:
    """Two of ten items make a step; the others are dull."""
    settings = [*settings, "rollout.deterministic=false", "rollout.sampling=learnable"]
    lab = DataLab(config_of(settings, "train.steps=6"), Alternating(dull=range(2, 10)))
    assert lab.trainer.train()
    again = DataLab(config_of(settings, "train.steps=14"), Alternating(dull=range(2, 10)))
    assert again.trainer.train()
    for one in (lab, again):
        dull, taught = (max(one.runs[n] for n in part) for part in (range(2, 10), range(2)))
        assert 0 < dull <= taught / 2, one.runs
    times = {item: n for item, n, _ in again.source.state()["dull"]}
    assert times.keys() == set(range(2, 10))
    assert set(times.values()) <= {3, 4}, "in passes 0, 2, 6, and perhaps 14, which is run ahead"
