"""Programs of `any-agent run`: what they print is kept, and nothing of them is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from any_agent.errors import AgentFailed
from any_agent.sdk.program import process as command_child
from any_agent.sdk.program.process import Program, ProgramExit, run_program
from tests.support.errors import fails_with
from tests.support.launcher.children import is_alive as alive
from tests.support.launcher.children import until

Run: TypeAlias = Callable[..., Awaitable[ProgramExit]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    async def run(*argv: str, limit: float = 30.0) -> ProgramExit:
        env = {**os.environ, "THE_MARK": str(tmp_path), "PID_FILE": str(tmp_path / "pid")}
        mark = f"THE_MARK={tmp_path}"
        program = Program(argv, env, mark, tmp_path / "out", tmp_path / "err")
        return await run_program(program, limit=limit)

    return run


def is_alive(pid: int) -> bool:
    try:
        return alive(psutil.Process(pid))
    except psutil.NoSuchProcess:
        return False


def shell(script: str) -> tuple[str, str, str]:
    return ("/bin/sh", "-c", script)


def pid_of(folder: Path) -> int:
    """Of the process that writes its number there."""
    file = folder / "pid"
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    return int(file.read_text())


async def test_output_and_errors_of_a_program_are_kept_apart(run: Run, tmp_path: Path) -> None:
    """And an agent that reads what it is piped waits for nobody at a terminal."""
    ended = await run(*shell("wc -c | tr -d ' '; echo told >&2"))
    assert ended.success
    assert ((tmp_path / "out").read_text(), (tmp_path / "err").read_text()) == ("0\n", "told\n")


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("exit 3", 3, "ended with exit code 3"),
        ("kill -SEGV $$", -signal.SIGSEGV, "was killed by SIGSEGV"),
        ("kill -40 $$", -40, "was killed by signal 40"),
    ],
)
async def test_a_program_that_ends_badly_is_no_success_and_says_how(
    run: Run, script: str, code: int, said: str
) -> None:
    ended = await run(*shell(script))
    assert (ended.code, ended.success, str(ended)) == (code, False, said)


async def test_a_program_that_takes_too_long_is_asked_to_end(run: Run, tmp_path: Path) -> None:
    ended = await run(*shell("trap 'echo bye; exit 0' TERM; sleep 60 & wait"), limit=3)
    assert (ended.code, ended.success) == (None, False)
    assert str(ended) == "took more than 3 s"
    assert (tmp_path / "out").read_text() == "bye\n"


async def test_a_program_that_does_not_heed_the_request_to_end_is_killed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_child, "TERM_TIMEOUT", 0.1)
    script = "trap '' TERM; echo $$ > $PID_FILE; while :; do sleep 0.01; done"
    ended = await run(*shell(script), limit=3)
    assert ended.cut_off is not None
    assert not psutil.pid_exists(pid_of(tmp_path))


@pytest.mark.parametrize("code", [0, 1])
async def test_a_child_that_left_the_programs_process_group_ends_with_it(
    run: Run, tmp_path: Path, code: int
) -> None:
    """As tools do that make themselves daemons, or Node's detached children."""
    stray = shell("echo $$ > $PID_FILE; exec sleep 600")
    script = f"""
import os, subprocess, sys, time
subprocess.Popen({stray!r}, start_new_session=True)
while not os.path.exists(os.environ["PID_FILE"]):
    time.sleep(0.01)
sys.exit({code})
"""
    ended = await run(sys.executable, "-c", script)
    assert ended.code == code
    until(lambda: not is_alive(pid_of(tmp_path)))


async def test_other_runs_are_left_alone(run: Run, tmp_path: Path) -> None:
    env = {"THE_MARK": f"{tmp_path}-other"}
    other = subprocess.Popen(["sleep", "600"], env=env)  # noqa: ASYNC220 - it is not waited for
    try:
        assert (await run(*shell("true"))).success
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


async def test_a_cancelled_run_ends_its_program(run: Run, tmp_path: Path) -> None:
    script = "trap 'echo bye; exit 0' TERM; echo $$ > $PID_FILE; while :; do sleep 0.01; done"
    task = asyncio.create_task(run(*shell(script)))  # type: ignore[arg-type]
    await asyncio.to_thread(pid_of, tmp_path)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pid_of(tmp_path))
    assert (tmp_path / "out").read_text() == "bye\n"


async def test_a_run_that_is_cancelled_again_waits_for_nothing(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A wait for its end would outlast any test.
    monkeypatch.setattr(command_child, "TERM_TIMEOUT", 9000)
    script = "trap '' TERM; echo $$ > $PID_FILE; while :; do sleep 0.01; done"
    task = asyncio.create_task(run(*shell(script)))  # type: ignore[arg-type]
    await asyncio.to_thread(pid_of, tmp_path)
    task.cancel()
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not psutil.pid_exists(pid_of(tmp_path))


async def test_a_program_that_only_prints_is_ended(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command_child, "MAX_OUTPUT", 2**20)
    ended = await run(*shell("yes >&2"))
    assert str(ended) == "printed more than 1 MiB"


async def test_a_program_that_cannot_be_executed_fails_with_the_reason(
    run: Run, tmp_path: Path
) -> None:
    with fails_with(AgentFailed, "/no/such", "No such file or directory"):
        await run("/no/such")
    text = tmp_path / "text"
    text.write_text("not a program")
    with fails_with(AgentFailed, text, "Permission denied"):
        await run(str(text))


def test_a_program_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = f"""
import asyncio, os, sys
from pathlib import Path
from any_agent.sdk.program.process import Program, run_program
folder = Path({str(tmp_path)!r})
env = {{**os.environ, "PID_FILE": str(folder / "pid")}}
argv = ["/bin/sh", "-c", "echo $$ > $PID_FILE; exec sleep 600"]
program = Program(argv, env, "NO_MARK=1", folder / "out", folder / "err")
asyncio.run(run_program(program, limit=600))
"""
    parent = subprocess.Popen([sys.executable, "-c", script])
    try:
        child = pid_of(tmp_path)
    finally:
        parent.kill()
        parent.wait()
    until(lambda: not is_alive(child))
