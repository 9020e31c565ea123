"""Programs as sessions: each call in its own, each session with its end."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import psutil
import pytest

from any_agent.cli.run import as_json, exit_code, table
from any_agent.errors import ConfigError
from any_agent.sdk.find_service import ServiceAddress
from any_agent.sdk.program.reward import RewardSource
from any_agent.sdk.program.run import ProgramGroup, ProgramRun, without_ours
from tests.support.errors import fails_with
from tests.support.proxy import until
from tests.support.sdk.programs import agent, marks_itself
from tests.support.sdk_fixtures import Serve, Served

Make: TypeAlias = Callable[..., ProgramGroup]


@pytest.fixture
def make(tmp_path: Path, served: Served) -> Make:
    def make(does: str = "ask()", **fields: Any) -> ProgramGroup:
        options = {
            "command": agent(tmp_path, does),
            "service": ServiceAddress(served.url, served.tenant_key),
            "folder": tmp_path,
            "limit": 60.0,
            "wait": 5.0,
        }
        return ProgramGroup(**options | fields)

    return make


async def only(runs: ProgramGroup) -> ProgramRun:
    """The result of the only run."""
    await runs.run()
    (result,) = runs.results
    return result


async def reason(served: Served, result: ProgramRun) -> str:
    """Why its session was thrown away."""
    assert result.session_id is not None
    info = await served.info(result.session_id)
    assert info["state"] == "aborted"
    return str(info["reason"])


@pytest.mark.service
async def test_the_runs_of_a_program_are_one_group_with_their_own_rewards(
    make: Make, served: Served
) -> None:
    source = RewardSource(command='cat > /dev/null; echo "$ANY_AGENT_RUN_INDEX"')
    runs = make('ask("I am " + os.environ["ANY_AGENT_RUN_INDEX"])', n=3, source=source, task_id="t")
    await runs.run()
    assert [run.state for run in runs.results] == ["finalized"] * 3
    assert [run.reward for run in runs.results] == [0.0, 1.0, 2.0]
    assert [(run.calls, run.exit_code) for run in runs.results] == [(1, 0)] * 3
    assert exit_code(runs) == 0
    groups = set()
    for run in runs.results:
        assert run.session_id is not None
        info = await served.info(run.session_id)
        groups.add(info["group_id"])
        assert info["task_id"] == "t"
        (call,) = await served.proxy.recorded(run.session_id)
        assert call.message_delta[-1]["content"] == f"I am {run.run}"
    assert groups == {runs.group_id}
    trained = await served.proxy.lease()
    assert {one.session_id for one in trained} == {run.session_id for run in runs.results}


async def test_a_program_gets_its_session_and_nothing_else_of_ours(
    make: Make, served: Served, tmp_path: Path
) -> None:
    environ = {
        **os.environ,
        "ANY_AGENT_API_KEY": served.tenant_key,
        "ANY_AGENT_SERVER__ADMIN_KEY": "operators",
        "OPENAI_API_KEY": served.tenant_key,
        "ANTHROPIC_AUTH_TOKEN": "a person's own",
        "MINE": "stays",
    }
    does = "ask(); print(json.dumps(dict(os.environ)))"
    result = await only(make(does, environ=environ, failure_reward=0, mode="eval"))
    assert result.state == "finalized" and result.stdout is not None
    env = json.loads((tmp_path / result.stdout).read_text())
    assert served.tenant_key not in env.values() and "operators" not in env.values()
    assert env["MINE"] == "stays"
    assert env["OPENAI_BASE_URL"] == f"{served.url}/v1" == env["OPENAI_API_BASE"]
    assert env["ANTHROPIC_BASE_URL"] == served.url
    keys = ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
    assert len({env[name] for name in keys}) == 1 and env["OPENAI_API_KEY"].startswith("sk-v1.")
    ours = {name: value for name, value in env.items() if name.startswith("ANY_AGENT_")}
    assert ours == {
        "ANY_AGENT_SESSION_ID": result.session_id,
        "ANY_AGENT_RUN_INDEX": "0",
        "ANY_AGENT_REWARD_FILE": str(tmp_path / f"{result.session_id}.reward"),
    }


POST = 'post(os.environ["ANTHROPIC_BASE_URL"] + "/rl/v1/{}", {})'
PAYS = f"""
import urllib.error


def tries(work):
    try:
        work()
        print("worked")
    except urllib.error.HTTPError as error:
        print(error.code, json.load(error)["error"]["code"])


