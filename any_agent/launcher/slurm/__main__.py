"""``python -m any_agent.launcher.slurm trainer/any_agent_grpo.py --config my.yaml``.

In a job's script it runs the service on the job's nodes; elsewhere it submits such a job.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from any_agent.errors import ConfigError
from any_agent.launcher.script_path import SERVICE, found_script, is_service
from any_agent.runtime.command_line import add_service_arguments, guarded, overrides_of, parse

if TYPE_CHECKING:
    from any_agent.config import Config
    from any_agent.launcher.slurm.job import SlurmJob


def main(argv: Sequence[str] | None = None) -> int:
    # Until there is something to end; a warning must not end the job without a word.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    arguments = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(parse(_parser(), arguments), arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m any_agent.launcher.slurm",
        description="Serve and train one run on the nodes of a Slurm job; outside of one, submit "
        "it. The settings cluster.* say which nodes.",
    )
    parser.add_argument("script", nargs="?", help=f"{SERVICE}, the trainer's own")
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
    from any_agent.config.foreign_settings import SCHEDULER
    from any_agent.launcher.slurm.head_node import run_job
    from any_agent.launcher.slurm.job import current_job
    from any_agent.launcher.slurm.submit import require_cluster, submit
    from any_agent.runtime.logs import set_up_logging

    if args.script is None:
        raise ConfigError(f"which script? e.g. any_agent.launcher.slurm {SERVICE} --config my.yaml")
    if not is_service(found_script(args.script)):
        raise ConfigError(
            f"{args.script} cannot be spread over nodes: the trainer's own {SERVICE} is what is; a "
            "script with a GRPOTrainer of its own runs on one machine: `python` in a job's script"
        )
    if any(text.startswith("server.admin_key=") for text in args.overrides):
        raise ConfigError(
            "server.admin_key would stand in the job's script and in its processes' arguments, for "
            "all to read: set ANY_AGENT_SERVER__ADMIN_KEY instead, which sbatch passes on"
        )
    say = partial(print, flush=True)
    job = current_job()
    if job is None:
        # First: without it nothing else that may be wrong matters.
        require_cluster()
    scheduler = SCHEDULER.set("slurm")
    try:
        config = _settings(args, job)
    finally:
        SCHEDULER.reset(scheduler)
    if job is None:
        return submit(config, arguments, say, wait=not args.no_wait)
    set_up_logging(config.log_level, secrets=config.secrets())
    return run_job(config, job, stay=args.stay, say=say)


def _settings(args: argparse.Namespace, job: SlurmJob | None) -> Config:
    """With as many ranks as the nodes make; a trial goes on with as many as before."""
    from any_agent.config import load_config
    from any_agent.launcher.slurm.plan import plan
    from any_agent.launcher.trial import resolve_config, trial_dir

    overrides = overrides_of(args)
    config = load_config(args.config, overrides)
    saved = trial_dir(config).path / "config.yaml"
    if args.config is None and saved.is_file():
        config = load_config(saved, overrides)
    cluster = config.cluster
    nodes = job.nodes if job else tuple(f"node {k}" for k in range(cluster.nodes))
    ranks = plan(config, nodes, job.gpus if job else cluster.gpus_per_node).ranks
    return resolve_config(args.config, [*overrides, f"server.ranks={ranks}"])


if __name__ == "__main__":
    # Children find the packages that this process found, installed or not.
    os.environ.setdefault("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    sys.exit(main())
