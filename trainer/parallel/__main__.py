"""One machine's training processes: ``python -m trainer.parallel --processes N -- ARGUMENTS``.

It starts ``python -m trainer ARGUMENTS`` by torchrun's own functions, and ends like the first
process that failed, so that the launcher can distinguish a wrong setting from a crash.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys

import psutil

from any_agent.runtime.ports import free_port

_STOPPED = 143
_MEET_TIMEOUT = 900  # seconds that the other machines wait for the first one
_END_TIMEOUT = 3600
"""Seconds for the current step and a checkpoint after SIGTERM; if the sender's patience ends
earlier and it kills this process, the others end with it."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.parallel", description=__doc__)
    add = parser.add_argument
    add("--processes", type=int, required=True, help="number of processes on this machine")
    add("--machines", type=int, default=1, help="number of machines that train together")
    add("--machine", type=int, default=0, help="number of this machine, from 0")
    add("--address", default="127.0.0.1", help="address of the first machine")
    add("--port", type=int, default=0, help="port of the first machine; 0: any free one, if alone")
    add("--host", default="127.0.0.1", help="this machine's address for the others")
    add("arguments", nargs="*", help="arguments of each process, after --")
    args = parser.parse_args()

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    interface = interface_of(args.host)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        if args.machines > 1:
            # A single machine must not fix it: engines on others may use another interface.
            os.environ.setdefault("NCCL_SOCKET_IFNAME", interface)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_END_TIMEOUT))
    port = args.port or free_port(args.address)
    config = LaunchConfig(
        min_nodes=args.machines,
        max_nodes=args.machines,
        nproc_per_node=args.processes,
        run_id="trainer",
        # The other backends exchange pickled data.
        rdzv_backend="static",
        rdzv_endpoint=f"{args.address}:{port}",
        rdzv_configs={"rank": args.machine, "timeout": _MEET_TIMEOUT},
        # The launcher restarts this process, and so all of them.
        max_restarts=0,
        monitor_interval=0.2,
    )
    try:
        # Processes that it has just started must not miss its death.
        parent = ("--parent", str(os.getpid()))
        elastic_launch(config, sys.executable)("-m", "trainer", *args.arguments, *parent)
    except SignalException:
        return _STOPPED
    except ChildFailedError as error:
        return error.get_first_failure()[1].exitcode
    return 0


def interface_of(host: str) -> str | None:
    """Return the interface with this IPv4 address; None if none is found: the libraries choose.

    They choose the address of the machine's own host name, which may be in another network or
    unreachable for the other machines.
    """
    wanted = "127.0.0.1" if host.startswith("127.") else host
    for name, addresses in psutil.net_if_addrs().items():
        if (socket.AF_INET, wanted) in ((one.family, one.address) for one in addresses):
            return name
    return None


if __name__ == "__main__":
    code = main()
    if code < 0:
        # End by the same signal as the child.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
