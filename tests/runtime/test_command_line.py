"""Scripts that end by an error: what a person sees, and the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer import any_agent_grpo

REPOSITORY = Path(__file__).parents[2]


def ran(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(
        command, capture_output=True, text=True, cwd=REPOSITORY, timeout=60, env=env
    )


def run(code: str, *arguments: str) -> tuple[int, str]:
    """The exit code of a script, and what it wrote to standard error; it ended as scripts do."""
    done = ran([sys.executable, "-c", code, *arguments])
    assert done.stdout == "at its end\n"
    # On a busy machine it says before what takes a while.
    said = [line for line in done.stderr.splitlines(True) if not line.startswith("importing ")]
    return done.returncode, "".join(said)


ENDS = """
import atexit, sys
atexit.register(print, "at its end", flush=True)
"""
COMMANDS = f"""{ENDS}
from any_agent.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
READS = f"""{ENDS}
from any_agent import GRPOConfig, load_expr_config
config, _ = load_expr_config(sys.argv[1:], GRPOConfig)
"""


def test_a_misspelled_setting_is_one_line_and_another_error_keeps_its_trace() -> None:
    code, said = run(READS, "train.stepz=3")
    assert code == 2
    assert said.startswith("error: ") and "train.steps" in said
    assert "Traceback" not in said
    code, said = run(f"{READS}\nraise ZeroDivisionError('so')")
    assert code == 1
    assert "Traceback" in said and said.endswith("ZeroDivisionError: so\n")


@pytest.mark.parametrize(("kind", "code"), [("TrainingError", 1), ("DatasetError", 2)])
def test_an_error_of_ours_has_its_exit_code(kind: str, code: int) -> None:
    script = f"{READS}\nfrom any_agent.errors import {kind}\nraise {kind}('it is so')"
    assert run(script) == (code, "error: it is so\n")
    seen, said = run(script, "log_level=debug")
    assert seen == 1 and "Traceback" in said, "the trace is kept for debugging"


@pytest.mark.parametrize(
    "wanted", ["trainer import GRPOTrainer", "any_agent import RemoteSGLangEngine"]
)
def test_what_the_light_install_lacks_is_one_line(wanted: str) -> None:
    lacks = "sys.modules['numpy'] = sys.modules['torch'] = None"
    code, said = run(f"{ENDS}\n{lacks}\nfrom {wanted}")
    assert code == 2 and len(said.splitlines()) == 1
    assert "pip install 'any-agent-rl[train]'" in said
    code, said = run(f"{READS}\nimport nothing_of_this_name")
    assert code == 1 and "Traceback" in said


@pytest.mark.parametrize(
    ("group", "command"), [("", "serve"), ("sessions", "veto"), ("keys", "list"), ("ranks", "add")]
)
def test_a_group_of_commands_alone_says_what_it_can_do(group: str, command: str) -> None:
    code, said = run(COMMANDS, *group.split())
    assert code == 2
    assert f"\n    {command} " in said and len(said.splitlines()) < 50


@pytest.mark.parametrize(
    ("line", "command", "meant"),
    [
        ("serve --modle x", "any-agent serve", "--model?"),
        ("serve --modle=x train.lr=1", "any-agent serve", "--model?"),
        ("keys list --experimnt x", "any-agent keys list", "--experiment?"),
        ("keys --json", "any-agent keys", "any-agent keys create --json"),
        ("--json keys list", "any-agent keys list", "any-agent keys list --json"),
        ("status --nothing-like-it", "any-agent status", "--nothing-like-it"),
        ("status twice", "any-agent status", "twice"),
        ("sevre --model x", "any-agent", "serve?"),
        ("sessions shwo", "any-agent sessions", "show?"),
        ("keys create --scope tennant", "any-agent keys create", "tenant?"),
        ("nothing-like-it", "any-agent", "demo, model, serve"),
        ("serve --port", "any-agent serve", "--port"),
    ],
)
def test_what_a_command_does_not_know_is_one_line_about_that_command(
    line: str, command: str, meant: str
) -> None:
    code, said = run(COMMANDS, *line.split())
    assert code == 2 and len(said.splitlines()) == 1
    assert said.startswith(f"{command}: ") and said.endswith(f"({command} --help)\n")
    assert meant in said


SESSION = """
import asyncio, atexit, sys
from any_agent import AgentSession
atexit.register(print, "at its end", flush=True)
async def attempt():
    async with AgentSession("t", url="http://127.0.0.1:9", retry_for=0):
        pass
async def together():
    async with asyncio.TaskGroup() as group:
        group.create_task(attempt())
"""


@pytest.mark.parametrize("how", ["attempt", "together"])
def test_an_error_of_the_sdk_is_two_lines_with_the_place_in_the_script(
    how: str, tmp_path: Path
) -> None:
    script = tmp_path / "agents.py"
    script.write_text(f"{SESSION}\nasyncio.run({how}())\n")
    started = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
    code, said = run(started)
    # A busy machine is told that the import takes long.
    message, place = (x for x in said.splitlines() if not x.startswith("importing "))
    assert code == 1 and message.startswith("error: http://127.0.0.1:9 ")
    assert place == f"  at {script}:6 in attempt"


def test_a_script_keeps_its_own_hook_and_the_trace_of_its_own_errors() -> None:
    hook = "import sys\nsys.excepthook = lambda *_: print('mine', file=sys.stderr)"
    assert run(f"{hook}\n{READS}", "train.stepz=3") == (1, "mine\n")
    catches = """
from any_agent.errors import ServiceUnavailable
try:
    asyncio.run(attempt())
except ServiceUnavailable:
    raise ZeroDivisionError("mine") from None
"""
    code, said = run(SESSION + catches)
    assert code == 1 and "Traceback" in said and said.endswith("ZeroDivisionError: mine\n")


READER = "import sys; from any_agent.runtime.command_line import guarded; sys.exit(guarded(main))"


def test_a_reader_that_leaves_is_no_error() -> None:
    code = f"def main():\n    while True: print('x' * 9999)\n{READER}"
    program = f'{sys.executable} -c "$CODE" | head -c 10; exit ${{PIPESTATUS[0]}}'
    done = ran(["bash", "-c", program], CODE=code)
    assert (done.returncode, done.stderr) == (141, "")


def test_settings_may_stand_between_the_options_of_the_trainers_script(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[object] = []

    def record(*args: object, **kwargs: object) -> int:
        given.append((args, kwargs))
        return 0

    monkeypatch.setattr(any_agent_grpo, "run_service", record)
    line = ["--trial", "t", "train.lr=1e-5", "--exit-when-done", "train.seed=2"]
    assert any_agent_grpo.main(line) == 0
    settings = ["trial=t", "train.lr=1e-5", "train.seed=2"]
    assert given == [((None, settings), {"train": True, "stay": False})]
