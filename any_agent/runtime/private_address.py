"""Checks that engines have private addresses, so that more than their key protects them."""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from any_agent.errors import ConfigError

_PRIVATE = tuple(
    ipaddress.ip_network(network)
    for network in (
        *("127.0.0.0/8", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16"),
        *("::1/128", "fc00::/7", "fe80::/10"),
    )
)
"""Loopback, RFC 1918, link-local, and IPv6's unique local addresses."""


def is_private(address: str) -> bool:
    """Return whether an IP address belongs to a machine itself or to a private network."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return any((mapped or ip) in network for network in _PRIVATE)


def require_private_url(url: str) -> None:
    """Raise ConfigError unless all addresses of the URL's host are private.

    It may ask the name service. A host without an address passes: connecting to it will fail.
    """
    try:
        host = urlsplit(url).hostname
    except ValueError:
        host = None
    if not host or not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no URL of an engine: write it like http://10.0.0.5:30000")
    for address in _addresses(host):
        if not is_private(address):
            raise ConfigError(
                f"the engine {host} has the public address {address}: only its key would keep "
                "strangers from its weights, so have it listen on a private one "
                "(loopback, 10/8, 172.16/12, 192.168/16, link-local, fc00::/7)"
            )


def require_private_host(host: str) -> None:
    """Raise ConfigError for a public address to listen on, all interfaces included."""
    addresses = _addresses(host)
    if not addresses or not all(map(is_private, addresses)):
        raise ConfigError(
            f"an engine must not listen on {host}: only its key would keep strangers from its "
            "weights; give it a private address of this machine, such as 127.0.0.1"
        )


def _addresses(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})
