"""Download a hub's model into its cache: ``python -m any_agent.launcher.fetch_model NAME``.

The child process of `hub_model`: it prints JSON lines, the bytes so far and those in all, and at
last ``{"commit": ...}``, or ``{"error": ...}`` with what to do. A model that is whole in the cache
is found there, without a request.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import httpx
from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm  # type: ignore[import-untyped]

_LOADED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.tiktoken", "*.txt"]
"""Files that engines and trainers load: weights, configuration, tokenizer, chat template."""
_COPIES = ["*/*", "consolidated*"]
"""Files that hold the same in other forms, all folders among them."""
_CONNECT_TIMEOUT = 4.0
"""Seconds in which a hub must answer its first request."""
_STEP = 1 << 18  # bytes between two steps of progress
_TOLD = 0.5  # seconds between two lines


def main(argv: Sequence[str]) -> int:
    """Return the exit code: 0 if the model is in the cache."""
    try:
        _tell(commit=fetch(argv[0]))
    except Exception as error:
        _tell(error=problem(argv[0], error))
        return 1
    return 0


def fetch(name: str) -> str:
    """Bring a model into the cache; return its commit. Raises what the hub's client raises."""
    try:
        folder = Path(_snapshot(name, local_files_only=True))
        if _is_whole(folder):
            return folder.name
    except LocalEntryNotFoundError:
        pass
    if constants.HF_HUB_OFFLINE:
        raise OfflineModeIsEnabled("HF_HUB_OFFLINE is set")
    # A slow download must not look like none: by default a step of progress is 10 MB.
    constants.DOWNLOAD_CHUNK_SIZE = _STEP
    # The download itself would try for long, and in vain.
    HfApi().model_info(name, timeout=_CONNECT_TIMEOUT)
    threading.Thread(target=_Progress.tell_on, daemon=True).start()
    folder = Path(_snapshot(name, tqdm_class=_Progress))
    _Progress.tell()
    if not _is_whole(folder):
        raise _Incomplete
    return folder.name


_snapshot = partial(snapshot_download, allow_patterns=_LOADED, ignore_patterns=_COPIES)


class _Incomplete(Exception):
    """The hub's model lacks a configuration or weights as safetensors."""


def _is_whole(folder: Path) -> bool:
    """Return whether a folder has a configuration and all files of weights."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        names = {path.name for path in folder.glob("*.safetensors")}
    return bool(names) and all((folder / name).is_file() for name in {*names, "config.json"})


def problem(name: str, error: Exception) -> str:
    """Return why a model cannot be downloaded, and what to do, without its address's secrets."""
    hub = _without_userinfo(constants.ENDPOINT)
    offline = (
        f"{name} is no folder here, not whole in the cache {constants.HF_HUB_CACHE}, and the hub "
        f"{hub} %s: connect this machine, set HF_ENDPOINT to a mirror, or name a local folder"
    )
    match error:
        case GatedRepoError():
            return (
                f"{name} is gated at {hub}, and this account has no access: accept its terms at "
                f"{hub}/{name}, and set HF_TOKEN to a token of that account (or `hf auth login`)"
            )
        case RepositoryNotFoundError():
            return (
                f"there is no model {name} at {hub}, or it is private: check the name; for a "
                "private one set HF_TOKEN (or `hf auth login`); a local folder is written "
                "./folder or /folder"
            )
        case RevisionNotFoundError():
            return f"{name} at {hub} has no branch `main`: download it, and name its folder"
        case _Incomplete():
            return (
                f"{name} at {hub} has no config.json, or not all of its weights as safetensors: "
                "choose another model, or convert it"
            )
        case HFValidationError():
            return f"{name} is no name of a model on a hub: write owner/name, or a local folder"
        case OfflineModeIsEnabled():
            return offline % "must not be asked (HF_HUB_OFFLINE is set; unset it)"
        case HfHubHTTPError():
            return offline % f"answered {error.response.status_code}"
        case httpx.TimeoutException():
            return offline % "does not answer in time"
        case httpx.TransportError() | LocalEntryNotFoundError():
            return offline % "cannot be reached"
    text = " ".join(f"{type(error).__name__}: {error}".replace(constants.ENDPOINT, hub).split())
    return f"{name} could not be downloaded from {hub}: {text[:300]}"


def _without_userinfo(url: str) -> str:
    """Return an address without its user and password."""
    scheme, separator, rest = url.rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


class _Progress(tqdm):  # type: ignore[misc]
    """Tells the bytes instead of drawing a bar; `snapshot_download` has one bar of bytes written,
    one of bytes received, and one of files."""

    _lock_of_all = threading.Lock()
    _bars: ClassVar[dict[str, _Progress]] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("name", None)
        self._unit = kwargs.get("unit")
        self._key = str(kwargs.get("desc", ""))
        super().__init__(*args, **{**kwargs, "disable": True})
        self.total = kwargs.get("total")
        self.n = kwargs.get("initial") or 0

    def update(self, n: float | None = 1) -> bool | None:
        kind = type(self)
        with kind._lock_of_all:
            self.n += n or 0
            if self._unit == "B":
                kind._bars[self._key] = self
        return None

    @classmethod
    def tell(cls) -> None:
        """Print the bytes so far, and those in all."""
        with cls._lock_of_all:
            found = [(bar.n, bar.total or 0) for bar in cls._bars.values()]
        done, total = max(found, default=(0, 0))
        _tell(done=int(done), total=int(total))

    @classmethod
    def tell_on(cls) -> None:
        """Print them again and again."""
        while True:
            time.sleep(_TOLD)
            cls.tell()


def _tell(**what: Any) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
