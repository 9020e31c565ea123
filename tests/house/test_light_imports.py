"""What must start fast imports nothing heavy: milliseconds, whatever else is installed."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "litellm", "transformers", "fastapi", "numpy", "pydantic", "aiohttp", "openai"}
HEAVY |= {"prometheus_client", "yaml"}
SDK = {"pydantic", "yaml"}
SLOW = {"asyncio", "concurrent", "ctypes", "email", "http", "multiprocessing", "ssl", "unittest"}
"""Of the standard library: what costs a tenth of a second together."""
HELP = "from any_agent.cli import main\ntry: main({})\nexcept SystemExit: pass"


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after running the code."""
    report = "import json, sys; print(json.dumps(sorted({n.split('.')[0] for n in sys.modules})))"
    out = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return set(json.loads(out.stdout.splitlines()[-1]))


@pytest.mark.service
def test_the_light_sdk_and_every_help_import_nothing_heavy() -> None:
    light = {
        "import any_agent.client": SDK,
        "import any_agent.config": SDK,
        "import any_agent.launcher": SDK,
        "from any_agent import RLClient, AnyAgentError, load_config": SDK,
        "from any_agent import AgentRunner, AgentSession": SDK,
        "import any_agent.cli.eval, any_agent.sdk.evaluation": SDK,
        "import any_agent.engine, any_agent.workflow": HEAVY - {"torch", "litellm", "fastapi"},
        "import proxy_ext.app": HEAVY - {"torch", "litellm", "openai"},
    }
    help = [sys.executable, "-m", "any_agent.cli", "--help"]
    told = subprocess.run(help, capture_output=True, text=True, check=True).stdout
    commands = re.findall(r"^    ([a-z]+)\b", told, re.M)
    assert len(commands) > 12
    light |= {HELP.format([command, "--help"]): set() for command in commands}
    found = {code: (loaded_by(code) & HEAVY) - allowed for code, allowed in light.items()}
    assert {code: heavy for code, heavy in found.items() if heavy} == {}


@pytest.mark.parametrize("code", ["import any_agent", HELP.format(["--help"])])
def test_the_package_and_its_help_import_nothing_of_anybody_else(code: str) -> None:
    loaded = loaded_by(code) - loaded_by("pass")
    assert loaded - sys.stdlib_module_names == {"any_agent"}
    assert not loaded & SLOW
