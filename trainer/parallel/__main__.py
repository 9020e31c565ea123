"""One machine's training processes: ``python -m trainer.parallel --processes N -- ARGUMENTS``.

What `torchrun` does, by its own means, for ``python -m trainer ARGUMENTS``; it ends as the first of
them that failed did, so that whoever started it can tell a wrong setting from a crash.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys

from any_agent.runtime.ports import free_port
from trainer.parallel.network_interface import interface_of

_STOPPED = 143
_MEET_TIMEOUT = 900
"""Seconds for the first of several machines to be there."""
_END_TIMEOUT = 3600
"""Seconds for the step under way and a checkpoint after SIGTERM, if whoever sent it is so patient:
when this process is killed, the others are."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.parallel", description=__doc__)
    parser.add_argument("--processes", type=int, required=True, help="on this machine")
    parser.add_argument("--machines", type=int, default=1, help="that train together")
    parser.add_argument("--machine", type=int, default=0, help="which of them this one is, from 0")
    parser.add_argument("--address", default="127.0.0.1", help="of the first one")
    parser.add_argument("--port", type=int, default=0, help="where they meet; 0: any, if alone")
    parser.add_argument("--host", default="127.0.0.1", help="this machine's address for the others")
    parser.add_argument("arguments", nargs="*", help="of each process, behind --")
    args = parser.parse_args()

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    interface = interface_of(args.host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if args.machines > 1:
            # Alone it needs none, and engines elsewhere may have to reach it.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_END_TIMEOUT))
    port = args.port or free_port(args.address)
    config = LaunchConfig(
        min_nodes=args.machines,
        max_nodes=args.machines,
        nproc_per_node=args.processes,
        run_id="trainer",
        # The other backends exchange pickled states.
        rdzv_backend="static",
        rdzv_endpoint=f"{args.address}:{port}",
        rdzv_configs={"rank": args.machine, "timeout": _MEET_TIMEOUT},
        # All of them are started again by who started this.
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        elastic_launch(config, sys.executable)("-m", "trainer", *args.arguments)
    except SignalException:
        return _STOPPED
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    return 0


if __name__ == "__main__":
    code = main()
    if code < 0:
        # As its child, by a signal.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
