"""Whether a run's folder holds what agents were told, and nothing that it must not hold."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from any_agent.config import Config
from any_agent.keys import rank_of_session
from any_agent.record import discarded
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import Registry, rank_name
from any_agent.types import Interaction, SessionState
from proxy_ext.archive.files import list_archives, read_lines
from proxy_ext.archive.records import read_record
from tests.support.e2e.ledger import Ledger, Told
from tests.support.e2e.live_run import Check, Record, recompute
from tests.support.e2e.live_run import read_records as read_records

KEPT = {
    "train": {
        SessionState.FINALIZED,
        SessionState.LEASED,
        SessionState.TRAINED,
        SessionState.REJECTED,
    },
    "eval": {SessionState.EVALUATED},
}
"""Where a session may be once its finalize was acknowledged."""
SESSION_KEY = re.compile(rb"sk-v1\.\d+\.[0-9a-f]{24}\.[0-9a-f]{32}")


def read_archives(run: RunDir, ranks: int, records: dict[str, Record]) -> list[str]:
    """Complete the records with what archives hold; where a session is not kept exactly once."""
    seen: Counter[str] = Counter()
    out: list[str] = []
    for rank in range(ranks):
        for file in list_archives(run.archive, rank):
            _, *lines = read_lines(file.path, out.append)
            for line in lines:
                found = read_record(line)
                id = str(found.session["id"])
                seen[id] += 1
                if id in records:
                    records[id].interactions[:] = found.interactions
    said = {id for id, record in records.items() if record.row.content == "archived"}
    out += [f"{id} is in {count} archives" for id, count in seen.items() if count > 1]
    out += [f"{id} is in an archive and not called so" for id in seen.keys() - said]
    return out + [f"{id} is in no archive" for id in said - seen.keys()]


@dataclass(slots=True)
class Lost:
    """Acknowledged and not kept; each entry says which."""

    sessions: list[str]
    finalizes: list[str]
    rewards: list[str]
    answers: list[str]


def lost(ledger: Ledger, records: Mapping[str, Record]) -> Lost:
    """Compare what agents were told with what the journals hold."""
    out = Lost([], [], [], [])
    for told in ledger.sessions:
        record = records.get(told.session_id)
        if record is None:
            out.sessions.append(told.session_id)
            continue
        if told.finalized and record.row.state not in KEPT[told.mode]:
            why = f" ({record.row.reason})" if record.row.reason else ""
            out.finalizes.append(f"{told.session_id} is {record.row.state}{why}")
        _compare(told, {i.id: i for i in record.interactions}, out)
    return out


def _compare(told: Told, kept: Mapping[str, Interaction], out: Lost) -> None:
    for completion_id, answer in told.answers.items():
        interaction = kept.get(completion_id)
        if interaction is None:
            out.answers.append(f"{told.session_id} has no {completion_id}")
        elif (interaction.output_message.get("content") or "") != answer.text:
            content = interaction.output_message.get("content")
            out.answers.append(f"{completion_id}: {content!r} instead of {answer.text!r}")
    for completion_id, reward in told.rewards.items():
        interaction = kept.get(completion_id)
        value = interaction.reward if interaction is not None else None
        if value != reward:
            out.rewards.append(f"{completion_id}: {value} instead of {reward}")


def unseen(ledger: Ledger, records: Mapping[str, Record]) -> list[str]:
    """Interactions of sessions that agents finalized which no agent got, and that may be trained.

    Their answer was recorded, and whoever was to bring it to the agent was killed.
    """
    out = []
    for told in ledger.sessions:
        if told.finalized and told.mode == "train" and told.session_id in records:
            interactions = records[told.session_id].interactions
            known = told.answers.keys() | discarded(interactions)
            out += [i.id for i in interactions if i.trainable and i.id not in known]
    return out


@dataclass(frozen=True, slots=True)
class Counters:
    """One proxy's own count of its sessions."""

    created: int
    states: Mapping[str, int]


