from __future__ import annotations

import re
from pathlib import Path

from any_agent.config import NAME_PATTERN
from any_agent.data import get_custom_dataset
from any_agent.sdk.run_plan import (
    PlanHeader,
    RunId,
    RunPlan,
    fingerprint,
    items_of,
    new_run,
    task_of,
)

HEADER = PlanHeader(new_run(), "00", items=12, group_size=2, mode="train", service="e/t")


def test_a_plan_has_every_place_once_and_groups_together() -> None:
    plan = RunPlan(HEADER, epochs=2)
    places = list(plan)
    assert len(places) == len(plan) == len(set(places)) == 48
    assert places == sorted(places)
    assert places[:3] == [RunId(0, 0, 0), RunId(0, 0, 1), RunId(0, 1, 0)]


def test_each_place_of_a_plan_has_a_name_of_its_own() -> None:
    """12-1 and 1-21 must not be the same, nor may a name be too long for the service."""
    plan = RunPlan(HEADER, epochs=12)
    places = list(plan)
    groups = {(p.epoch, p.item, g): plan.group(p, g) for p in places for g in range(3)}
    assert len(set(groups.values())) == len(groups)
    assert all(re.fullmatch(NAME_PATTERN, name) for name in groups.values())
    far = RunId(10**6, 10**9, 10**4)
    assert re.fullmatch(NAME_PATTERN, plan.group(far, 4))
    keys = {plan.key(p, a, what) for p in places for a in range(3) for what in ("open", "end")}
    assert len(keys) == len(places) * 6


def test_an_items_own_task_id_becomes_a_valid_task_name() -> None:
    tasks = {
        "gsm8k/12": "gsm8k-12",
        7: "7",
        "Größe": "Gr-e",
        "../x": "x",
        "": None,
        "日本": None,
        None: None,
        "a" * 100: "a" * 64,
    }
    assert {own: task_of({"task_id": own}) for own in tasks} == tasks


def test_datasets_of_all_kinds_give_the_same_items(tmp_path: Path) -> None:
    file = tmp_path / "items.jsonl"
    file.write_text('{"a": 1}\n\n{"a": 2}\n')
    rows = [{"a": 1}, {"a": 2}]
    kinds = [file, str(file), rows, iter(rows), get_custom_dataset(path=file), tuple(rows)]
    assert {fingerprint(items_of(kind)) for kind in kinds} == {fingerprint(items_of(rows))}
    assert [items_of(range(3))[k] for k in range(3)] == [0, 1, 2]


def test_the_fingerprint_of_a_dataset_tells_it_from_others() -> None:
    of = [
        fingerprint(items_of(rows))
        for rows in ([{"a": 1}], [{"a": 2}], [{"a": 1}] * 2, [{"a": 1, "b": object()}], ["a"])
    ]
    assert len(set(of)) == len(of)
    # What no JSON can say goes by its kind.
    odd = [{1: "a", "b": 2}], [{("a", "b"): 1}]
    assert len({fingerprint(items_of(rows)) for rows in odd}) == 1
    # The order of fields is nobody's business, nor is where an object lies.
    assert fingerprint(items_of([{"b": object(), "a": 1}])) == of[3]
