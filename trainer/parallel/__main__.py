"""One machine's training processes: ``python -m trainer.parallel --processes N -- ARGUMENTS``.

What `torchrun` does, by its own means, for ``python -m trainer ARGUMENTS``; it ends as the first of
them that failed did, so that whoever started it can tell a wrong setting from a crash.
"""

from __future__ import annotations

import argparse
import fcntl
import ipaddress
import os
import signal
import socket
import struct
import sys

from any_agent.runtime.ports import free_port

_STOPPED = 143
_SIOCGIFADDR = 0x8915
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


def interface_of(host: str) -> str | None:
    """The interface with this IPv4 address; None where none is found, and the libraries choose.

    By themselves they take the address that the machine's own name stands for, which may be another
    network's, or one that no other machine reaches.
    """
    try:
        address = ipaddress.IPv4Address(host)
    except ValueError:
        return None
    for _, name in socket.if_nameindex():
        found = _address_of(name)
        if found == address or (found is not None and found.is_loopback and address.is_loopback):
            return name
    return None


def _address_of(interface: str) -> ipaddress.IPv4Address | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            request = struct.pack("256s", interface.encode()[:15])
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        except OSError:
            return None
    return ipaddress.IPv4Address(answer[20:24])


if __name__ == "__main__":
    code = main()
    if code < 0:
        # As its child, by a signal.
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
