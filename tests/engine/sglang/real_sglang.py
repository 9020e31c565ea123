"""A real SGLang on the CPU, in an environment of its own: its pins collide with ours.

Tests only use it; ``python -m tests.engine.sglang.real_sglang`` installs it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from any_agent.runtime.ports import reserve
from tests.support.real_parts import environment

HERE = Path(__file__).parent
FOLDER = Path(__file__).resolve().parents[3] / ".venv-sglang"
_PYTHON = FOLDER / "bin" / "python"
_REQUIREMENTS, _PINS = HERE / "requirements.txt", HERE / "constraints.txt"
# Without their dependencies: what they need on a CPU is in the requirements.
_BARE = ("sglang==0.5.23", "torchvision==0.28.0")
OPTIONS = (
    *("--attention-backend", "torch_native", "--mem-fraction-static", "0.1"),
    *("--max-total-tokens", "32768", "--sleep-on-idle"),
)
"""That it needs on a CPU, beside its device."""
VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
    # More threads than one hinder each other, and it binds them to cores otherwise.
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
    "PYTHONPATH": str(HERE / "cpu"),
}
START, _STOP = 480.0, 10.0
"""Seconds; it starts in a minute where nothing else runs."""
_ILL_AFTER = "8"
"""Seconds without a token until it calls itself ill; 20 of its own."""


def python() -> Path:
    """Return its interpreter; the test fails where it is not installed."""
    if told := os.environ.get("SGLANG_PYTHON"):
        return Path(told)
    if not _is_made():
        command = "python -m tests.engine.sglang.real_sglang"
        pytest.fail(
            f"SGLang is not installed, or not as its pins ask for it: run {command}", pytrace=False
        )
    return _PYTHON


def install() -> None:
    """Install it unless it is there: 3.5 GB in some minutes."""
    if told := os.environ.get("SGLANG_PYTHON"):
        print(f"sglang   {told}, as SGLANG_PYTHON says")
        return
    if not _is_made():
        print(f"sglang   making {FOLDER}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER], check=True, timeout=120)
        pip = [str(_PYTHON), "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        print("sglang   installing what it needs, 3.5 GB: silent for some minutes", flush=True)
        subprocess.run([*pip, "-r", str(_REQUIREMENTS), "-c", str(_PINS)], check=True, timeout=1800)
        print(f"sglang   installing {' and '.join(_BARE)}", flush=True)
        subprocess.run([*pip, "--no-deps", *_BARE], check=True, timeout=600)
        _stamp().touch()
    print(f"sglang   {_PYTHON}")


def _is_made() -> bool:
    return _stamp().exists() and _PYTHON.exists()


def _stamp() -> Path:
    """Return the file that is there once all is installed, as these pins ask for it."""
    wanted = _REQUIREMENTS.read_bytes() + _PINS.read_bytes() + " ".join(_BARE).encode()
    return FOLDER / f".made-{hashlib.blake2b(wanted, digest_size=6).hexdigest()}"


@contextlib.contextmanager
def sglangs(model: Path, folder: Path, count: int) -> Iterator[list[str]]:
    """Their URLs, once all serve; they start side by side."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(_started(model, folder / f"{k}.log")) for k in range(count)]
        for url, child, log in servers:
            _await(f"{url}/health_generate", child, log)
        yield [url for url, _, _ in servers]


@contextlib.contextmanager
def _started(model: Path, log: Path) -> Iterator[tuple[str, subprocess.Popen[bytes], Path]]:
    with reserve("127.0.0.1", 0) as listener, open(log, "wb") as out:
        port = listener.getsockname()[1]
        command = [str(python()), "-m", "sglang.launch_server", "--model-path", str(model)]
        command += ["--host", "127.0.0.1", "--port", str(port), *OPTIONS]
        command += ["--device", "cpu", "--incremental-streaming-output"]
        variables = environment(**VARIABLES, SGLANG_HEALTH_CHECK_TIMEOUT=_ILL_AFTER)
        # It starts processes of its own, which must not outlive it.
        child = subprocess.Popen(
            command, stdout=out, stderr=out, env=variables, start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}", child, log
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(_STOP)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def _await(url: str, child: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START
    while True:
        said = log.read_text(errors="replace")[-3000:]
        assert child.poll() is None, said
        assert time.monotonic() < deadline, said
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url, timeout=30).status_code == 200:
                return
        time.sleep(0.5)


if __name__ == "__main__":
    try:
        install()
    except (subprocess.SubprocessError, OSError) as error:
        sys.exit(f"error: SGLang could not be installed: {error}")
