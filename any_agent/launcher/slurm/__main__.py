"""``python -m any_agent.launcher.slurm trainer/any_agent_grpo.py --config my.yaml``.

In a job's script it runs the service on the job's nodes; elsewhere it submits such a job.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Container, Sequence
from pathlib import Path

from any_agent.auth.access import require_key
from any_agent.config import SECRET_VARIABLES, SECRETS, Config, load_config
from any_agent.config.foreign_settings import SCHEDULER
from any_agent.errors import ConfigError, StartupError
from any_agent.launcher.local import SERVICE_SCRIPT, find_script, is_service
from any_agent.launcher.node import LISTENING
from any_agent.launcher.slurm.head_node import run_job
from any_agent.launcher.slurm.job import (
    SlurmJob,
    current_job,
    require_program,
    run_slurm,
    slurm_process,
)
from any_agent.launcher.slurm.job_redis import require_alone
from any_agent.launcher.slurm.plan import count_ranks, plan
from any_agent.launcher.trial import (
    check_frozen,
    check_model,
    newest_weights,
    resolve_config,
    trial_dir,
)
from any_agent.rundir.layout import RunDir
from any_agent.runtime.atomic_files import write_atomic
from any_agent.runtime.command_line import (
    CommandParser,
    add_service_arguments,
    guarded,
    overrides_of,
    parse,
    say,
    share_module_path,
)
from any_agent.runtime.log_tail import LogTail
from any_agent.runtime.logs import set_up_logging

_SUBMIT_TIMEOUT = 60.0
_QUEUE_TIMEOUT = 30.0  # seconds until the queue must show a submitted job
SETTLE_SECONDS = 3.0
"""Seconds after which a controller that dies no longer loses a job that it has shown."""
POLL_INTERVAL = 2.0
MAX_FAILURES = 30  # failed queries of a job's state in a row that are tolerated
_ENDED_STATES = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "COMPLETING", "DEADLINE", "FAILED", "NODE_FAIL"),
    *("OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT"),
)
_WHOLE_NODES = ("--exclusive", "--mem=0")
"""Without these a task gets one core with its share of the memory."""
_SHARE = re.compile("--(exclusive|oversubscribe|overcommit|cpus-|mem|cores-|threads-)|-[csO]")
"""Options of sbatch that choose a share of a node."""


def main(argv: Sequence[str] | None = None) -> int:
    # A warning that comes before there is a service must not kill the job silently.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(parse(_parser(), arguments), arguments))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="python -m any_agent.launcher.slurm",
        description="Serve and train one run on the nodes of a Slurm job; outside of one, submit "
        "it. The settings cluster.* describe the nodes; with cluster.redis=true others carry on "
        "what a lost one did.",
    )
    parser.add_argument("script", nargs="?", help=f"{SERVICE_SCRIPT}, the trainer's own")
    add_service_arguments(parser)
    parser.add_argument(
        "--stay",
        action="store_true",
        help="serve the trained model on after the last step, instead of ending the job",
    )
    parser.add_argument(
        "--no-wait",
        action="store_true",
        help="end when the job is queued, instead of when its service listens",
    )
    return parser


def _run(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    if args.script is None:
        raise ConfigError(
            f"name a script, e.g. any_agent.launcher.slurm {SERVICE_SCRIPT} --config my.yaml"
        )
    if not is_service(find_script(args.script)):
        raise ConfigError(
            f"{args.script} cannot run on several nodes: only the trainer's own {SERVICE_SCRIPT} "
            "can; a script with a GRPOTrainer of its own runs on one machine: `python` in a job's "
            "script"
        )
    for name, variable in zip(SECRETS, SECRET_VARIABLES, strict=True):
        if any(_sets(text, name) for text in args.overrides):
            raise ConfigError(
                f"{name} would be readable in the job's script and its processes' arguments: set "
                f"{variable} instead, which sbatch passes on"
            )
    job = current_job()
    if job is None:
        # Checked first: without Slurm no other error matters.
        require_cluster()
    scheduler = SCHEDULER.set("slurm")
    try:
        config = _settings(args, job)
    finally:
        SCHEDULER.reset(scheduler)
    require_alone(config)
    if job is None:
        return submit(config, arguments, say, wait=not args.no_wait)
    set_up_logging(config.log_level, secrets=config.secrets())
    return run_job(config, job, stay=args.stay, say=say)


def _sets(override: str, name: str) -> bool:
    """Return whether an override sets this setting, by itself or with its section."""
    key, _, value = override.partition("=")
    key, (section, _, own) = key.strip().lstrip("-+"), name.partition(".")
    return key == name or (key == section and own in value)


def _settings(args: argparse.Namespace, job: SlurmJob | None) -> Config:
    """Return the settings with the nodes' number of ranks; a trial keeps the number it had."""
    overrides = overrides_of(args)
    config = load_config(args.config, overrides)
    saved = trial_dir(config).path / "config.yaml"
    if args.config is None and saved.is_file():
        config = load_config(saved, overrides)
    cluster = config.cluster
    nodes = job.nodes if job else tuple(f"node {k}" for k in range(cluster.nodes))
    ranks = count_ranks(plan(config, nodes, job.gpus if job else cluster.gpus_per_node))
    return resolve_config(args.config, [*overrides, f"server.ranks={ranks}"])


# -- submitting a job -----------------------------------------------------------------------------


