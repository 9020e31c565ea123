"""Training on a dataset: every item is done with once, whatever dies and when."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from any_agent import stats_tracker
from any_agent.errors import ConfigError, TrainingError
from any_agent.workflow import GroupedRolloutWorkflow
from tests.support.errors import fails_with
from tests.support.trainer.datasets import Alternating, DataLab
from tests.support.trainer.episodes import pair
from tests.support.trainer.loop import Killed, Lab, config_of, killed, outcome
from trainer import loop
from trainer.manifests import ManifestStore

STEPS = 5
RUN = (
    f"train.steps={STEPS}",
    "train.checkpoint_every=2",
    "rollout.deterministic=true",
    "rollout.eta=0",
    "rollout.batch_size=4",
    "rollout.max_concurrent=4",
    "sessions.group_size=2",
    "train_dataset.shuffle=false",
    "train.lr=1e-3",
    "train.seed=1",
)


@pytest.fixture
def settings(tiny_model_dir: Path, tmp_path: Path) -> list[str]:
    return [f"root={tmp_path}", f"model.path={tiny_model_dir}", *RUN]


@pytest.fixture(scope="module")
def uninterrupted(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("whole")
    lab = DataLab(config_of([f"root={root}", f"model.path={tiny_model_dir}", *RUN]))
    assert lab.trainer.train()
    return outcome(lab)


def rates(lab: DataLab) -> list[float]:
    return [line["learning_rate"] for line in lab.metrics]


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
    assert isinstance(lab.workflow, Alternating)
    assert [lab.workflow.runs[n] for n in range(10)] == [2] * 10
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
    lab = DataLab(config_of(settings, "train.checkpoint_every=9", "train.steps=2"))
    load = lab.trainer.load

    def loaded() -> None:
        load()
        lab.trainer.policy.step = killed(lab.trainer.policy.step, 2)  # type: ignore[method-assign]

    lab.trainer.load = loaded  # type: ignore[method-assign]
    with pytest.raises(Killed):
        lab.trainer.train()
    assert positions(lab) == [[0, 1], [2, 3]]
    found = ManifestStore(lab.trainer.dir.manifests).sampled(2)
    assert [session.group_id for session in found.values()] == ["data-2"] * 2 + ["data-3"] * 2
    assert [row["versions"].tolist() for s in found.values() for row in s.rows] == [
        [-1, -1, -1, 1, 1]
    ] * 4


@pytest.mark.parametrize(
    ("boundary", "when"),
    [
        ("batch", 1),
        ("batch", 4),
        ("manifest", 1),
        ("manifest", 3),
        ("step", 2),
        ("published", 3),
        ("settled", 1),
        ("settled", 4),
        ("before checkpoint", 1),
        ("checkpoint", 1),
    ],
)
@pytest.mark.service
def test_a_trainer_that_dies_anywhere_ends_as_one_that_does_not(
    settings: list[str], uninterrupted: dict[str, Any], boundary: str, when: int
) -> None:
    config = config_of(settings)
    first = DataLab(config)
    load = first.trainer.load

    def loaded() -> None:
        load()
        trainer = first.trainer
        owner, name, before = {
            "batch": (first.source, "next_batch", False),
            "manifest": (trainer.manifests, "write", False),
            "step": (trainer.policy, "step", False),
            "published": (trainer.publisher, "publish", False),
            "settled": (first.source, "settle", False),
            "before checkpoint": (trainer, "save", True),
            "checkpoint": (trainer, "save", False),
        }[boundary]
        setattr(owner, name, killed(getattr(owner, name), when, before=before))

    first.trainer.load = loaded  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.trainer.train()
    again = DataLab(config, before=first)
    assert again.trainer.train()
    result = outcome(again)
    assert result["state"] == uninterrupted["state"]
    different = [
        name
        for name, tensor in uninterrupted["tensors"].items()
        if not tensor.equal(result["tensors"][name])
    ]
    assert different == []


def test_what_comes_to_nothing_is_done_with_and_told(settings: list[str]) -> None:
    """Items 1 and 4 teach nothing, item 2 fails: none of them comes again in this epoch."""
    workflow = Alternating(dull=(1, 4), failing=(2,))
    lab = DataLab(config_of(settings, "train.steps=3", "train.checkpoint_every=9"), workflow)
    assert lab.trainer.train()
    assert lab.metrics[-1]["rejected"] == {"failed": 2, "zero_variance": 4}
    # The checkpoint at the end knows all of it: six items were trained on, three were left out.
    assert positions(lab) == []
    assert (lab.left["low"], lab.left["beyond"]) == (9, [])
    assert [workflow.runs[n] for n in range(9)] == [2] * 9


def test_a_replayed_step_brings_what_was_left_out_before_it(settings: list[str]) -> None:
    config = config_of(settings, "train.steps=3", "train.checkpoint_every=9")
    first = DataLab(config, Alternating(dull=(1,), failing=(2,)))
    publish = first.trainer.publisher.publish
    first.trainer.publisher.publish = killed(publish, 2)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.trainer.train()
    assert sorted(n for step in positions(first) for n in step) == [0, 1, 2, 3, 4, 5]
    workflow = Alternating()
    again = DataLab(config, workflow, before=first)
    assert again.trainer.train()
    assert sorted(workflow.runs) == [6, 7]
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
    assert again.trainer.train()
    assert isinstance(again.workflow, Alternating) and not again.workflow.runs


def test_the_rate_falls_until_the_epochs_end(settings: list[str]) -> None:
    falls = ("train.lr=1e-3", "train.lr_schedule=linear", "train.epochs=2")
    lab = DataLab(config_of(settings, *falls, "train.steps=100"), items=3)
    assert lab.trainer.train()
    # Two items make a step, and six of them three steps.
    assert rates(lab) == pytest.approx([1e-3, 2e-3 / 3, 1e-3 / 3])
    shorter = DataLab(config_of(settings, *falls, "train.steps=2", "trial=shorter"), items=3)
    assert shorter.trainer.train()
    assert rates(shorter) == pytest.approx([1e-3, 1e-3 / 2])


def test_a_restart_with_larger_batches_does_not_end_the_rate_early(settings: list[str]) -> None:
    falls = ("train.lr=1e-3", "train.lr_schedule=linear", "train.epochs=2")
    begun = DataLab(config_of(settings, *falls, "train.steps=2"), items=4)
    assert begun.trainer.train()
    larger = ("rollout.batch_size=6", "rollout.max_concurrent=6", "train.steps=100")
    more = DataLab(config_of(settings, *falls, *larger), items=4, before=begun)
    assert more.trainer.train()
    # Four of eight items made two steps. The others make two more, not all eight three steps.
    assert rates(more) == pytest.approx([1e-3, 1e-3 / 2, 1e-3 / 2, 1e-3 / 4])


def test_groups_of_a_workflow_that_makes_groups_itself_are_larger(settings: list[str]) -> None:
    workflow = GroupedRolloutWorkflow(Alternating(), 2)
    lab = DataLab(config_of(settings, "train.epochs=2"), workflow, items=3)
    assert lab.source.last_step(0) == 6


def test_a_warm_up_longer_than_the_epochs_is_refused(settings: list[str]) -> None:
    longer = ("train.steps=100", "train.epochs=2", "train.warmup_steps=3")
    with fails_with(ConfigError, "warmup_steps=3", "3 steps"):
        DataLab(config_of(settings, *longer), items=3)
    DataLab(config_of(settings, *longer), items=4)


def test_other_settings_do_not_change_steps_that_are_made_again(
    settings: list[str], uninterrupted: dict[str, Any]
) -> None:
    first = DataLab(config_of(settings))
    publish = first.trainer.publisher.publish
    first.trainer.publisher.publish = killed(publish, 1)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.trainer.train()
    others = ["sampling.temperature=0.5", "train.discount=0.5", "train.steps=1", "rollout.eta=3"]
    hot = DataLab(config_of(settings, *others), before=first)
    assert hot.trainer.train()
    again = DataLab(config_of(settings), before=hot)
    assert again.trainer.train()
    result = outcome(again)["tensors"]
    assert all(t.equal(result[name]) for name, t in uninterrupted["tensors"].items())


def test_agents_outside_take_a_turn_in_between(settings: list[str]) -> None:
    """The dataset is gone on with where it was left."""
    assert DataLab(config_of(settings, "train.steps=2")).trainer.train()
    outside = Lab(config_of(settings, "train.steps=3", "rollout.eta=9"), [pair("p")], version=2)
    assert outside.trainer.train()
    again = DataLab(config_of(settings, "train.steps=4"), before=outside)
    assert again.trainer.train()
    assert isinstance(again.workflow, Alternating) and sorted(again.workflow.runs) == [4, 5]


def test_a_killed_step_is_made_again_before_agents_outside_take_their_turn(
    settings: list[str],
) -> None:
    """Its items are done with, whoever trains when it is made again, also before a checkpoint."""
    first = DataLab(config_of(settings))
    publish = first.trainer.publisher.publish
    first.trainer.publisher.publish = killed(publish, 1)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.trainer.train()
    outside = Lab(config_of(settings, "train.steps=1"), [], before=first)
    assert outside.trainer.train()
    again = DataLab(config_of(settings, "train.steps=2"), before=outside)
    assert again.trainer.train()
    assert isinstance(again.workflow, Alternating) and sorted(again.workflow.runs) == [2, 3]
    assert again.left == {"length": 10, "seed": 1, "shuffle": False, "low": 4, "beyond": []}


def test_a_step_that_is_not_finite_when_made_again_is_none(settings: list[str]) -> None:
    config = config_of(settings, "train.checkpoint_every=9")
    first = DataLab(config)
    first.trainer.manifests.write = killed(first.trainer.manifests.write, 1)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.trainer.train()
    again = DataLab(config, before=first)
    load, steps = again.trainer.load, []

    def loaded() -> None:
        load()
        step = again.trainer.policy.step

        def failing(*args: Any, **kwargs: Any) -> Any:
            steps.append(1)
            if len(steps) == 1:
                raise FloatingPointError("nan")
            return step(*args, **kwargs)

        again.trainer.policy.step = failing  # type: ignore[method-assign]
        publish = again.trainer.publisher.publish
        again.trainer.publisher.publish = killed(publish, 2)  # type: ignore[method-assign]

    again.trainer.load = loaded  # type: ignore[method-assign]
    with pytest.raises(Killed):
        again.trainer.train()
    # The next step's manifest says of its items, too, that they are done with.
    assert positions(again) == [[0, 1, 2, 3]]


def test_what_came_to_nothing_at_the_end_does_not_come_again(settings: list[str]) -> None:
    config = config_of(settings, "train.steps=9", "train.epochs=1", "train.checkpoint_every=1")
    lab = DataLab(config, Alternating(dull=(2,)), items=3)
    assert lab.trainer.train()
    again = DataLab(config, items=3, before=lab)
    assert again.trainer.train()
    assert isinstance(again.workflow, Alternating) and not again.workflow.runs


@pytest.mark.timeout(120)
def test_a_dataset_that_times_out_ends_it(settings: list[str]) -> None:
    """It is no wait that goes on."""

    class Away(list[dict[str, Any]]):
        def __getitem__(self, k: Any) -> Any:
            raise TimeoutError("the file server is away")

    lab = DataLab(config_of(settings))
    lab.source._dataset = Away([{}] * 10)  # type: ignore[assignment]
    with fails_with(TrainingError, "the file server is away"):
        lab.trainer.train()


def test_a_long_wait_is_told_with_what_is_there(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "ANNOUNCE_INTERVAL", 0.05)
    monkeypatch.setattr(loop, "FIRST_ANNOUNCE", 0.05)
    said: list[str] = []

    def told() -> list[str]:
        return [line for line in said if "zero_variance" in line]

    class Waiting(Alternating):
        """Until that was told."""

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
            while data["n"] == 3 and not told():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return await super().arun_episode(engine, data)

    lab = DataLab(config_of(settings, "train.steps=2"), Waiting(dull=(0,)))
    lab.trainer.report.say = said.append
    assert lab.trainer.train()
    waiting = r"waiting   for trajectories: \d of 4 sessions came; left out so far: 2 zero_variance"
    assert re.fullmatch(waiting, told()[0])


def test_a_person_is_told_that_most_items_teach_nothing(
    settings: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight of ten items, between which two make a step now and then."""
    monkeypatch.setattr(loop, "ANNOUNCE_INTERVAL", 0.01)
    monkeypatch.setattr(loop, "FIRST_ANNOUNCE", 0.01)
    said: list[str] = []
    runs: list[int] = []

    def told() -> bool:
        return any("groups had nothing to learn from" in line for line in said)

    class Waiting(Alternating):
        """Until that was told, once there is enough to tell of."""

        async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any]:
            runs.append(data["n"])
            while data["n"] == 9 and len(runs) > 60 and not told():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return await super().arun_episode(engine, data)

    lab = DataLab(config_of(settings, "train.steps=8"), Waiting(dull=tuple(range(8))))
    lab.trainer.report.say = said.append
    assert lab.trainer.train()
    assert told(), said