ask()
tries(lambda: reward(1000))
tries(lambda: {POST.format("set_reward", '{"final_reward": 1000}')})
tries(lambda: {POST.format("finalize", '{"final_reward": 1000}')})
"""


@pytest.mark.parametrize("ends", ["", POST.format("finalize", "{}")])
async def test_a_program_cannot_pay_itself(
    make: Make, served: Served, tmp_path: Path, ends: str
) -> None:
    """Nor escape its judge by ending its session."""
    source = RewardSource(command="cat > /dev/null; echo 0.25")
    result = await only(make(PAYS + ends, source=source))
    assert (result.state, result.reward) == ("finalized", 0.25), result
    assert (tmp_path / str(result.stdout)).read_text() == "403 judge_only\n" * 3
    (trajectory,) = await served.proxy.lease()
    assert trajectory.final_reward == 0.25
    assert [i.reward for i in trajectory.interactions] == [None]


async def test_a_reward_command_gets_no_key_of_ours(
    make: Make, served: Served, tmp_path: Path
) -> None:
    """Whatever variable has it."""
    kept = {"OPENAI_API_KEY": served.tenant_key, "HEADER": f"Bearer {served.tenant_key}"}
    # A judge that it asks is another model, under another key.
    own = {"PATH": os.environ["PATH"], "JUDGES_KEY": "theirs"}
    env = without_ours({**own, **kept, "ANY_AGENT_API_KEY": "x"}, served.tenant_key)
    command = f"cat > /dev/null; env > {tmp_path / 'env'}; echo 1"
    result = await only(make(source=RewardSource(command=command, env=env)))
    assert result.reward == 1.0
    told = (tmp_path / "env").read_text()
    assert served.tenant_key not in told and "sk-" not in told
    assert "ANY_AGENT_SESSION_ID=" in told and "PATH=" in told and "JUDGES_KEY=theirs" in told


@pytest.mark.parametrize(
    ("does", "said", "code"),
    [
        ("ask(); sys.exit('no luck')", "ended with exit code 1: no luck", 1),
        ("ask(); sys.exit(os.environ['OPENAI_API_KEY'])", "ended with exit code 1: (its key)", 1),
        ("ask(); os.kill(os.getpid(), 9)", "was killed by SIGKILL", -9),
        ("ask(); time.sleep(600)", "took more than 6 s", None),
    ],
)
async def test_a_run_that_fails_is_thrown_away(
    make: Make, served: Served, does: str, said: str, code: int | None
) -> None:
    runs = make(does, limit=6 if code is None else 60)
    result = await only(runs)
    assert (result.state, result.error, result.exit_code) == ("failed", said, code)
    assert (await reason(served, result)).partition(": ")[2] == said
    assert exit_code(runs) == 1
    assert said in table(runs.results)


async def test_a_failure_may_have_a_reward(make: Make, served: Served) -> None:
    runs = make("ask(); sys.exit(4)", failure_reward=-1.0)
    result = await only(runs)
    assert (result.state, result.reward, result.exit_code) == ("finalized", -1.0, 4)
    assert result.error == "ended with exit code 4"
    assert exit_code(runs) == 0
    result = await only(make("sys.exit(4)", failure_reward=-1.0))
    assert result.state == "failed" and result.error is not None
    assert "made no model call" in result.error


@pytest.mark.parametrize("mode", ["train", "eval"])
async def test_a_program_that_never_calls_the_model_fails_with_a_hint(
    make: Make, served: Served, mode: str
) -> None:
    result = await only(make("pass", source=RewardSource(command="echo 1"), mode=mode))
    assert result.state == "failed"
    assert "OPENAI_BASE_URL" in await reason(served, result)


async def test_the_reward_is_read_from_the_file_that_the_program_wrote(
    make: Make, served: Served, tmp_path: Path
) -> None:
    does = 'ask(); print(0.5, file=open(os.environ["ANY_AGENT_REWARD_FILE"], "w"))'
    assert (await only(make(does))).reward == 0.5
    source = RewardSource(file=str(tmp_path / "rewards" / "{run}.txt"))
    (tmp_path / "rewards").mkdir()
    runs = make(does, source=source, n=2)
    await runs.run()
    assert [run.reward for run in runs.results] == [0.5, 0.5]
    assert (tmp_path / "rewards" / "1.txt").exists()
    # What the run before wrote is not this one's.
    result = await only(make(source=source))
    assert result.state == "failed" and result.error is not None
    assert result.error.startswith("did not write the reward file")


async def test_a_program_may_reward_itself(make: Make, served: Served) -> None:
    result = await only(make("ask(); reward(0.25)"))
    assert (result.state, result.reward) == ("finalized", None)
    assert result.session_id is not None
    assert list((await served.info(result.session_id))["rewards"].values()) == [0.25]
    result = await only(make("ask()"))
    assert result.state == "failed" and result.error is not None
    assert "--reward-cmd" in result.error and "$ANY_AGENT_REWARD_FILE" in result.error
    assert "--reward-cmd" in await reason(served, result)


async def test_a_grader_sees_what_was_said(make: Make, served: Served, tmp_path: Path) -> None:
    (tmp_path / "said.py").write_text(
        "def words(session):\n"
        "    talk = session['interactions'][-1]\n"
        "    assert talk['output_message']['role'] == 'assistant'\n"
        "    return len(talk['messages'][0]['content'].split()) + session['metadata']['plus']\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    source = RewardSource(grader="said.words", env=env)
    result = await only(make('ask("one two three")', source=source, metadata={"plus": 0.5}))
    assert (result.state, result.reward) == ("finalized", 3.5)
    with fails_with(ConfigError, "said", "'missing'"):
        await make(source=RewardSource(grader="said.missing", env=env)).run()


async def test_a_program_that_cannot_be_started_is_a_failed_run(
    make: Make, served: Served, tmp_path: Path
) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    result = await only(make(command=[str(script)]))
    assert (result.state, result.exit_code) == ("failed", None)
    assert "cannot start" in await reason(served, result)


async def test_without_a_service_nothing_is_started(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServiceAddress, "patience", 0.1)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        runs = make(n=4, service=ServiceAddress(f"http://127.0.0.1:{unused.getsockname()[1]}"))
        await runs.run()
    assert runs.stopped is not None and "is the service running?" in runs.stopped.message
    assert exit_code(runs) == 3
    assert {run.state for run in runs.results} == {"not started"}


async def test_training_that_has_ended_stops_training_runs_but_no_evaluations(
    make: Make, served: Served
) -> None:
    await served.proxy.client.set_run("finished", step=7, checkpoint=None)
    runs = make()
    await runs.run()
    assert runs.stopped is not None and "has ended at step 7" in runs.stopped.message
    assert exit_code(runs) == 3
    assert (await only(make(mode="eval"))).state == "finalized"


async def test_what_the_service_refuses_to_all_is_said_once(make: Make, served: Served) -> None:
    runs = make(n=9)  # more than rollout.batch_size
    await runs.run()
    assert runs.stopped is not None and "group_size" in runs.stopped.message
    assert exit_code(runs) == 2
    assert all(run.session_id is None for run in runs.results)


async def test_no_slot_is_a_run_that_failed(
    make: Make, serve: Serve, served: Served, tmp_path: Path
) -> None:
    full = await serve(f"root={tmp_path / 'full'}", slots=0)
    runs = make(service=ServiceAddress(full.url, full.tenant_key), wait=0.2)
    result = await only(runs)
    assert result.state == "failed" and exit_code(runs) == 1


@pytest.mark.service
async def test_an_interrupt_keeps_what_is_finished(
    make: Make, served: Served, tmp_path: Path
) -> None:
    """And throws away what is under way, with its processes."""
    never = marks_itself(tmp_path).replace("\n", "\n    ")
    # Two finish: a group closes when all of its sessions have ended, and one alone is too few.
    does = f'if os.environ["ANY_AGENT_RUN_INDEX"] in "01":\n    ask()\nelse:{never}'
    runs = make(does, n=4, concurrency=2, source=RewardSource(command="echo 1"))
    task = asyncio.create_task(runs.run())
    await until(
        lambda: (
            all(run.state == "finalized" for run in runs.results[:2])
            and (tmp_path / "pid").exists()
        )
    )
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    finished, others = runs.results[:2], runs.results[2:]
    for run in finished:
        assert await served.state(run.session_id or "") == "finalized"
    interrupted = [run for run in others if run.session_id is not None]
    assert interrupted
    for run in interrupted:
        assert run.state == "interrupted"
        assert await reason(served, run) == "any-agent run was interrupted"
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


async def test_the_report_has_each_run_and_no_control_characters(
    make: Make, served: Served, tmp_path: Path
) -> None:
    does = 'ask(); sys.exit(os.environ["ANY_AGENT_RUN_INDEX"] == "1" and "\\x1b[2Jbad")'
    runs = make(does, n=2, source=RewardSource(command="echo 0.5"))
    await runs.run()
    shown = table(runs.results)
    assert shown.splitlines()[-1] == "1 of 2 finalized, mean reward 0.5"
    assert "\x1b" not in shown and "[2Jbad" in shown
    report = json.loads(as_json(runs, exit_code(runs)))
    assert (report["exit_code"], report["finalized"], report["mean_reward"]) == (1, 1, 0.5)
    assert [run["state"] for run in report["runs"]] == ["finalized", "failed"]
    assert report["group_id"] == runs.group_id
    for run in report["runs"]:
        assert Path(run["stdout"]).parent == tmp_path
