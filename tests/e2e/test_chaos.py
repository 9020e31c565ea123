"""kill -9 of every kind of process under load; and that the judges of such a run can say no."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from any_agent.rundir.layout import RunDir, write_json
from any_agent.types import Continuation, Interaction, SessionState
from proxy_ext.journal import SessionRow
from tests.e2e.chaos import RANKS, Outcome, Plan, chaos_config, failures_after, run_chaos, table
from tests.support.e2e import audit, history
from tests.support.e2e.audit import Counters, Record
from tests.support.e2e.history import History, Manifest
from tests.support.e2e.killing import KINDS, Kill, schedule
from tests.support.e2e.ledger import Answer, Failure, Ledger
from tests.support.e2e.retrain import retrain
from tests.support.journal import make_interaction
from trainer.manifests import ManifestStore

SESSION = "ses-1-" + "a" * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("chaos")


@pytest.fixture(scope="module")
def chaos(folder: Path) -> Outcome:
    return run_chaos(folder, Plan(kills=1, agents=16, seed=0, steps=9, limit=1500), say=print)


@pytest.mark.timeout(1800)
def test_every_promise_is_kept_when_every_kind_of_process_is_killed(chaos: Outcome) -> None:
    print("\n" + "\n".join(table(chaos)))
    assert {name: problems[:5] for name, problems in chaos.problems.items() if problems} == {}
    assert Counter(kill.kind for kill in chaos.kills) == dict.fromkeys(KINDS, 1)
    # Agents hardly notice.
    answered = sum(1 for _ in chaos.ledger.answers())
    assert answered >= 1000
    assert chaos.ledger.failed("call").total() <= 0.02 * answered


@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("chaos")
def test_training_anew_would_notice_one_other_reward(folder: Path) -> None:
    config = chaos_config(folder, 0, "not-needed")
    run = RunDir.of(config.root, config.user, config.experiment, config.trial)
    records = audit.read_records(run, RANKS)
    last = max(history.read_history(run).consumed)
    taken = ManifestStore(run.manifests).read(last)
    answer = next(i for i in records[taken.trained[0]].interactions if i.reward is not None)
    answer.reward = 1.0 - (answer.reward or 0.0)
    compared, others = retrain(config, run, records)
    assert compared >= 2
    assert len(others) == 1
    assert others[0].startswith(f"step-{last:08d}")


def interaction(id: str, text: str, **changes: object) -> Interaction:
    said = {"role": "assistant", "content": text}
    return replace(make_interaction(id, SESSION), output_message=said, **changes)  # type: ignore[arg-type]


def record(state: SessionState, *interactions: Interaction) -> dict[str, Record]:
    row = SessionRow(SESSION, "lane", "train", state, None, None, 1, {}, 0.0, 0.0)
    return {SESSION: Record(row, list(interactions))}


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """One session with one rewarded answer, finalized."""
    ledger = Ledger()
    told = ledger.open(SESSION, "key", "train")
    told.answers["c1"] = Answer("7", 10.0, 11.0)
    told.rewards["c1"] = 1.0
    told.finalized = True
    yield ledger


def test_the_audit_finds_what_was_acknowledged_and_lost(ledger: Ledger) -> None:
    kept = interaction("c1", "7", reward=1.0)
    for state in ("finalized", "leased", "trained", "rejected"):
        found = audit.lost(ledger, record(SessionState(state), kept))
        assert found == audit.Lost([], [], [], [])
    assert audit.lost(ledger, {}).sessions == [SESSION]
    for state in ("open", "expired", "aborted", "evaluated"):
        assert len(audit.lost(ledger, record(SessionState(state), kept)).finalizes) == 1
    trained = SessionState.TRAINED
    assert len(audit.lost(ledger, record(trained)).answers) == 1
    assert len(audit.lost(ledger, record(trained, interaction("c1", "8"))).answers) == 1
    for reward in (None, 0.0):
        worse = interaction("c1", "7", reward=reward)
        assert len(audit.lost(ledger, record(trained, worse)).rewards) == 1
    # Nothing is expected that was not acknowledged.
    ledger.sessions[0].finalized, ledger.sessions[0].rewards = False, {}
    found = audit.lost(ledger, record(SessionState.EXPIRED, interaction("c1", "7")))
    assert found == audit.Lost([], [], [], [])


def test_the_audit_sees_a_trained_answer_that_nobody_got(ledger: Ledger) -> None:
    both = interaction("c1", "7"), interaction("c2", "8")
    assert audit.unseen(ledger, record(SessionState.TRAINED, *both)) == ["c2"]
    kept = both[0], replace(both[1], output_message={"role": "assistant", "content": "9"})
    then = interaction("c3", "7", parent_id="c1", continuation=Continuation.EXACT)
    # A sibling that nobody continued, while another one was, has no part in the training.
    ledger.sessions[0].answers["c3"] = Answer("7", 12.0, 13.0)
    assert audit.unseen(ledger, record(SessionState.TRAINED, *kept, then)) == []
    marked = interaction("c2", "8", untrainable_reason="undelivered")
    assert audit.unseen(ledger, record(SessionState.TRAINED, both[0], marked)) == []


def step(number: int, *trained: str, rejected: tuple[str, ...] = ()) -> Manifest:
    return Manifest(number, trained, rejected)


def chain(consumed: dict[int, tuple[str, ...]], *manifests: Manifest) -> History:
    return History(consumed, {m.step: m for m in manifests})


def test_the_audit_accepts_a_chain_of_steps_as_one_history() -> None:
    whole = chain({1: ("a",), 3: ("a", "b", "c")}, step(2, "b"), step(3, "c"), step(4, "d"))
    assert whole.trained() == ["a", "b", "c", "d"]
    assert history.trained_twice(whole) == []
    assert history.contradictions(whole) == []
    states = dict.fromkeys("abcd", SessionState.TRAINED) | {"e": SessionState.FINALIZED}
    assert history.effects_against_states(whole, states, {}) == ([], [])


def test_the_audit_sees_two_effects_of_a_session() -> None:
    assert history.trained_twice(chain({}, step(1, "a"), step(2, "b", "a"))) == ["a"]
    assert history.trained_twice(chain({1: ("a",)}, step(2, "a"))) == ["a"]
    assert history.trained_twice(chain({1: ("a", "a")})) == ["a"]


def test_the_audit_sees_steps_that_do_not_fit_together() -> None:
    assert len(history.contradictions(chain({1: ("a",), 2: ("a", "b")}, step(2, "c")))) == 1
    assert len(history.contradictions(chain({1: ("a",), 2: ("b",)}, step(2, "b")))) == 1
    assert len(history.contradictions(chain({1: ("a",)}, step(3, "b")))) == 1
    lost = chain({1: ("a",)})
    states = {"a": SessionState.FINALIZED, "b": SessionState.TRAINED}
    assert history.effects_against_states(lost, states, {}) == (["b"], ["a"])
    before = [step(2, "b"), step(3, "c")]
    assert history.given_up(before, chain({}, step(2, "b"), step(3, "x"))) == [3]
    assert history.given_up(before, chain({}, step(2, "b"))) == [3]
    assert history.given_up(before, chain({2: ("a", "b")}, step(3, "c"))) == []
    assert history.given_up(before, chain({2: ("a", "x")}, step(3, "c"))) == [2]


def test_the_audit_allows_checkpoints_to_forget_the_oldest_sessions() -> None:
    bounded = chain({3: ("b", "c"), 4: ("c", "d")}, step(4, "d"))
    forgetful = replace(bounded, forgotten=2)
    assert (len(history.contradictions(bounded)), history.contradictions(forgetful)) == (1, [])
    states = dict.fromkeys("abcd", SessionState.TRAINED)
    steps = {"a": 1, "b": 2, "c": 3, "d": 4}
    assert history.effects_against_states(bounded, states, steps) == (["a"], [])
    assert history.effects_against_states(forgetful, states, steps) == ([], [])
    lost = states | {"x": SessionState.TRAINED}
    assert history.effects_against_states(forgetful, lost, steps | {"x": 4}) == (["x"], [])


def test_the_audit_reads_the_history_of_a_folder(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    assert (history.last_step(run), history.unsaved(run)) == (0, [])
    early = {"a": None, "odd": "stale", "b": None}
    for number, fates in ((2, early), (4, {"given": None})):
        consumed = [
            {"sessions": [id], "step": number, "rejected": why} for id, why in fates.items()
        ]
        folder = run.checkpoints / f"step-{number:08d}" / "trainer"
        folder.mkdir(parents=True)
        write_json(folder / "state.json", {"state": {"consumed": consumed}})
    (run.checkpoints / "latest").write_text("step-00000002\n")
    plain = {"step": 3, "trained": ["c"], "rejected": {"d": "stale"}}
    write_json(run.manifests / "step-00000003.json", plain)
    made = step(3, "c", rejected=("d",))
    assert history.unsaved(run) == [made]
    assert history.last_step(run) == 3
    assert history.read_history(run) == chain({2: ("a", "b")}, made)


METRICS = """\
# HELP any_agent_sessions_created_total Sessions.
# TYPE any_agent_sessions_created_total counter
any_agent_sessions_created_total{rank="0"} 3.0
# HELP any_agent_sessions Sessions by state.
# TYPE any_agent_sessions gauge
any_agent_sessions{rank="0",state="trained"} 2.0
any_agent_sessions{rank="0",state="open"} 1.0
"""


def test_the_audit_sees_counters_that_do_not_balance() -> None:
    counted = audit.counters_of(METRICS)
    assert counted == Counters(3, {"trained": 2, "open": 1})
    rows = dict.fromkeys((f"ses-0-{k:016x}" for k in range(3)), record(SessionState.OPEN)[SESSION])
    assert audit.unbalanced([counted], rows, 1) == []
    assert len(audit.unbalanced([replace(counted, created=4)], rows, 1)) == 1
    assert len(audit.unbalanced([replace(counted, states={"open": 2})], rows, 1)) == 1
    assert len(audit.unbalanced([counted], {}, 1)) == 1


def test_the_audit_sees_keys_in_logs(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    (run.logs / "router.log").write_text("sk-v1.<redacted> and sk-v1.0.\n")
    assert audit.leaks(run, ["admin-secret"]) == []
    (run.logs / "rank-0.log").write_text(f"GET /sk-v1.0.{'a' * 24}.{'b' * 32}/v1/models\n")
    (run.logs / "trainer.log").write_text("Bearer admin-secret\n")
    assert sorted(audit.leaks(run, ["admin-secret"])) == ["logs/rank-0.log", "logs/trainer.log"]


def test_tracebacks_are_counted_by_what_they_end_with(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.create()
    (run.logs / "router.log").write_text("INFO all is well\n")
    assert audit.complaints(run) == []
    trace = 'ERROR it failed\nTraceback (most recent call last):\n  File "a.py", line 1\n    f()\n'
    (run.logs / "trainer.log").write_text(2 * f"{trace}ValueError: no\nINFO on\n")
    (run.logs / "rank-0.log").write_text(f"{trace}\tmore\nKeyError: 1")
    assert audit.complaints(run) == ["2x trainer.log: ValueError: no", "1x rank-0.log: KeyError: 1"]


def test_a_schedule_kills_each_kind_as_often_and_spreads_over_ranks() -> None:
    for seed in range(20):
        plan = schedule(10, 2, random.Random(seed))
        assert plan == schedule(10, 2, random.Random(seed))
        assert Counter(kind for kind, _ in plan) == dict.fromkeys(KINDS, 10)
        of_two = dict.fromkeys(("rank-0", "rank-1", "engine-0", "engine-1"), 5)
        parts = Counter(part for _, part in plan)
        assert parts == of_two | {"router": 10, "trainer": 10}
        kinds = [kind for kind, _ in plan]
        assert all(len(set(kinds[k : k + 4])) > 1 for k in range(len(kinds) - 3))


def test_failures_are_laid_at_the_door_of_the_kill_before() -> None:
    outcome = Outcome(kills=[Kill("proxy", "rank-0", 10, 1), Kill("router", "router", 20, 1)])
    for at, what in ((5, "call"), (12, "call"), (13, "open"), (25, "call"), (26, "call")):
        outcome.ledger.failures.append(Failure(at, what, "APIError"))
    assert [failures_after(outcome, kind) for kind in KINDS] == [1, 0, 2, 0]
    assert any(line.startswith("router") and line.endswith("2") for line in table(outcome))