def job_name(config: Config) -> str:
    """Return the job's name, one per trial: a trial has one job at a time."""
    return f"any-agent-{config.experiment}-{config.trial}"


def script(config: Config, arguments: Sequence[str], log: Path) -> str:
    """Return the script for sbatch; it runs this module with ``arguments`` in the job."""
    cluster = config.cluster
    options = [
        f"--job-name={job_name(config)}",
        f"--nodes={cluster.nodes}",
        "--ntasks-per-node=1",
        *([f"--gpus-per-node={cluster.gpus_per_node}"] if cluster.gpus_per_node else []),
        *_WHOLE_NODES * (not any(_SHARE.match(option) for option in cluster.sbatch)),
        f"--signal=B:USR1@{cluster.warning}",
        "--requeue" if cluster.requeue else "--no-requeue",
        # With a log of the journals the job itself replaces a node that it loses.
        *["--no-kill"] * (cluster.redis or config.server.journal is not None),
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
        run_slurm(["squeue", "--me", "--noheader", "--format=%i"])
    except StartupError as error:
        reason = error.message.splitlines()[0]
        raise StartupError(
            f"Slurm's programs are here, but no cluster answers ({reason}): `python3 -m "
            "any_agent.launcher.local any_agent_grpo.py --config FILE` runs all of it on this "
            "machine"
        ) from None


def submit(
    config: Config, arguments: Sequence[str], say: Callable[[str], None], *, wait: bool = True
) -> int:
    """Submit a job that runs this module with these arguments; return the exit code.

    ``wait``: wait for its service to listen, which may take hours; Ctrl-C ends the wait, not the
    job. Raises ConfigError for a model or a key that is missing, StartupError if Slurm has no such
    job in the end, or the trial has one already.
    """
    # The job itself would report these errors, perhaps hours later.
    require_key(config, "a service in a Slurm job")
    if newest_weights(config) is None:
        check_model(config.model.path)
    check_frozen(config)
    name, run = job_name(config), trial_dir(config)
    before = jobs_named(name)
    if going := [id for id, state in before.items() if state not in _ENDED_STATES]:
        raise StartupError(
            f"{config.experiment}/{config.trial} has a job already: {going[0]}; scancel it, or "
            "choose another trial"
        )
    # The journals' folders are on the nodes.
    RunDir(run.path).create()
    path = run.logs / "job.sbatch"
    write_atomic(path, script(config, arguments, run.logs / "job-%j.log"))
    output = _sbatch(path)
    # If the controller dies at this moment, its answer may be lost, or the job.
    found = _find_new_job(name, before)
    if found is None:
        raise StartupError(f"Slurm has no job {name}: sbatch printed {output!r}; submit it again")
    say(f"job       {found}: {name}, {config.cluster.nodes} nodes")
    say(f"log       {run.logs / f'job-{found}.log'}")
    say(f"url       will be in {run.url}")
    return until_listening(name, found, run.logs / f"job-{found}.log", say) if wait else 0


def until_listening(name: str, job: str, log: Path, say: Callable[[str], None]) -> int:
    """Print the line of the job's log that names its service's URL.

    Raises StartupError if the job ends without one, or Slurm does not answer for a while.
    """
    failures = 0
    lines = LogTail(log, from_start=True)
    try:
        while True:
            try:
                state, failures = jobs_named(name).get(job, "GONE"), 0
            except StartupError:
                # A controller that restarts answers in a moment.
                state, failures = "", failures + 1
                if failures > MAX_FAILURES:
                    raise
            if line := next((line for line in lines.new_lines() if LISTENING in line), None):
                say(line)
                return 0
            if state == "GONE" or state in _ENDED_STATES:
                raise StartupError(f"job {job} has ended ({state.lower()}): read {log}")
            time.sleep(POLL_INTERVAL)
    except KeyboardInterrupt:
        say(f"job       {job} goes on; scancel {job} ends it")
        return 0


def _sbatch(path: Path) -> str:
    try:
        done = slurm_process(["sbatch", str(path)], _SUBMIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"nothing within {_SUBMIT_TIMEOUT:g} s"
    output = (done.stderr or done.stdout).strip()[-500:]
    if done.returncode and "socket timed out" not in output.lower():
        raise StartupError(f"sbatch refused {path}: {output}")
    return output


def _find_new_job(name: str, before: Container[str]) -> str | None:
    """Return the id of the new job, once the queue has shown it for a while; None without one."""
    deadline = time.monotonic() + _QUEUE_TIMEOUT
    shown_at = None
    while time.monotonic() < deadline:
        try:
            jobs = [id for id in jobs_named(name) if id not in before]
        except StartupError:
            jobs = []  # A controller that restarts answers in a moment.
        if not jobs:
            shown_at = None
        elif shown_at is None:
            shown_at = time.monotonic()
        elif time.monotonic() - shown_at >= SETTLE_SECONDS:
            return jobs[0]
        time.sleep(0.5)
    return None


def jobs_named(name: str) -> dict[str, str]:
    """Return the states of this user's jobs of that name by id, recently ended ones included."""
    queue = ["squeue", "--me", "--noheader", "--states=all", "--format=%i %T"]
    lines = run_slurm([*queue, f"--name={name}"]).splitlines()
    return {id: state for id, _, state in (line.partition(" ") for line in lines) if id}


if __name__ == "__main__":
    share_module_path()
    sys.exit(main())
