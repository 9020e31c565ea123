"""Run a ring of tests: the gate that continuous integration asks, or all the rest.

``gate`` clones HEAD into an empty folder and runs ``.ci/run`` there; ``ci`` is what that script
runs; ``verify`` runs the suites that the gate leaves out. CONTRIBUTING.md explains the rings.

A stage or suite has a limit, after which it fails by name. Tests that failed run once more, each
in a process of its own; those that pass then are listed as flaky and kept in tests/flaky.jsonl.
Only the standard library is imported: this starts before anything is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
FLAKY = Path(os.environ.get("FLAKY_LOG", ROOT / "tests" / "flaky.jsonl"))
"""One line for each test that failed and then passed: test, date, commit, first line."""
NO_SECOND_CHANCE = 2
"""A test that stands in the log this often is mended or leaves its ring: it is not run again."""
GRACE = 60.0
"""Seconds that a stage past its limit has, for each signal, to end what it started."""
GATE_LIMIT = 5000.0
"""Seconds for the whole gate; its stages' own limits come first."""
PREPARE_LIMIT = 3600.0
"""Seconds for one command that makes what a suite needs."""
BUILD = ROOT / "build"
PYTHON = ROOT / ".venv" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Stage:
    """One command, or one run of pytest."""

    name: str
    limit: float
    """Seconds, on two cores that have other things to do, too."""
    command: tuple[str, ...] = ()
    """The command that runs in place of pytest."""
    paths: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """The options of pytest."""
    prepare: tuple[tuple[str, ...], ...] = ()
    """Commands that make what the tests need, before their clock starts."""
    second_chances: int = 10
    """At most so many failed tests run again; of more, none does."""


@dataclass(slots=True)
class Result:
    """The result of a stage."""

    name: str
    ok: bool = False
    why: str = ""
    """The reason where it is red without a failed test."""
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    flaky: list[str] = field(default_factory=list)
    skipped: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    commit: str = ""


def _module(*words: str) -> tuple[str, ...]:
    """Return the command that runs a module of the project."""
    return (str(PYTHON), "-m", *words)


_PARALLEL = ("-n", "3", "--dist", "loadfile", "--no-loadscope-reorder")
_TWO = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
_REST = "service and not smoke and not gate"
_FOLDERS = ("e2e", "chaos", "laws", "benchmarks")

CI = (
    Stage("set-up", 1500, command=("make", "--no-print-directory", "setup")),
    Stage("lint", 600, command=("make", "--no-print-directory", "lint")),
    Stage(
        "tests",
        1800,
        options=(*_PARALLEL, "-m", "gate or smoke or not service"),
        second_chances=3,
    ),
)
"""From nothing to green in fifteen minutes on two cores."""

SUITES = (
    Stage(
        "services",
        2400,
        paths=("tests",),
        options=(*_PARALLEL, "-m", _REST, *(f"--ignore=tests/{name}" for name in _FOLDERS)),
    ),
    Stage("e2e", 3600, paths=("tests/e2e",), options=(*_TWO, "-m", _REST)),
    Stage("chaos", 3000, paths=("tests/chaos",), options=(*_TWO, "-m", _REST)),
    Stage("laws", 1800, paths=("tests/laws",), options=(*_PARALLEL, "-m", _REST)),
    Stage("benchmarks", 1800, paths=("tests/benchmarks",), options=("-m", _REST)),
    Stage(
        "engines",
        2400,
        paths=("tests/engine/sglang/*_live.py",),
        prepare=(_module("tests.engine.sglang.real_sglang"),),
    ),
    Stage(
        "slurm",
        2400,
        paths=("tests/slurm/*_live.py",),
        prepare=(_module("tests.slurm.lab"),),
    ),
    Stage(
        "clients",
        3600,
        paths=("tests/clients/*/*_live.py",),
        prepare=(_module("tests.clients.environment", "clients"),),
        # Its last test compares the cells that all of them found.
        second_chances=0,
    ),
    Stage(
        "documents",
        2400,
        paths=("tests/documents/*_live.py",),
        prepare=(_module("tests.clients.environment", "documents"), _module("tests.slurm.lab")),
    ),
    Stage(
        "examples",
        2400,
        paths=("tests/examples/*_live.py",),
        options=_TWO,
        prepare=(_module("tests.clients.environment", "examples"),),
    ),
    Stage("gpu", 2400, paths=("tests/trainer/*_live.py",)),
)
"""Everything else, each suite alone; ``gpu`` only where it is asked for."""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("ring", choices=("gate", "ci", "verify"))
    parser.add_argument("--suites", default="", help="run these alone, e.g. 'engines clients'")
    parser.add_argument("--again", action="store_true", help="also what is green at this commit")
    parser.add_argument("--pytest", default="", help="more options for pytest")
    given = parser.parse_args(arguments)
    # A shell starts what runs in the background with Ctrl-C ignored, and stages would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
    os.chdir(ROOT)
    # Programs that tests start, thousands of them, would each compile all our modules.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if given.ring == "gate":
        return gate()
    stages = CI if given.ring == "ci" else _suites(given.suites.split())
    return run(given.ring, stages, again=given.again, more=shlex.split(given.pytest))