def test_another_dataset_is_refused(settings: list[str]) -> None:
    config = config_of(settings, "train.steps=1")
    assert DataLab(config).trainer.train()
    with fails_with(ConfigError, "7 items", "10"):
        DataLab(config, items=7).trainer.train()


@pytest.mark.parametrize(
    ("limit", "how", "reason"),
    [
        ("rollout.max_failures=6", {"failing": tuple(range(10))}, ("6 episodes", "fails")),
        ("rollout.max_failures=6", {"rejected": tuple(range(10))}, ("6 episodes", "no model call")),
        # A run of each item is kept, so no row of failures ever gets long.
        ("rollout.max_dull_groups=20", {"halved": True}, ("20 groups", "20 group_too_small")),
    ],
)
def test_items_that_come_to_nothing_for_ever_end_it_with_the_reason(
    settings: list[str], limit: str, how: dict[str, Any], reason: tuple[str, ...]
) -> None:
    lab = DataLab(config_of(settings, limit), Alternating(**how))
    with fails_with(TrainingError, *reason):
        lab.trainer.train()


def test_rows_that_are_gone_are_told_of(settings: list[str]) -> None:
    config = config_of(settings)
    first = DataLab(config)
    publish = first.trainer.publisher.publish
    first.trainer.publisher.publish = killed(publish, 1)  # type: ignore[method-assign]
    with pytest.raises(Killed):
        first.trainer.train()
    (rows,) = first.trainer.dir.manifests.glob("*.safetensors")
    rows.write_bytes(rows.read_bytes()[:50])
    with fails_with(ConfigError, "step-00000001.safetensors"):
        DataLab(config, before=first).trainer.train()


def test_items_that_teach_nothing_for_ever_end_it(settings: list[str]) -> None:
    """Twelve items over and over, all of whose runs score 0.5."""
    workflow = Alternating(dull=tuple(range(12)))
    lab = DataLab(config_of(settings, "rollout.max_dull_groups=20"), workflow, items=12)
    with fails_with(TrainingError, "20 groups", "20 zero_variance", "0.5"):
        lab.trainer.train()
    assert lab.trainer.policy.steps == 0


def test_items_that_no_filter_takes_end_it(settings: list[str]) -> None:
    lab = DataLab(config_of(settings, "rollout.max_dull_groups=20"), accept=lambda _: False)
    with fails_with(TrainingError, "20 groups", "20 not_accepted"):
        lab.trainer.train()


def test_an_item_that_teaches_something_begins_the_count_anew(settings: list[str]) -> None:
    """Of ten items eight are dull in a row, in each pass."""
    workflow = Alternating(dull=tuple(range(2, 10)))
    lab = DataLab(config_of(settings, "rollout.max_dull_groups=9"), workflow)
    assert lab.trainer.train()
