"""`any-agent run` as it is typed: its options, what it says, its signals and exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from any_agent.cli.main import main
from tests.support.proxy import until
from tests.support.sdk.programs import agent, marks_itself
from tests.support.sdk_fixtures import Served

LIMIT = 60.0
Said: TypeAlias = tuple[int, str, str]


@asynccontextmanager
async def typed(served: Served, *arguments: str, **env: str) -> AsyncIterator[Process]:
    """The command as a process, which is gone when this is left."""
    environ = {name: value for name, value in os.environ.items() if "OPENAI" not in name}
    environ |= {"ANY_AGENT_URL": served.url, "ANY_AGENT_API_KEY": served.tenant_key, **env}
    command = (sys.executable, "-m", "any_agent.cli", "run", *arguments)
    process = await asyncio.create_subprocess_exec(*command, env=environ, stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def said(process: Process) -> Said:
    """Its exit code, its output and what it says of itself."""
    out, err = await asyncio.wait_for(process.communicate(), LIMIT)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def folder_in(err: str) -> Path:
    """Where the output was kept."""
    return Path(err.strip().rpartition("their output is in ")[2])


@pytest.mark.service
async def test_a_single_run_shows_its_output_and_its_report_no_key(
    served: Served, tmp_path: Path
) -> None:
    does = "print('thinking'); print('hm', file=sys.stderr); ask(); print('5')"
    report = tmp_path / "report.json"
    options = ("--reward-cmd", "tail -n 1", "--json", str(report), "--task", "sums")
    async with typed(served, *options, "--", *agent(tmp_path, does)) as process:
        code, out, err = await said(process)
    assert (code, out) == (0, "thinking\n5\n"), err
    assert err.startswith("hm\n") and err.endswith("1 of 1 finalized, mean reward 5\n")
    told = json.loads(report.read_text())
    assert (told["exit_code"], told["task_id"], told["runs"][0]["reward"]) == (0, "sums", 5.0)
    # Nobody asked for the logs of what went well.
    assert not os.path.exists(told["runs"][0]["stdout"])  # noqa: ASYNC240
    assert served.tenant_key not in out + err + report.read_text()
    assert "sk-v1." not in out + err + report.read_text()


@pytest.mark.service
async def test_a_groups_output_is_not_shown_and_that_of_its_failures_is_kept(
    served: Served, tmp_path: Path
) -> None:
    does = "ask(); print('said'); sys.exit(int(os.environ['ANY_AGENT_RUN_INDEX']))"
    program = agent(tmp_path, does)
    async with typed(served, "--n", "2", "--reward-cmd", "echo 1", "--", *program) as process:
        code, out, err = await said(process)
    assert (code, out) == (1, "")
    assert "run 1 failed: ended with exit code 1\n" in err
    assert "1 of 2 finalized, mean reward 1\n" in err
    folder = folder_in(err)
    try:
        assert sorted(
            file.read_text() for file in folder.glob("*.out") if "reward" not in file.name
        )
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
@pytest.mark.service
async def test_a_signal_interrupts_the_run_and_aborts_its_session(
    served: Served, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    report = tmp_path / "report.json"
    options = ("--logs", str(tmp_path / "logs"), "--json", str(report))
    async with typed(served, *options, "--", *agent(tmp_path, marks_itself(tmp_path))) as process:
        await until((tmp_path / "pid").exists)
        process.send_signal(number)
        assert (await said(process))[0] == code
    (run,) = json.loads(report.read_text())["runs"]
    assert run["state"] == "interrupted"
    assert await served.state(run["session_id"]) == "aborted"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


@pytest.mark.service
async def test_a_second_ctrl_c_waits_for_nothing(served: Served, tmp_path: Path) -> None:
    does = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n{marks_itself(tmp_path)}"
    async with typed(served, "--", *agent(tmp_path, does)) as process:
        await until((tmp_path / "pid").exists)
        pid = int(await until((tmp_path / "pid").read_text))
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(0.3)
        assert process.returncode is None and psutil.pid_exists(pid)
        process.send_signal(signal.SIGINT)
        code, _, err = await said(process)
    assert code == 130 and "Traceback" not in err
    assert not psutil.pid_exists(pid)


@pytest.mark.service
async def test_a_run_goes_on_when_nobody_reads_its_output(served: Served, tmp_path: Path) -> None:
    """As with `| head -1`: the run goes on."""
    does = "ask()\nfor n in range(20_000): print('x' * 100)\nprint(1)"
    options = ("--reward-cmd", "tail -n 1", "--")
    async with typed(served, *options, *agent(tmp_path, does)) as process:
        assert process.stdout is not None and process.stderr is not None
        await process.stdout.readline()
        process.stdout._transport.close()  # type: ignore[attr-defined]
        err = (await asyncio.wait_for(process.stderr.read(), LIMIT)).decode()
        assert await process.wait() == 0, err
    assert "1 of 1 finalized, mean reward 1\n" in err


@pytest.mark.service
async def test_the_key_may_come_from_a_file(served: Served, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(f"{served.tenant_key}\n")
    options = ("--api-key-file", str(key), "--reward-cmd", "echo 1", "--")
    program = agent(tmp_path, "ask()")
    async with typed(served, *options, *program, ANY_AGENT_API_KEY="not taken") as process:
        assert (await said(process))[0] == 0
    async with typed(served, "--", *program, ANY_AGENT_API_KEY="nobodys-key") as process:
        code, _, err = await said(process)
    assert code == 3 and "nobodys-key" not in err and "ANY_AGENT_API_KEY" in err


WRONG = {
    "": "name the program after --",
    "--": "name the program after --",
    "--n 0 -- true": "is not a whole number from 1",
    "--n many -- true": "is not a whole number from 1",
    "--timeout -1 -- true": "is not a number of seconds above 0",
    "--timeout nan -- true": "is not a number of seconds above 0",
    "--reward-cmd x --grader y.z -- true": "not allowed with argument",
    "--grader judge -- true": "write it as module.function",
    "--n 2 --reward-file r -- true": "put {run} into its name",
    "--reward-on-failure bad -- true": "--reward-on-failure bad: that is no",
    "--reward-on-failure inf -- true": "finite",
    "--metadata { -- true": "--metadata is not JSON",
    "--metadata [1] -- true": "must be a JSON object",
    "--api-key-file /no/such/file -- true": "cannot be read",
    "--url nowhere -- true": "is no URL of a service",
    "--logs /dev/null/logs -- true": "cannot be created",
    "--task a/b/../c! -- true": "is no name",
    """--metadata '{"a": NaN}' -- true""": "--metadata: metadata must be",
    "-- no-such-program": "there is no program no-such-program",
}


def test_wrong_input_is_refused_before_a_service_is_asked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is none."""
    monkeypatch.setenv("ANY_AGENT_URL", "http://127.0.0.1:1")
    for words, message in WRONG.items():
        try:
            code: object = main(["run", *shlex.split(words)])
        except SystemExit as error:
            code = error.code
        assert code == 2, words
        assert message in capsys.readouterr().err, words


@pytest.mark.service
async def test_the_programs_own_options_are_its_own(served: Served, tmp_path: Path) -> None:
    program = agent(tmp_path, "ask(); print(sys.argv[1:])")
    arguments = ["--n", "2", "--", "--url", "x", "-h"]
    for dashes in ([], ["--"]):
        async with typed(served, "--reward-on-failure", "0", *dashes, *program, *arguments) as run:
            _, out, err = await said(run)
        assert out == f"{arguments}\n", err
