"""The audit log: what stands in it, that it is bounded, and that it holds nobody up."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from any_agent.auth import audit_log
from any_agent.auth.audit_log import AuditLog
from any_agent.auth.key_store import create_key, revoke_key
from any_agent.launcher.trial import trial_dir
from tests.support.proxy import signer, until
from tests.support.proxy_fixtures import Start


def lines_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_uses_and_refusals_are_written_to_the_audit_log(start: Start) -> None:
    proxy = await start("server.admin_key=operator-secret")
    await proxy.admit(10)
    run = trial_dir(proxy.service.config)
    path = run.keys
    tenant, kept = create_key(path, "tenant", tenant="alice")
    old, gone = create_key(path, "admin")
    revoke_key(path, gone.id)
    session = await proxy.open()
    id = session["session_id"]
    router = signer(proxy)
    async with httpx.AsyncClient(base_url=proxy.url) as stranger:
        # A client that reaches the rank itself names no other one.
        forged = {"authorization": "Bearer nonsense-key", "x-any-agent-client": "10.1.1.1"}
        await stranger.post("/rl/v1/pause", headers=forged)
        await stranger.get("/rl/v1/capacity", headers={"x-api-key": old})
        await stranger.put("/rl/v1/run", headers={"authorization": f"Bearer {tenant}"})
        await stranger.post(
            f"/rl/v1/sessions/{id}/abort",
            headers={
                "authorization": f"Bearer {session['api_key']}",
                "x-any-agent-client": router.sign_client("10.9.8.7"),
            },
        )
    await proxy.post("/rl/v1/export_trajectories", {"session_ids": [id]})
    await proxy.client.pause(ttl=1)
    await proxy.client.resume()
    log = run.audit / "rank-0.jsonl"
    found = await until(lambda: len(got := lines_in(log)) >= 7 and got, "the lines")
    assert [(line["event"], line["route"], line.get("who"), line["status"]) for line in found] == [
        ("refused", "POST /rl/v1/pause", None, 401),
        ("refused", "GET /rl/v1/capacity", None, 401),
        ("refused", "PUT /rl/v1/run", f"tenant alice (key {kept.id})", 403),
        ("used", "POST /rl/v1/sessions/{session_id}/abort", "session", 200),
        ("used", "POST /rl/v1/export_trajectories", "admin", 409),
        ("used", "POST /rl/v1/pause", "admin", 200),
        ("used", "POST /rl/v1/resume", "admin", 200),
    ]
    assert found[3]["sessions"] == found[4]["sessions"] == [id]
    assert [line.get("for") for line in found] == [None, None, None, "10.9.8.7", None, None, None]
    assert [line.get("claimed") for line in found[:2]] == [None, gone.id]
    assert all(line["client"] == "127.0.0.1" and line["at"].endswith("Z") for line in found)
    text = json.dumps(found)
    for key in (session["api_key"], tenant, old, "operator-secret", "nonsense-key"):
        assert key not in text
    assert proxy.service.audit.refused == {"invalid_api_key": 2, "forbidden": 1}


def test_a_flood_of_refusals_or_failures_is_counted_and_pushes_nothing_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of an agent that vetoes what is not its own, or not finalized, again and again."""
    now = 0.0
    monkeypatch.setattr(audit_log, "time", SimpleNamespace(monotonic=lambda: now))
    path = tmp_path / "audit" / "rank-0.jsonl"
    audit = AuditLog(path)
    audit.use(who="admin", route="PUT /rl/v1/run", status=200)
    for _ in range(5_000):
        audit.refusal("invalid_api_key", route="GET /x")
        audit.use(who="session", route="POST /rl/v1/sessions/{session_id}/veto", status=409)
    audit.use(who="admin", route="POST /rl/v1/pause", status=200)
    # Whoever comes after the flood is written again, and says what is missing.
    now = 1.0
    audit.refusal("forbidden", route="GET /y")
    audit.close()
    found = lines_in(path)
    assert len(found) < 200 and audit.dropped == 0
    own = [line["route"] for line in found if line.get("who") == "admin"]
    assert own == ["PUT /rl/v1/run", "POST /rl/v1/pause"]
    assert found[-1]["route"] == "GET /y"
    assert len(found) + sum(line.get("suppressed", 0) for line in found) == 10_003
    assert audit.refused == {"invalid_api_key": 5_000, "forbidden": 1}
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_audit_log_takes_bounded_space_and_keeps_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    audit = AuditLog(path, max_bytes=2000, files=3)
    for n in range(1000):
        audit.use(who="admin", route="PUT /rl/v1/run", number=n)
    audit.close()
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["rank-0.jsonl", "rank-0.jsonl.1", "rank-0.jsonl.2"]
    assert all(p.stat().st_size <= 2000 for p in tmp_path.iterdir())
    kept = [line["number"] for name in reversed(names) for line in lines_in(tmp_path / name)]
    assert kept == list(range(kept[0], 1000)), "the newest ones, in order"


def test_a_long_list_of_sessions_is_cut_in_the_audit_log(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    audit = AuditLog(path)
    audit.use(who="admin", sessions=[f"ses-{n}" for n in range(150)])
    audit.close()
    [line] = lines_in(path)
    assert len(line["sessions"]) == 100 and line["more_sessions"] == 50


def test_a_failing_disk_costs_audit_lines_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "audit").write_text("in the way")
    audit = AuditLog(tmp_path / "audit" / "rank-0.jsonl")
    for _ in range(10):
        audit.use(who="admin")
    audit.close()
    assert audit.dropped == 10
