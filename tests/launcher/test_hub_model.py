"""A model that is named by its hub id: one download, with its progress, before the parts start.

The hub is a small one on loopback; the client is the real one.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import OfflineModeIsEnabled

from any_agent.errors import StartupError
from any_agent.launcher.fetch_model import problem
from any_agent.launcher.hub_model import bring_model, on_hub, parts_variables
from tests.support.fake_hub import COMMIT, FakeHub, fake_hub

MODEL = "me/tiny"
_OURS = {"config.json", "tokenizer.json", "model.safetensors"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    folder = tmp_path / "model"
    (folder / "onnx").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text(f'{{"name": "{name}"}}')
    for name in ("model.safetensors", "pytorch_model.bin", "tiny.gguf", "onnx/model.safetensors"):
        (folder / name).write_bytes(bytes(3_000_000))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with fake_hub() as found:
        found.models[MODEL] = folder
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def brought(name: str = MODEL, stall: float = 60.0) -> str:
    """Bring a model; return what was printed."""
    lines: list[str] = []
    bring_model(name, lines.append, stall=stall)
    return "\n".join(lines)


def test_a_hub_id_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert on_hub("Qwen/Qwen3-0.6B")
    for name in ("", "/models/a", "./models/a", "a", "models/a/b"):
        assert not on_hub(name), name
    Path("models/a").mkdir(parents=True)
    Path("models/a/config.json").write_text("{}")
    assert not on_hub("models/a")


def test_parts_fetch_nothing_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    assert parts_variables() == {"HF_HUB_OFFLINE": "1"}
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert parts_variables() == {}


@pytest.mark.service
def test_a_model_is_downloaded_once_with_its_progress(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what is loaded is fetched, and no other form of the same weights."""
    hub.pause = 0.15
    text = brought()
    assert set(hub.sent) == _OURS and len(hub.sent) == len(_OURS)
    assert re.search(r"[\d.]+ [kM]?B of 3\.0 MB, [\d.]+ kB/s", text), text
    assert COMMIT[:12] in text
    hub.requests.clear()
    assert "in the cache" in brought() and hub.requests == []
    # Half a model there is completed.
    (folder,) = (tmp_path / "cache" / "hub").glob(f"models--*/snapshots/{COMMIT}")
    (folder / "model.safetensors").unlink()
    shutil.rmtree(folder.parents[1] / "blobs")
    hub.sent.clear()
    brought()
    assert "model.safetensors" in hub.sent
    # A whole one needs no hub.
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert "in the cache" in brought()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "in the cache" in brought()


@pytest.mark.service
@pytest.mark.parametrize(
    ("why", "says"),
    [
        ("no model", "there is no model"),
        ("gated", "HF_TOKEN"),
        ("away", "cannot be reached"),
        ("offline", "HF_HUB_OFFLINE"),
        ("no weights", "safetensors"),
    ],
)
def test_why_there_is_no_model_is_one_line(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, why: str, says: str
) -> None:
    name = "me/other" if why == "no model" else MODEL
    if why == "gated":
        hub.gated.add(MODEL)
    elif why == "away":
        monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    elif why == "offline":
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    elif why == "no weights":
        (hub.models[MODEL] / "model.safetensors").unlink()
    with pytest.raises(StartupError) as error:
        brought(name)
    assert says in error.value.message and name in error.value.message
    assert "\n" not in error.value.message


@pytest.mark.parametrize("error", [OfflineModeIsEnabled(), ValueError("not at %s/me/model")])
def test_a_hubs_password_is_not_told(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    address = "https://someone:hunter2@hub.example/mirror"
    monkeypatch.setattr(constants, "ENDPOINT", address)
    error.args = tuple(str(text).replace("%s", address) for text in error.args)
    told = problem(MODEL, error)
    assert "https://hub.example/mirror" in told
    assert "hunter2" not in told and "someone" not in told


@pytest.mark.service
def test_a_stall_ends_a_download_and_the_next_start_goes_on(hub: FakeHub) -> None:
    hub.stalls_after = 1_000_000
    with pytest.raises(StartupError, match=r"stalled: no byte for .*[\d.]+ [kM]B so far"):
        brought(stall=10.0)
    hub.stalls_after = None
    hub.sent.clear()
    brought()
    assert hub.sent == ["model.safetensors"]


@pytest.mark.service
def test_a_wait_for_a_download_can_be_ended(hub: FakeHub) -> None:
    """Ctrl-C, or a service that is stopped meanwhile, raises in `check`, and ends it."""
    hub.stalls_after = 0
    began = time.monotonic()

    def check() -> None:
        if hub.sent:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bring_model(MODEL, lambda _: None, check=check)
    assert time.monotonic() - began < 60
