"""The environments of agents' packages: their pins collide with each other and with ours.

Tests only use them; ``python -m tests.clients.environment [SUITE ...]`` makes those of the suites
(all without one: clients, documents, examples) before any test runs.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".venv-clients"
SUITES = ("clients", "documents", "examples")
_OURS = (sys.executable, "-m")
_CLIENTS, _DOCUMENTS, _EXAMPLES = (ROOT / "tests" / suite for suite in SUITES)
_LIMIT = 900.0
"""Seconds for one run of uv or npm."""


class NotMade(Exception):
    """An environment could not be made; the text is what was run, and what that said."""


@dataclass(frozen=True, slots=True)
class Environment:
    """The packages that a file pins, in a folder of their own."""

    name: str
    pins: Path
    """requirements.txt with every package's version, or package.json beside its lock."""
    suites: tuple[str, ...] = ("clients",)
    ours: bool = False
    """True if what is installed here is found behind them.

    Theirs comes first where both have a package, as if one environment had been made for both.
    """
    in_place: bool = False
    """True if npm's packages lie beside their package.json, where its programs look for them."""
    programs: tuple[str, ...] = ()
    """npm's packages whose own scripts put their program in its place; no other script is run."""

    @property
    def of_npm(self) -> bool:
        return self.pins.suffix == ".json"

    @property
    def folder(self) -> Path:
        return self.pins.parent if self.in_place else FOLDER / self.name

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def lock(self) -> Path:
        """The file beside a package.json that pins all of its packages."""
        return self.pins.with_name("package-lock.json")

    def version_of(self, package: str) -> str:
        """Return the version that is pinned of a package."""
        text = self.pins.read_text(encoding="utf-8")
        if self.of_npm:
            return str(json.loads(text)["dependencies"][package])
        found = re.search(rf"^{re.escape(package)}==(.+)$", text, re.M)
        assert found is not None, f"{self.pins} does not pin {package}"
        return found[1]

    @property
    def stamp(self) -> Path:
        """A file that is there once the environment is whole, and of these pins."""
        files = (self.pins, self.lock) if self.of_npm else (self.pins,)
        wanted = [*(file.read_bytes() for file in files), *([b"ours"] if self.ours else [])]
        digest = hashlib.blake2b(b"\n".join(wanted), digest_size=6).hexdigest()
        return self.folder / ("node_modules" if self.of_npm else "") / f".made-{digest}"

    @property
    def is_made(self) -> bool:
        return self.stamp.exists() and (self.of_npm or self.python.exists())


_BOTH = ("clients", "documents")
_EXAMPLE = ("examples",)
ENVIRONMENTS = {
    environment.name: environment
    for environment in (
        Environment("anthropic", _CLIENTS / "anthropic" / "requirements.txt"),
        Environment("camel", _CLIENTS / "camel" / "requirements.txt"),
        Environment("camel-rlvr", _CLIENTS / "camel_rlvr" / "requirements.txt", _BOTH, ours=True),
        Environment("claude-agent", _CLIENTS / "claude_agent" / "requirements.txt"),
        Environment("langchain", _CLIENTS / "langchain" / "requirements.txt"),
        Environment("openai-2", _CLIENTS / "openai" / "openai-2.txt"),
        Environment("openai-3", _CLIENTS / "openai" / "openai-3.txt"),
        Environment("openai-agents", _CLIENTS / "agents" / "requirements.txt"),
        Environment("openai-npm", _CLIENTS / "openai_npm" / "package.json"),
        # docs/how-to/connect
        Environment("instructor", _CLIENTS / "forced_tools" / "instructor.txt"),
        Environment("langgraph", _CLIENTS / "connect" / "langgraph.txt"),
        Environment("llama-index", _CLIENTS / "connect" / "llama-index.txt"),
        Environment("pydantic-ai", _CLIENTS / "connect" / "pydantic-ai.txt"),
        Environment("sdk", _CLIENTS / "connect" / "sdk.txt"),
        Environment("smolagents", _CLIENTS / "forced_tools" / "smolagents.txt"),
        # Agents as they are shipped
        Environment("agno", _CLIENTS / "shipped" / "agno.txt"),
        Environment(
            "shipped-npm",
            _CLIENTS / "shipped" / "package.json",
            programs=("@anthropic-ai/claude-code", "opencode-ai"),
        ),
        Environment("strands", _CLIENTS / "shipped" / "strands.txt"),
        # Frameworks that force tool calls
        Environment("forced-instructor", _CLIENTS / "forced_tools" / "instructor.txt", ours=True),
        Environment("forced-openai_agents", _CLIENTS / "agents" / "requirements.txt", ours=True),
        Environment("forced-smolagents", _CLIENTS / "forced_tools" / "smolagents.txt", ours=True),
        Environment("sdk-openai-2", _CLIENTS / "sdk_crowd" / "openai-2.txt"),
        Environment("sdk-openai-3", _CLIENTS / "sdk_crowd" / "openai-3.txt"),
        Environment("trackers", _CLIENTS / "trackers" / "requirements.txt", ours=True),
        Environment("math-agent", _DOCUMENTS / "math_agent.txt", ("documents",), ours=True),
        *(
            Environment(f"example-{one}", _EXAMPLES / "pins" / f"{one}.txt", _EXAMPLE, ours=True)
            for one in ("camel", "claude_agent", "langchain", "openai_agents")
        ),
        Environment(
            "example-node_agent",
            ROOT / "examples" / "node_agent" / "package.json",
            _EXAMPLE,
            in_place=True,
        ),
    )
}
"""All that tests use, by name."""