async def read_counters(run: RunDir, ranks: int, admin_key: str) -> list[Counters]:
    """Each proxy's `/metrics`, asked at the address in its registry entry."""
    registry = Registry(run.registry)
    registry.refresh()
    out = []
    async with httpx.AsyncClient(timeout=120, trust_env=False) as http:
        for rank in range(ranks):
            entry = registry.get(rank_name(rank))
            assert entry is not None
            headers = {"Authorization": f"Bearer {admin_key}"}
            response = await http.get(f"{entry.url}/metrics", headers=headers)
            response.raise_for_status()
            out.append(counters_of(response.text))
    return out


def counters_of(text: str) -> Counters:
    """The sessions' counters out of Prometheus's text."""
    created, states = 0.0, Counter[str]()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "any_agent_sessions_created_total":
                created += sample.value
            elif sample.name == "any_agent_sessions":
                states[sample.labels["state"]] += int(sample.value)
    return Counters(int(created), dict(states))


def unbalanced(
    counters: Iterable[Counters], records: Mapping[str, Record], ranks: int
) -> list[str]:
    """Where created is not the sum over the states, or not the number of the journal's rows."""
    rows = Counter(rank_of_session(session_id) for session_id in records)
    out = []
    for rank, counted in zip(range(ranks), counters, strict=True):
        total = sum(counted.states.values())
        if not counted.created == total == rows[rank]:
            out.append(
                f"rank {rank}: created {counted.created}, sum of states {total} "
                f"({dict(counted.states)}), {rows[rank]} rows in its journal"
            )
    return out


def sample_checks(
    config: Config,
    records: Mapping[str, Record],
    wanted: set[str],
    size: int,
    rng: random.Random,
    weights: Path | None = None,
) -> list[Check]:
    """Recompute sessions with ``size`` interactions in all: those with ``wanted`` ones first."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    order = list(records.values())
    rng.shuffle(order)
    order.sort(key=lambda r: not any(i.id in wanted for i in r.interactions))
    chosen: list[list[Interaction]] = []
    count = 0
    for record in order:
        if count >= size:
            break
        if record.interactions:
            chosen.append(record.interactions)
            count += len(record.interactions)
    return recompute(config, chosen, weights=weights)


def worst_error(checks: Iterable[Check]) -> float:
    """NaN, which compares false with any bound, if one is not a number."""
    return float(np.max([check.error for check in checks], initial=0.0))


def leaks(run: RunDir, secrets: Iterable[str]) -> list[str]:
    """Files of logs and settings that hold a session key or one of ``secrets``."""
    wanted = [secret.encode() for secret in secrets]
    files = [p for p in run.logs.rglob("*") if p.is_file()]
    files += [*run.path.glob("*.yaml"), *run.registry.glob("*.json"), run.metrics]
    out = []
    for path in files:
        data = path.read_bytes() if path.exists() else b""
        if SESSION_KEY.search(data) or any(secret in data for secret in wanted):
            out.append(str(path.relative_to(run.path)))
    return out


_TRACEBACK = re.compile(r"^Traceback .*\n(?:[ \t].*\n)*(.*)", re.MULTILINE)
"""A traceback ends with the first line that is not indented."""


def complaints(run: RunDir) -> list[str]:
    """Tracebacks in the parts' logs by their last lines: no kill elsewhere may surprise a part."""
    counts: Counter[str] = Counter()
    for path in run.logs.glob("*.log"):
        text = path.read_text(encoding="utf-8", errors="replace")
        for found in _TRACEBACK.finditer(text):
            counts[f"{path.name}: {found[1][:160]}"] += 1
    return [f"{count}x {what}" for what, count in counts.most_common()]


def last_traceback(run: RunDir) -> str:
    """The last one of any log, with the lines before it."""
    shown = ""
    for path in run.logs.glob("*.log"):
        text = path.read_text(encoding="utf-8", errors="replace")
        for found in _TRACEBACK.finditer(text):
            shown = text[max(0, found.start() - 500) : found.end()]
    return shown