def gate() -> int:
    """Run what continuous integration runs, on HEAD in an empty folder; 0 if it is green."""
    commit = _git("rev-parse", "HEAD")
    if left_out := _git("status", "--porcelain").splitlines():
        print(f"gate     {len(left_out)} files differ from HEAD and are left out", flush=True)
    folder = BUILD / "gate"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    checkout = folder / ROOT.name
    subprocess.run(["git", "clone", "-q", str(ROOT), str(checkout)], check=True)
    subprocess.run(["git", "-C", str(checkout), "checkout", "-q", commit], check=True)
    if (beside := ROOT.parent / "shared").is_dir():
        (folder / "shared").symlink_to(beside)
    print(f"gate     {commit[:8]} in {checkout}", flush=True)
    unset = ("VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "ARGS")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {"CI": "true", "FLAKY_LOG": str(FLAKY)}
    if _within(("bash", ".ci/run"), GATE_LIMIT, "the gate", folder=checkout, variables=environment):
        print(f"gate     red at {commit[:8]}; what it left is in {checkout}")
        return 1
    (BUILD / "gate-passed").write_text(f"{commit}\n", encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    print(f"gate     green at {commit[:8]}")
    return 0


def run(ring: str, stages: Sequence[Stage], *, again: bool, more: Sequence[str]) -> int:
    """Run the stages one after another and print their table; 0 if all are green.

    ``ci`` ends at a red stage, since later ones need it; ``verify`` goes on.
    """
    results = []
    for stage in stages:
        kept = None if again or more or ring != "verify" else _green_before(stage)
        result = kept or _run(ring, stage, more)
        results.append(result)
        if ring == "ci" and not result.ok:
            break
    _print_table(ring, results)
    return 0 if all(result.ok for result in results) else 1


def _run(ring: str, stage: Stage, more: Sequence[str]) -> Result:
    now = datetime.datetime.now().strftime("%H:%M:%S")
    print(f"== {now} {stage.name}: at most {stage.limit:.0f} s", flush=True)
    result = Result(stage.name, commit=_commit())
    folder = BUILD / ring
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / f"{stage.name}.json"
    kept.unlink(missing_ok=True)
    for command in stage.prepare:
        if code := _within(command, PREPARE_LIMIT, f"the set-up of {stage.name}"):
            result.why = f"its set-up {_ended(code)}: {shlex.join(command)}"
            return result
    began, cpu = time.monotonic(), _cpu()
    if stage.command:
        code = _within(stage.command, stage.limit, stage.name)
        result.ok, result.why = code == 0, _ended(code) if code else ""
    else:
        _test(stage, result, folder / f"{stage.name}.xml", more)
    result.seconds, result.cpu_seconds = time.monotonic() - began, _cpu() - cpu
    if not more:  # of a suite as a whole, not of what options chose
        kept.write_text(json.dumps(asdict(result)), encoding="utf-8")
    return result


def _test(stage: Stage, result: Result, junit: Path, more: Sequence[str]) -> None:
    """Run pytest, then what failed once more, each alone."""
    pytest = (str(PYTHON), "-m", "pytest", "-o", "junit_family=xunit1", "--junitxml")
    paths = [str(path) for name in stage.paths for path in sorted(Path().glob(name))]
    if stage.paths and not paths:
        result.why = f"no file is named {' or '.join(stage.paths)}"
        return
    junit.unlink(missing_ok=True)
    code = _within((*pytest, str(junit), *stage.options, *more, *paths), stage.limit, stage.name)
    failed: dict[str, str] = {}
    if junit.exists():
        failed = _read(junit, result)
    result.failed = list(failed)
    if code not in (0, 1) or not junit.exists() or (code and not failed):
        result.why = _ended(code)
        return
    before = _flaky_before()
    chances = [test for test in failed if before[test] < NO_SECOND_CHANCE]
    if len(failed) <= stage.second_chances and len(chances) == len(failed):
        for test in failed:
            print(f"== {test} failed ({failed[test]}): once more, alone", flush=True)
            alone, again = junit.with_suffix(".again.xml"), Result(test)
            code = _within((*pytest, str(alone), "-n", "0", *more, test), stage.limit, test)
            if code == 0 and not _read(alone, again) and again.passed:
                result.failed.remove(test)
                result.flaky.append(test)
                result.passed += 1
                _remember(test, failed[test], result.commit)
    for test in failed:
        if before[test] >= NO_SECOND_CHANCE:
            print(f"== {test} stands in {FLAKY.name} {before[test]} times: mend it or take it out")
    result.ok = not result.failed and result.passed > 0
    if not result.failed and not result.ok:
        result.why = f"none of its tests ran: {result.skipped} were skipped, each with its reason"


_PAST_LIMIT = -1000


def _ended(code: int) -> str:
    return "took more than its limit" if code == _PAST_LIMIT else f"ended with {code}"


def _within(
    command: Sequence[str],
    limit: float,
    name: str,
    *,
    folder: Path | None = None,
    variables: dict[str, str] | None = None,
) -> int:
    """Run a command and return its exit status, `_PAST_LIMIT` if it was ended for its time."""
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, cwd=folder, env=variables
    )
    try:
        return child.wait(limit)
    except subprocess.TimeoutExpired:
        print(f"== {name} took more than {limit:.0f} s and is ended", flush=True)
        return _PAST_LIMIT
    finally:
        _end(child)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a stage and what it started: first as Ctrl-C does, so that fixtures clean up.

    What a stage that ended by itself left behind is ended, too.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        if child.poll() is None:
            _signal(child, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                # A stage of the gate is a ring, which ends stages in its turn.
                child.wait(3 * GRACE)
    _signal(child, signal.SIGKILL)
    child.wait()


def _signal(child: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, number)


def _read(junit: Path, result: Result) -> dict[str, str]:
    """Count a run's tests into ``result``; return the failed ones with their first lines."""
    failed: dict[str, str] = {}
    tests, skipped = set(), set()
    for case in ElementTree.parse(junit).iter("testcase"):
        test = _id(case)
        tests.add(test)
        if case.find("skipped") is not None:
            skipped.add(test)
        for kind in ("failure", "error"):
            if (found := case.find(kind)) is not None:
                lines = (found.get("message") or found.text or "").strip().splitlines()
                failed.setdefault(test, lines[0][:300] if lines else kind)
    result.skipped, result.passed = len(skipped), len(tests - skipped - failed.keys())
    return failed


def _id(case: ElementTree.Element) -> str:
    """Return pytest's name of a test: the file that collected it, its classes, its own name.

    JUnit's `file` is where the function stands, which for an inherited test is another one.
    """
    parts = (case.get("classname") or "").split(".")
    for count in range(len(parts), 0, -1):
        file = "/".join(parts[:count]) + ".py"
        if Path(file).exists():
            return "::".join([file, *parts[count:], case.get("name") or ""])
    return case.get("name") or ""


def _flaky_before() -> Counter[str]:
    if not FLAKY.exists():
        return Counter()
    lines = FLAKY.read_text(encoding="utf-8").splitlines()
    return Counter(json.loads(line)["test"] for line in lines if line)


def _remember(test: str, first_line: str, commit: str) -> None:
    date = datetime.date.today().isoformat()
    row = {"test": test, "date": date, "commit": commit, "first_line": first_line}
    with FLAKY.open("a", encoding="utf-8") as log:
        log.write(json.dumps(row) + "\n")


def _green_before(stage: Stage) -> Result | None:
    """Return the result of a suite that was green at this commit, with nothing changed since."""
    kept = BUILD / "verify" / f"{stage.name}.json"
    if not kept.exists() or not (commit := _commit()) or commit.endswith("+"):
        return None
    result = Result(**json.loads(kept.read_text(encoding="utf-8")))
    if not result.ok or not result.passed or result.commit != commit:
        return None
    print(f"== {stage.name}: green at this commit; --again runs it again", flush=True)
    return result


def _suites(wanted: Iterable[str]) -> list[Stage]:
    by_name = {suite.name: suite for suite in SUITES}
    if unknown := sorted(set(wanted) - by_name.keys()):
        sys.exit(f"error: no suite is named {unknown[0]}; there are {', '.join(by_name)}")
    return [by_name[name] for name in wanted] or [s for s in SUITES if s.name != "gpu"]


def _print_table(ring: str, results: Sequence[Result]) -> None:
    for result in results:
        for word, tests in (("failed", result.failed), ("flaky", result.flaky)):
            for test in tests:
                print(f"{word:8} {result.name}: {test}")
        if result.why:
            print(f"red      {result.name}: {result.why}")
    print("\n| suite | result | passed | failed | flaky | skipped | seconds | CPU s | commit |")
    print("|---|---|---|---|---|---|---|---|---|")
    for r in results:
        counts = f"{r.passed} | {len(r.failed)} | {len(r.flaky)} | {r.skipped}"
        commit = r.commit[:8] + ("+" if r.commit.endswith("+") else "")
        times = f"{r.seconds:.0f} | {r.cpu_seconds:.0f} | {commit}"
        print(f"| {r.name} | {'green' if r.ok else 'red'} | {counts} | {times} |")
    seconds = sum(result.seconds for result in results)
    state = "green" if all(result.ok for result in results) else "red"
    print(f"{ring:8} {state}, {seconds / 60:.1f} minutes")
    passed, failed = sum(r.passed for r in results), sum(len(r.failed) for r in results)
    skipped = sum(result.skipped for result in results)
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)


def _commit() -> str:
    """Return HEAD, with a `+` where files differ from it, or nothing outside a repository."""
    try:
        changed = _git("status", "--porcelain", "--", ".", ":!tests/flaky.jsonl")
        return _git("rev-parse", "HEAD") + ("+" if changed else "")
    except (subprocess.CalledProcessError, OSError):
        return ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
