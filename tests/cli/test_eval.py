"""``any-agent eval`` against a running service: what it prints, what it refuses, how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

import pytest

from any_agent.auth.key_store import create_key
from any_agent.cli import main as cli
from any_agent.launcher.trial import trial_dir
from any_agent.sdk.find_service import ServiceAddress
from tests.support.scripted_engine import ScriptedEngine
from tests.support.sdk_fixtures import Served

ROOT = Path(__file__).parents[2]
AGENT = """
import asyncio
import openai

class Counting:
    \"\"\"Every ``every``th run of an item passes; an item may say what else happens.\"\"\"

    runs = {}

    def __init__(self, every=2, at="x"):
        self.every = every

    async def run(self, data, **extra_kwargs):
        client = openai.AsyncOpenAI(
            base_url=extra_kwargs["base_url"],
            api_key=extra_kwargs["api_key"],
            http_client=extra_kwargs["http_client"],
            max_retries=0,
        )
        question = [{"role": "user", "content": data["question"]}]
        await client.chat.completions.create(model="any", messages=question, max_tokens=4)
        if data.get("fails"):
            raise ValueError("it does")
        if data.get("waits"):
            await asyncio.sleep(600)
        count = self.runs[data["question"]] = self.runs.get(data["question"], -1) + 1
        return float(count % self.every == 0)

class Workflow:
    async def arun_episode(self, engine, data): ...

def two(item, session, more): ...
"""


def put_items(path: Path, *items: dict[str, object]) -> None:
    path.write_text("".join(f"{json.dumps(item)}\n" for item in items))


Ended: TypeAlias = tuple[int, str, str]
Eval: TypeAlias = Callable[..., Awaitable[Ended]]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command is given: the agent's module and data lie there."""
    here = tmp_path / "mine"
    here.mkdir()
    (here / "counting_eval_agent.py").write_text(AGENT)
    items = [{"question": f"what is {n}?", "task_id": f"t{n}"} for n in range(3)]
    put_items(here / "items.jsonl", *items)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for module in ("counting_eval_agent", "my_agent"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return here


@pytest.fixture
def evaluate(folder: Path, capsys: pytest.CaptureFixture[str]) -> Eval:
    """Give the command beside the service, which is in this process."""

    async def run(
        *options: str, agent: str = "counting_eval_agent.Counting", data: str = "items.jsonl"
    ) -> Ended:
        arguments = ["eval", "--agent", agent, "--data", data, *options]
        code = await asyncio.to_thread(cli, arguments)
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


async def states(served: Served) -> list[str]:
    listed = (await served.proxy.http.get("/rl/v1/sessions")).json()
    return sorted(one["state"] for one in listed)


@pytest.mark.service
async def test_an_evaluation_prints_its_figures_and_is_not_made_twice(
    served: Served, evaluate: Eval, folder: Path
) -> None:
    code, out, err = await evaluate("-n", "4", "--json", "figures.json", "--out", "runs.jsonl")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "agent     counting_eval_agent.Counting"
    assert lines[1].startswith("model     ") and lines[1].endswith(", version 0")
    assert lines[2] == "items     3 of items.jsonl, 4 runs each"
    # Two of four pass, of each item: 1 - C(2, 2) / C(4, 2) = 5 / 6.
    assert [line.split() for line in lines[5:]] == [
        ["reward", "0.500", "0.500", "..", "0.500", "3"],
        ["pass@1", "0.500", "0.500", "..", "0.500", "3"],
        ["pass@2", "0.833", "0.833", "..", "0.833", "3"],
        ["pass@4", "1.000", "1.000", "..", "1.000", "3"],
    ]
    figures = json.loads((folder / "figures.json").read_text())
    assert figures["pass_at"]["2"]["mean"] == pytest.approx(5 / 6)
    assert [one["task_id"] for one in figures["by_item"]] == ["t0", "t1", "t2"]
    assert [sorted(one["rewards"]) for one in figures["by_item"]] == [[0, 0, 1, 1]] * 3
    assert await states(served) == ["evaluated"] * 12
    # The same again is done already.
    assert (await evaluate("-n", "4", "--out", "runs.jsonl"))[1] == out
    assert await states(served) == ["evaluated"] * 12
    # What is of another evaluation is not taken for it.
    for others, said in (
        (("-n", "2"), "group_size 4, not 2"),
        (("--version", "any"), "@0"),
        (("--agent-arg", "every=1"), "not of counting_eval_agent.Counting every=1"),
    ):
        code, _, err = await evaluate("-n", "4", *others, "--out", "runs.jsonl")
        assert code == 2 and said in err


@pytest.mark.service
async def test_the_agent_of_the_page_prints_what_the_page_shows(
    served: Served, evaluate: Eval, folder: Path
) -> None:
    text = (ROOT / "docs" / "how-to" / "eval.md").read_text()
    source = text.partition("```python\n")[2].partition("```")[0]
    (folder / "my_agent.py").write_text(source)
    item = {"messages": [{"role": "user", "content": "2 + 2?"}], "answer": ""}
    put_items(folder / "test.jsonl", item)
    ended, out, err = await evaluate("-n", "4", agent="my_agent.MathAgent", data="test.jsonl")
    assert (ended, err) == (0, "")
    shown = text.partition("```text\n")[2].partition("```")[0].splitlines()
    lines = out.splitlines()
    assert [line.split()[:1] for line in lines] == [line.split()[:1] for line in shown[1:]]
    assert [len(line) for line in lines[4:]] == [len(line) for line in shown[5:]]


async def test_options_choose_the_agents_arguments_the_items_and_the_figures(
    served: Served, evaluate: Eval
) -> None:
    code, out, _ = await evaluate(
        *("-n", "3", "--limit", "1", "--agent-arg", "every=3", "--json", "-", "--k", "3,1")
    )
    figures = json.loads(out)
    assert code == 0
    assert sorted(figures["by_item"][0]["rewards"]) == [0, 0, 1] and figures["items"] == 1
    assert list(figures["pass_at"]) == ["1", "3"]
    assert figures["reward"]["ci95"] is None


async def test_failed_runs_are_left_out_or_count_with_the_reward_given_for_them(
    served: Served, evaluate: Eval, folder: Path
) -> None:
    put_items(folder / "two.jsonl", {"question": "fine"}, {"question": "bad", "fails": True})
    code, out, _ = await evaluate("-n", "2", data="two.jsonl")
    assert code == 1
    assert "failed    2 runs failed (2 agent_failed): left out" in out
    assert [line.split() for line in out.splitlines() if "reward" in line][-1][-1] == "1"
    code, out, _ = await evaluate("-n", "2", "--reward-on-failure", "0", data="two.jsonl")
    assert code == 0
    assert "count as 0" in out
    assert await states(served) == ["aborted"] * 4 + ["evaluated"] * 4
    put_items(folder / "one.jsonl", {"question": "?", "waits": True})
    code, out, _ = await evaluate("--timeout", "0.3", data="one.jsonl")
    assert code == 1 and "1 runs failed (1 agent_timeout)" in out


async def test_wrong_input_is_refused_before_anything_runs(
    served: Served, evaluate: Eval, folder: Path
) -> None:
    (folder / "broken.jsonl").write_text('{"question": 1}\n{"question":\n')
    refused: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        ((), {"agent": "no_such_agent.Agent"}, "there is no module 'no_such_agent'"),
        ((), {"agent": "counting_eval_agent.Countin"}, "did you mean"),
        ((), {"agent": "counting_eval_agent.Workflow"}, "samples from a trainer's engines"),
        ((), {"agent": "counting_eval_agent.two"}, "an unknown argument 'more'"),
        ((), {"data": "broken.jsonl"}, "broken.jsonl line 2 is not JSON"),
        ((), {"data": "none.jsonl"}, "there is no file none.jsonl"),
        (("--agent-arg", "every"), {}, "write NAME=VALUE"),
        (("--agent-arg", "often=3"), {}, "cannot be instantiated with the arguments often"),
        (("--k", "1,8", "-n", "4"), {}, "--k 8 needs at least 8 runs of each item: -n is 4"),
        (("train.lr=1",), {}, "settings are for the service that is started for --model"),
        (("--model", "a/b", "--version", "3"), {}, "--model my-exp/trial-1@20"),
        (("--api-key-file", "none"), {}, "--api-key-file none"),
        (("--json", "no/such/folder.json"), {}, "--json no/such/folder.json cannot be written"),
    ]
    for options, named, said in refused:
        code, out, err = await evaluate(*options, **named)
        assert (code, out) == (2, ""), options
        assert err.startswith("error: ") and said in err
    assert await states(served) == []


