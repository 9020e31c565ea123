"""Which of this machine's networks has an address."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

_SIOCGIFADDR = 0x8915


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