def python_with(name: str) -> Path:
    """Return the interpreter of an environment; the test fails where it is not made."""
    return _made(name).python


def node_with(name: str) -> Path:
    """Return the folder with npm's packages of an environment; the test fails without it."""
    component("npm")
    return _made(name).folder


def component(program: str) -> str:
    """Where a program is that not every machine has; CI has all of them."""
    found = shutil.which(program)
    if found is None:
        why = f"{program} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(why, pytrace=False)
        pytest.skip(why)
    return found


def _made(name: str) -> Environment:
    environment = ENVIRONMENTS[name]
    if not environment.is_made:
        command = f"python -m tests.clients.environment {environment.suites[0]}"
        pytest.fail(
            f"the environment {name} is not made, or not of its pins: run {command}", pytrace=False
        )
    return environment


def make(environment: Environment) -> bool:
    """Make an environment, and return whether it had to be; NotMade if that fails."""
    FOLDER.mkdir(exist_ok=True)
    # One at a time makes it, of all threads and processes.
    with open(FOLDER / f"{environment.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if environment.is_made:
            return False
        (_make_of_npm if environment.of_npm else _make_of_python)(environment)
        environment.stamp.touch()
        return True


def _make_of_python(environment: Environment) -> None:
    _run([*_OURS, "venv", "--clear", "--without-pip", environment.folder])
    uv = (*_OURS, "uv", "pip", "install", "-q", "--python", environment.python)
    # Every package is pinned: there is nothing to be worked out.
    _run_twice([*uv, "--no-deps", "-r", environment.pins])
    if environment.ours:
        line = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (packages,) = environment.folder.glob("lib/python*/site-packages")
        (packages / "ours.pth").write_text(line, encoding="utf-8")


def _make_of_npm(environment: Environment) -> None:
    npm, folder = shutil.which("npm"), environment.folder
    if npm is None:
        raise NotMade("npm is not installed")
    if not environment.in_place:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in (environment.pins, environment.lock):
            shutil.copy(file, folder)
    # A lock may lack programs of other platforms, which `ci` takes for a fault.
    how = ("install", "--no-save") if environment.programs else ("ci",)
    _run_twice([npm, *how, "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", folder])
    if environment.programs:
        _run([npm, "rebuild", "--prefix", folder, *environment.programs])


def _run_twice(command: Sequence[str | Path]) -> None:
    """Run a command that downloads; once more if it fails, as a download does now and then."""
    try:
        _run(command)
    except NotMade:
        _run(command)


def _run(command: Sequence[str | Path]) -> None:
    words = " ".join(map(str, command))
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_LIMIT
        )
    except subprocess.TimeoutExpired:
        raise NotMade(f"{words}:\nit took more than {_LIMIT:g} s") from None
    if done.returncode != 0:
        raise NotMade(f"{words}:\n{done.stdout}\n{done.stderr}")


def make_all(wanted: Sequence[Environment]) -> int:
    """Make environments, two at once, and say what became of each; 1 if some could not be made."""
    failed: dict[str, str] = {}

    def tell(environment: Environment) -> None:
        began = time.monotonic()
        if environment.of_npm and not shutil.which("npm") and os.environ.get("CI") != "true":
            # Its tests are skipped for the same reason.
            print(f"{environment.name:<22} left out: npm is not installed", flush=True)
            return
        try:
            new = make(environment)
            told = f"made in {time.monotonic() - began:.0f} s" if new else "there already"
        except (NotMade, OSError) as error:
            told = "failed"
            failed[environment.name] = str(error)
        print(f"{environment.name:<22} {told}", flush=True)

    pool = ThreadPoolExecutor(2)
    try:
        work: list[Future[None]] = [pool.submit(tell, environment) for environment in wanted]
        for one in work:
            one.result()
    finally:
        pool.shutdown(cancel_futures=True)
    names = [one.name for one in wanted if one.name in failed]
    for name in names:
        print(f"\n== {name}\n{failed[name].strip()[-3000:]}", file=sys.stderr)
    if names:
        print(f"error: could not be made: {', '.join(names)}", file=sys.stderr)
    return 1 if failed else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.clients.environment",
        description="Make the environments that tests use, where they are not there already.",
    )
    parser.add_argument(
        "suites", nargs="*", metavar="SUITE", help=f"of these alone: {', '.join(SUITES)}"
    )
    asked = set(parser.parse_args(arguments).suites) or set(SUITES)
    if unknown := sorted(asked - set(SUITES)):
        parser.error(f"no suite is named {unknown[0]}: there are {', '.join(SUITES)}")
    return make_all([one for one in ENVIRONMENTS.values() if asked & set(one.suites)])


if __name__ == "__main__":
    sys.exit(main())
