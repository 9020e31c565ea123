"""Outside of a job: write the job's script, submit it, and see that Slurm has it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from any_agent.auth.access import require_key
from any_agent.config import Config
from any_agent.errors import StartupError
from any_agent.launcher.reachability import LISTENING
from any_agent.launcher.served_model import check_model
from any_agent.launcher.slurm.job import ask, require_program
from any_agent.launcher.trial import newest_weights, trial_dir
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import write_atomic

_SUBMIT_TIMEOUT = 60.0
_SEEN_TIMEOUT = 30.0
"""Seconds until the queue must show a job that was taken."""
_SETTLED = 3.0
"""Seconds after which a controller that dies loses no job any more that it has shown."""
_POLL_INTERVAL = 2.0
_MAX_FAILURES = 30
"""Times in a row that Slurm may not say what becomes of a job."""
_OVER = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
)
_WHOLE_NODES = ("--exclusive", "--mem=0")
"""Else a task is one core with its share of the memory."""
_SHARE = re.compile("--(exclusive|oversubscribe|overcommit|cpus-|mem|cores-|threads-)|-[csO]")
"""Options that say how much of a node it is."""


def job_name(config: Config) -> str:
    """One trial is one job's at a time."""
    return f"any-agent-{config.experiment}-{config.trial}"


def script(config: Config, arguments: Sequence[str], log: Path) -> str:
    """What sbatch is given; ``arguments`` are the coordinator's."""
    cluster = config.cluster
    options = [
        f"--job-name={job_name(config)}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []),
        *_WHOLE_NODES * (not any(_SHARE.match(option) for option in cluster.sbatch)),
        f"--signal=B:USR1@{cluster.warning}",
        "--requeue" if cluster.requeue else "--no-requeue",
        "--open-mode=append",
        f"--output={log}",
        *cluster.sbatch,
    ]
    command = [sys.executable, "-m", "any_agent.launcher.slurm", *arguments]
    return "\n".join(
        [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in options),
            "",
            "# The job's signals are for the service, which takes this shell's place.",
            f"exec {shlex.join(command)}",
            "",
        ]
    )


def require_cluster() -> None:
    """Raise ConfigError without Slurm's programs, StartupError where no cluster answers them."""
    for program in ("sbatch", "squeue"):
        require_program(program)
    try:
        ask(["squeue", "--me", "--noheader", "--format=%i"])
    except StartupError as error:
        first = error.message.splitlines()[0]
        raise StartupError(
            f"Slurm's programs are here, but no cluster answers ({first}): `python3 -m "
            "any_agent.launcher.local any_agent_grpo.py --config FILE` runs all of it on this "
            "machine"
        ) from None


def submit(
    config: Config, arguments: Sequence[str], say: Callable[[str], None], *, wait: bool = True
) -> int:
    """Submit a job that runs the coordinator with these arguments; the exit code.

    ``wait``: for its service to listen, which may be hours; Ctrl-C ends the wait, not the job.

    Raises ConfigError for numbers that do not fit, StartupError if there is no job in the end, or
    the trial has one.
    """
    # What the job itself would find out, in hours perhaps.
    require_key(config, "a service in a Slurm job")
    if newest_weights(config) is None:
        check_model(config.model.path)
    name, run = job_name(config), trial_dir(config)
    before = _jobs(name)
    if going := [id for id, state in before.items() if state not in _OVER]:
        raise StartupError(
            f"{config.experiment}/{config.trial} has a job already: {going[0]}; scancel it, or "
            "choose another trial"
        )
    # Where its journals go is on the nodes.
    RunDir(run.path).create()
    path = run.logs / "job.sbatch"
    write_atomic(path, script(config, arguments, run.logs / "job-%j.log"))
    said = _sbatch(path)
    # Its answer may be lost, and so may the job be whose controller dies just then.
    found = _seen(name, before)
    if found is None:
        raise StartupError(f"Slurm has no job {name}: sbatch said {said!r}; submit it again")
    say(f"job       {found}: {name}, {config.cluster.nodes} nodes")
    say(f"log       {run.logs / f'job-{found}.log'}")
    say(f"url       will be in {run.url}")
    return _until_listening(name, found, run.logs / f"job-{found}.log", say) if wait else 0


def _until_listening(name: str, job: str, log: Path, say: Callable[[str], None]) -> int:
    """Say the line of the job's log that tells where its service is.

    StartupError if the job ends without, or Slurm does not answer for a while.
    """
    failures = 0
    try:
        while True:
            try:
                state, failures = _jobs(name).get(job, "GONE"), 0
            except StartupError:
                # A controller that starts again answers in a moment.
                state, failures = "", failures + 1
                if failures > _MAX_FAILURES:
                    raise
            if line := _listening_in(log):
                say(line)
                return 0
            if state == "GONE" or state in _OVER:
                raise StartupError(f"job {job} has ended ({state.lower()}): {log} says why")
            time.sleep(_POLL_INTERVAL)
    except KeyboardInterrupt:
        say(f"job       {job} goes on, nobody waits for it here; scancel {job} ends it")
        return 0


def _listening_in(log: Path) -> str | None:
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return None
    return next((line for line in lines if LISTENING in line), None)


def _sbatch(path: Path) -> str:
    try:
        done = subprocess.run(
            ["sbatch", str(path)],
            capture_output=True,
            text=True,
            timeout=_SUBMIT_TIMEOUT,
            stdin=subprocess.DEVNULL,
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return f"nothing within {_SUBMIT_TIMEOUT:g} s"
    said = (done.stderr or done.stdout).strip()[-500:]
    if done.returncode and "socket timed out" not in said.lower():
        raise StartupError(f"sbatch refused {path}: {said}")
    return said


def _seen(name: str, before: Container[str]) -> str | None:
    """The id of the new job, once the queue has shown it for a while; None if it does not."""
    deadline = time.monotonic() + _SEEN_TIMEOUT
    since = None
    while time.monotonic() < deadline:
        try:
            jobs = [id for id in _jobs(name) if id not in before]
        except StartupError:
            jobs = []  # a controller that starts again answers in a moment
        if not jobs:
            since = None
        elif since is None:
            since = time.monotonic()
        elif time.monotonic() - since >= _SETTLED:
            return jobs[0]
        time.sleep(0.5)
    return None


def _jobs(name: str) -> dict[str, str]:
    """States of this user's jobs of that name by their ids; also of those that ended just now."""
    queue = ["squeue", "--me", "--noheader", "--states=all", "--format=%i %T"]
    lines = ask([*queue, f"--name={name}"]).splitlines()
    return {id: state for id, _, state in (line.partition(" ") for line in lines) if id}
