"""Build the distributions and try them: ``python tools/check_dist.py [EXTRA ...]``.

The source distribution, the wheel that is built from it, and a bill of materials go to ``dist/``.
Then each extra of the wheel, all but those for developers, is installed alone into an empty
environment below ``build/dist`` (the versions are those of constraints.txt), and does what it is
for. `light` is the bare install. Extras given by name are tried, and no others.
"""

from __future__ import annotations

import argparse
import email.message
import os
import re
import shutil
import subprocess
import sys
import time
import venv
import zipfile
from collections.abc import Callable, Sequence
from email.parser import HeaderParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
WORK = ROOT / "build" / "dist"
LIGHT = "light"
DEVELOPERS = {"dev", "docs", "release"}
BILLS = {LIGHT, "train"}
"""Extras whose environments become bills of materials."""
LIGHT_SECONDS = 10.0
"""The time in which the light SDK installs on a machine that does nothing else."""
LIGHT_PACKAGES = 25
"""The most packages that it brings, its own included: a count does not depend on the machine."""
LIMIT = 900
_IMPORTS = {
    "data": "import datasets",
    "lora": "import peft",
    "otel": "import opentelemetry.sdk.trace, opentelemetry.exporter.otlp.proto.http",
    "redis": "import redis.asyncio, hiredis",
    "smollm2": "import gguf, accelerate",
    "tensorboard": "import tensorboard",
    "trackio": "import trackio",
    "wandb": "import wandb",
}
"""An import of what an extra without code of its own brings."""
_IS_LIGHT = """
import sys
import any_agent
names = [n for n in any_agent.__all__]
assert {"AgentSession", "AgentRunner", "RLClient", "load_config"} <= set(names), names
any_agent.AgentSession, any_agent.AgentRunner, any_agent.RLClient, any_agent.load_config
heavy = {"torch", "litellm", "transformers", "fastapi", "numpy", "openai"} & set(sys.modules)
assert not heavy, heavy
"""
_CALLS = """
import sys, urllib.request
from any_agent import AgentSession

url = sys.argv[1]
for path in ("/readyz", "/ui", "/openapi.json"):
    with urllib.request.urlopen(url + path, timeout=60) as answer:
        assert answer.status == 200 and answer.read(), path
with AgentSession(url=url, mode="eval") as session:
    client = session.openai()
    question = {"role": "user", "content": "What is 1 + 2?"}
    answer = client.chat.completions.create(model="any", messages=[question])
    assert answer.choices[0].message.content is not None
    session.set_reward(1.0)
assert session.info().state == "evaluated", session.info()
"""


