from __future__ import annotations

import asyncio
import gc
import os
import shutil
import signal
import ssl
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import uvicorn.server
from hypothesis import settings

from tests.support import results

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tests write and delete ten thousands of small files: in memory this takes a hundredth of the time.
# What a killed process wrote is there all the same.
_MEMORY = Path("/dev/shm")
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free >= 4 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

# Every HTTP client reads all authorities' certificates, in 50 ms of CPU, for a test of 200 ms: here
# they are read once. What is made of the same arguments may be shared.
ssl.create_default_context = cache(ssl.create_default_context)  # type: ignore[assignment]


class _Sooner:
    """asyncio for uvicorn, which looks ten times a second whether it is to end: a test that starts
    a server waits for two such looks."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


uvicorn.server.asyncio = _Sooner()  # type: ignore[assignment]

# Shells start what runs in the background with Ctrl-C ignored, nohup with SIGHUP, and programs
# inherit that: tests of these would fail there.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Tests are collected by importing all that they use, which leaves no garbage: looking for it takes
# a quarter of that time, in each process.
gc.disable()

SERVICE_FOLDERS = ("tests/benchmarks/", "tests/chaos/", "tests/e2e/", "tests/laws/")
"""Tests that start services, or hold a law over many sessions."""

SERVICE_TIMEOUT = 1200
"""Seconds for the function of a test that starts services; its fixtures have limits of their own.

A promise's own waits add up to less, also on a machine with much else to do: this ends what hangs.
"""


def pytest_addoption(parser: pytest.Parser) -> None:
    # Here and not beside the proofs: pytest asks only the first folders' files for options, and
    # where the tests run in other processes it does not read the proofs' file itself.
    parser.addoption(
        "--long",
        action="store_true",
        help="run the proofs of tests/chaos and the laws of tests/laws in their long form",
    )
    parser.addoption(
        "--record",
        action="store_true",
        help="keep what was found for its document: of proofs in tests/results.jsonl, of clients "
        "in tests/clients/results.json",
    )
    parser.addoption(
        "--journal",
        choices=("file", "redis"),
        default="file",
        help="run the proofs of tests/chaos with this journal (default: file)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # No example fails for having taken long, on a machine that has much to do. The short form tries
    # the same ones each time, as CI does; the long one finds new ones.
    long = config.getoption("--long")
    settings.register_profile("ours", settings.get_profile("ci"), derandomize=not long)
    settings.load_profile("ours")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which the expression of `make test` or of the gate takes no test.

    Each of the processes that share the tests collects them all.
    """
    expression = config.getoption("markexpr")
    if not expression.endswith("not service") or collection_path.suffix != ".py":
        return None
    place = collection_path.relative_to(config.rootpath).as_posix()
    wanted = [f"mark.{mark}" for mark in ("smoke", "gate") if mark in expression]
    if place.startswith(SERVICE_FOLDERS) and collection_path.name.startswith("test_"):
        text = collection_path.read_text(encoding="utf-8")
        return not any(mark in text for mark in wanted) or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("timeout") is not None
    for item in items:
        if item.nodeid.startswith(SERVICE_FOLDERS):
            item.add_marker("service")
        live = item.path.name.endswith("_live.py")
        service = live or item.get_closest_marker("service")
        if service and not asked and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SERVICE_TIMEOUT, func_only=True))
    if hasattr(config, "workerinput"):
        _deal(items)


def _deal(items: list[pytest.Item]) -> None:
    """Put files into the order in which several processes take them.

    Files that start services take the longest, and all cores. They are spread over the first two
    thirds: few run at once, and none begins when the other processes have nothing left to do.
    """
    files = list(dict.fromkeys(item.path for item in items))
    services = {item.path for item in items if item.nodeid.startswith(SERVICE_FOLDERS)}
    long = [file for file in files if file in services]
    others = [file for file in files if file not in services]
    place = {file: k / len(long) * 2 / 3 for k, file in enumerate(long)}
    place |= {file: k / len(others) for k, file in enumerate(others)}
    items.sort(key=lambda item: place[item.path])


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Take away what LiteLLM's import and a runner leave in this process."""
    os.environ.pop("LITELLM_MASTER_KEY", None)
    runner = sys.modules.get("any_agent.client.environment")
    if runner is not None and runner.is_placeholder(os.environ.get("OPENAI_BASE_URL", "")):
        del os.environ["OPENAI_BASE_URL"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random tiny Qwen3 (float32) with its tokenizer, in Hugging Face's layout."""
    from any_agent.demo.models.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model", seed=0)


@pytest.fixture(scope="session")
def long(pytestconfig: pytest.Config) -> bool:
    """True if the proofs were asked for in their long form (``--long``)."""
    return bool(pytestconfig.getoption("--long"))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Say what was measured: shown after the tests, also of a proof that fails."""
    name = request.node.name
    # They travel with the test's report, also from another process.
    said = request.node.user_properties
    return lambda text: said.append((results.FIGURE, f"{name}: {text}"))


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    form = "long" if config.getoption("--long") else "short"
    found: dict[str, results.Result] = {}
    for report in _reports(terminalreporter):
        proof = report.nodeid.partition("::")[0]
        result = found.setdefault(proof, results.Result(proof, form))
        result.passed += report.passed and report.when == "call"
        result.failed += report.failed
        result.figures += [str(t) for kind, t in report.user_properties if kind == results.FIGURE]
    lines = [line for result in found.values() for line in result.figures]
    if lines:
        terminalreporter.section(f"figures of the proofs ({form} form)")
        for line in lines:
            terminalreporter.write_line(line)
    chosen = config.getoption("keyword") or any("::" in each for each in config.args)
    whole = not chosen and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
    if config.getoption("--record") and whole:
        results.record(r for r in found.values() if r.passed or r.failed)


def _reports(terminalreporter: pytest.TerminalReporter) -> Iterator[pytest.TestReport]:
    """Yield what tests did, and what failed before or after them."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and (report.when == "call" or report.failed):
                yield report