async def test_a_service_that_is_away_or_refuses_the_key_ends_with_code_3(
    served: Served, evaluate: Eval, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServiceAddress, "patience", 0.1)
    code, _, err = await evaluate("--url", "http://127.0.0.1:9")
    assert code == 3 and "http://127.0.0.1:9" in err
    monkeypatch.setenv("OPENAI_API_KEY", "sk-tenant.none.such")
    code, _, err = await evaluate()
    assert code == 3 and err.startswith("error: ")
    assert "sk-tenant.none.such" not in err


async def test_the_key_may_come_from_a_file(
    served: Served, evaluate: Eval, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    key, _ = create_key(trial_dir(served.proxy.service.config).keys, "tenant", tenant="others")
    (folder / "key").write_text(f"{key}\n")
    await asyncio.sleep(0)
    code, _, err = await evaluate("--api-key-file", "key", "--limit", "1")
    assert (code, err) == (0, "")


async def test_a_version_that_is_not_served_is_refused(
    served: Served, evaluate: Eval, engine: ScriptedEngine
) -> None:
    code, _, err = await evaluate("--version", "7")
    assert code == 1 and "7" in err and err.startswith("error: ")
    code, out, _ = await evaluate("--version", "any", "--limit", "1")
    assert code == 0 and "version 0" in out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.service
async def test_an_interrupted_evaluation_aborts_what_runs_and_keeps_what_is_done(
    served: Served, folder: Path, number: signal.Signals, code: int
) -> None:
    put_items(folder / "two.jsonl", {"question": "fine"}, {"question": "waits", "waits": True})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "any_agent.cli", "eval", "--data", "two.jsonl"),
        *("--agent", "counting_eval_agent.Counting", "--out", "runs.jsonl"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )

    def one_waits() -> bool:
        runs = folder / "runs.jsonl"
        lines = runs.read_text() if runs.exists() else ""
        return '"state":"evaluated"' in lines and lines.count("opened") == 2

    async with asyncio.timeout(90):
        while not one_waits() and process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    assert process.returncode is None, (await process.communicate())[1].decode()
    process.send_signal(number)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert (process.returncode, out) == (code, b"")
    assert b"Traceback" not in err
    assert await states(served) == ["aborted", "evaluated"]