class Failed(Exception):
    """A check that did not hold; its text says which."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the distributions and try them.")
    parser.add_argument("extras", nargs="*", metavar="EXTRA", help="light, serve, train, ...")
    arguments = parser.parse_args()
    try:
        wheel = build()
        metadata = metadata_of(wheel)
        check_wheel(wheel, metadata)
        extras = [e for e in metadata.get_all("Provides-Extra", []) if e not in DEVELOPERS]
        known = [LIGHT, *extras]
        for extra in arguments.extras or known:
            if extra not in known:
                raise Failed(f"there is no extra {extra}; choose from {', '.join(known)}")
            try_extra(wheel, metadata, extra)
    except Failed as error:
        print(f"failed    {error}", file=sys.stderr)
        return 1
    return 0


def build() -> Path:
    """Build both distributions from the tracked files; return the wheel."""
    shutil.rmtree(DIST, ignore_errors=True)
    date = run(["git", "log", "-1", "--format=%ct"], cwd=ROOT).strip()
    built = {**os.environ, "SOURCE_DATE_EPOCH": date}
    run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)], env=built)
    (wheel,) = DIST.glob("*.whl")
    (source,) = DIST.glob("*.tar.gz")
    say("built", f"{source.name}, {wheel.name} ({wheel.stat().st_size / 1e6:.1f} MB)")
    return wheel


def metadata_of(wheel: Path) -> email.message.Message:
    with zipfile.ZipFile(wheel) as files:
        (name,) = [n for n in files.namelist() if n.endswith(".dist-info/METADATA")]
        return HeaderParser().parsestr(files.read(name).decode())


def check_wheel(wheel: Path, metadata: email.message.Message) -> None:
    """Check that the wheel is complete, and that nothing else came into it."""
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
    packages = {n.split("/")[0] for n in names if n.endswith("/__init__.py")}
    expected = {"any_agent", "proxy_ext", "router", "trainer"}
    require(packages == expected, f"the wheel has the packages {packages}, not {expected}")
    tracked = run(["git", "ls-files", *sorted(expected)], cwd=ROOT).splitlines()
    missing = sorted({*tracked} - {*names})
    require(not missing, f"the wheel lacks {', '.join(missing[:5])}")
    direct = requirements(metadata, LIGHT)
    require(len(direct) == 4, f"the light SDK has {len(direct)} dependencies: {direct}")
    say("wheel", f"{len(names)} files, all of {len(tracked)} tracked ones")


def requirements(metadata: email.message.Message, extra: str) -> list[str]:
    """Return the names that an extra, or the bare install, asks for."""
    found = []
    for line in metadata.get_all("Requires-Dist", []):
        needs = re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if (needs[1] if needs else LIGHT) == extra:
            found.append(re.split(r"[^\w.-]", line)[0])
    return found


def try_extra(wheel: Path, metadata: email.message.Message, extra: str) -> None:
    folder = WORK / extra
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    what = str(wheel) if extra == LIGHT else f"{wheel}[{extra}]"
    pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    began = time.monotonic()
    run([*pip, "-c", str(ROOT / "constraints.txt"), what], cwd=folder)
    seconds = time.monotonic() - began
    run([str(python), "-m", "pip", "check"], cwd=folder)
    CHECKS.get(extra, _only_imports)(extra, python)
    late = extra == LIGHT and seconds > LIGHT_SECONDS
    note = f", not in {LIGHT_SECONDS:.0f}: is the machine busy?" if late else ""
    say(extra, f"works; installed in {seconds:.1f} s{note}")
    if extra in BILLS:
        version = metadata["Version"]
        write_bill(python, DIST / f"any_agent_rl-{version}-{extra}.cdx.json")
    shutil.rmtree(folder)


def _only_imports(extra: str, python: Path) -> None:
    require(extra in _IMPORTS, f"tools/check_dist.py does not know what {extra} is for")
    run([str(python), "-c", _IMPORTS[extra]], cwd=python.parents[2])


def _light(extra: str, python: Path) -> None:
    listed = run([str(python), "-m", "pip", "list", "--format", "freeze"], cwd=python.parents[2])
    count = sum(not line.startswith(("pip==", "setuptools==")) for line in listed.splitlines())
    require(count <= LIGHT_PACKAGES, f"the light SDK brings {count} packages:\n{listed}")
    run([str(python), "-c", _IS_LIGHT], cwd=python.parents[2])
    out = run([str(python.with_name("any-agent")), "--help"], cwd=python.parents[2])
    require("doctor" in out, "any-agent --help does not list its commands")


def _serve(extra: str, python: Path) -> None:
    """Serve a model that is made by code, and call it as an agent does."""
    folder = python.parents[2]
    run([str(python), "-m", "any_agent.demo.model", "model"], cwd=folder)
    command = [str(python.with_name("any-agent")), "serve", "--no-train", "--model", "model"]
    command += ["--port", "0", "root=runs", "user=me", "server.ranks=1"]
    with open(folder / "serve.log", "wb") as log:
        service = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        address = folder / "runs" / "me" / "my-exp" / "trial-1" / "url"
        deadline = time.monotonic() + 240
        while not address.exists() and service.poll() is None and time.monotonic() < deadline:
            time.sleep(0.5)
        if not address.exists():
            raise Failed(f"no service: {(folder / 'serve.log').read_text()[-2000:]}")
        run([str(python), "-c", _CALLS, address.read_text().strip()], cwd=folder)
    finally:
        service.terminate()
        try:
            code = service.wait(60)
        except subprocess.TimeoutExpired:
            service.kill()
            raise Failed("the service did not end within a minute of SIGTERM") from None
    require(code == 0, f"the service ended with {code}: {(folder / 'serve.log').read_text()}")


def _train(extra: str, python: Path) -> None:
    """Train the demo's model for two steps."""
    command = [str(python.with_name("any-agent")), "demo", "--steps", "2", "--keep", "demo"]
    run(command, cwd=python.parents[2])


CHECKS: dict[str, Callable[[str, Path], None]] = {LIGHT: _light, "serve": _serve, "train": _train}


def write_bill(python: Path, path: Path) -> None:
    """Write an environment's bill of materials, CycloneDX as JSON, to ``path``."""
    tool = [sys.executable, "-m", "cyclonedx_py", "environment", "--output-reproducible"]
    run([*tool, "--output-format", "JSON", "--output-file", str(path), str(python)])
    say("bill", f"{path.relative_to(ROOT)}")


def run(
    command: Sequence[str], *, cwd: Path | None = None, env: dict[str, str] | None = None
) -> str:
    """Run a command and return what it printed; Failed with it if the command fails."""
    clean = {k: v for k, v in (env or os.environ).items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if done.returncode:
        shown = " ".join(command)[:300]
        raise Failed(
            f"{shown} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}"
        )
    return done.stdout


def require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def say(what: str, text: str) -> None:
    print(f"{what:<9} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
