"""The trainer's registry entry, and its metrics over HTTP."""

from __future__ import annotations

import logging
import os
import socket
import struct
import threading
from pathlib import Path

import httpx
import pytest

import trainer.metrics_server as presence_module
from any_agent.keys import KeySigner
from any_agent.rundir import registry
from any_agent.rundir.registry import Registry, RegistryEntry, publish
from tests.support.errors import fails_with
from tests.support.workflow_executor import until
from trainer.metrics import TrainerMetrics
from trainer.metrics_server import TrainerHeartbeat

SIGNER = KeySigner(bytes(range(32)))
OWN = {"authorization": f"Bearer {SIGNER.metrics_key}"}


def opened(folder: Path) -> TrainerHeartbeat:
    return TrainerHeartbeat(folder, TrainerMetrics(dict), signer=SIGNER, ready=lambda: True)


def entry_in(folder: Path) -> RegistryEntry | None:
    entries = Registry(folder)
    entries.refresh()
    return entries.get("trainer")


def get(url: str) -> httpx.Response:
    return httpx.get(url, headers=OWN, trust_env=False, timeout=10)


def test_the_registry_entry_lives_as_long_as_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT", 0.01)
    metrics, loaded = TrainerMetrics(dict), threading.Event()
    failures = iter([RuntimeError("planted")])

    def ready() -> bool:
        for error in failures:
            raise error
        return loaded.is_set()

    with TrainerHeartbeat(tmp_path, metrics, signer=SIGNER, ready=ready) as presence:
        until(lambda: entry_in(tmp_path))
        first = entry_in(tmp_path)
        assert first is not None
        assert (first.url, first.pid, first.state) == (presence.url, os.getpid(), "starting")
        loaded.set()
        until(lambda: (entry_in(tmp_path) or first).state == "ready")
        metrics.record_position(step=4, version=7)
        until(lambda: (entry_in(tmp_path) or first).version == 7)
        assert get(f"{presence.url}/metrics").status_code == 200
    last = entry_in(tmp_path)
    assert last is not None
    assert (last.state, last.boot_id) == ("stopping", first.boot_id)
    with pytest.raises(httpx.ConnectError):
        get(f"{presence.url}/metrics")


def test_a_failed_trainer_leaves_its_registry_entry_as_if_alive(tmp_path: Path) -> None:
    with fails_with(ValueError, "why"), opened(tmp_path):
        until(lambda: entry_in(tmp_path))
        raise ValueError("why")
    last = entry_in(tmp_path)
    assert last is not None and last.state == "ready"


def test_a_folder_that_cannot_be_written_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "HEARTBEAT", 0.01)
    folder = tmp_path / "registry"
    with opened(folder) as presence:
        until(lambda: caplog.records)
        assert get(f"{presence.url}/metrics").status_code == 200
        folder.mkdir()
        until(lambda: entry_in(folder))


def test_a_disk_that_hangs_delays_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    works = threading.Event()

    def write(folder: Path, entry: RegistryEntry) -> None:
        assert works.wait(60)
        publish(folder, entry)

    monkeypatch.setattr(registry, "publish", write)
    monkeypatch.setattr(presence_module, "LAST_WRITE_TIMEOUT", 0.1)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with opened(elsewhere) as presence:
        assert get(f"{presence.url}/metrics").status_code == 200
        assert entry_in(elsewhere) is None
    assert "last registry entry is not written after 0.1 s" in caplog.text
    monkeypatch.setattr(presence_module, "LAST_WRITE_TIMEOUT", 60)
    with opened(tmp_path):
        works.set()
        until(lambda: entry_in(tmp_path))
    last = entry_in(tmp_path)
    assert last is not None and last.state == "stopping"


def test_metrics_need_the_runs_own_key(tmp_path: Path) -> None:
    forged = KeySigner(bytes(32)).metrics_key
    with opened(tmp_path) as presence:
        url = f"{presence.url}/metrics"
        port = int(presence.url.rpartition(":")[2])
        # A client that says nothing is not waited for.
        with socket.create_connection(("127.0.0.1", port)):
            for key in ("sk-", "nonsense", forged, SIGNER.mint(0)[1], SIGNER.run_key):
                for headers in ({"authorization": f"Bearer {key}"}, {"x-api-key": key}):
                    answer = httpx.get(url, headers=headers, trust_env=False)
                    assert answer.status_code == 401
                    assert "any_agent_train" not in answer.text
            for headers in (OWN, {"x-api-key": SIGNER.metrics_key}):
                answer = httpx.get(url, headers=headers, trust_env=False)
                assert answer.status_code == 200
                assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
                assert "any_agent_train_step 0.0" in answer.text
        assert get(f"{presence.url}/elsewhere").status_code == 404


def test_a_scraper_that_gave_up_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This process was stopped for longer than the router waits."""
    left = threading.Event()
    monkeypatch.setattr(KeySigner, "is_metrics_key", lambda *_: left.wait(60))
    with opened(tmp_path) as presence:
        port = int(presence.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        left.set()
        # One loop serves both: by the answer the first one is over.
        assert get(f"{presence.url}/metrics").status_code == 200
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
