"""Clients of the Redis at a URL: one server, the master that Sentinels name, or a cluster."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import unquote, urlsplit

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio import RedisCluster as AsyncCluster
from redis.asyncio.retry import Retry as AsyncRetry
from redis.asyncio.sentinel import Sentinel as AsyncSentinel
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import RedisClusterException, RedisError
from redis.sentinel import Sentinel

from any_agent.errors import ConfigError

FAILURES = (RedisError, RedisClusterException, OSError)
"""Failures of a command; a cluster's are of another kind."""


def is_cluster(url: str) -> bool:
    return urlsplit(url).scheme.endswith("+cluster")


def open_client(url: str, options: dict[str, Any]) -> redis.Redis:
    """Return a client with redis-py's ``options``. A cluster's connects at once, and may raise one
    of `FAILURES`; any other connects on use."""
    found: redis.Redis = _open((redis.Redis, RedisCluster, Sentinel), url, options)
    return found


def connect_async(url: str, *, timeout: float, connections: int) -> AsyncRedis | AsyncCluster:
    """Return a client for an event loop, which connects on use; with as many connections at most to
    each server, and seconds to wait for it."""
    options = {
        "socket_timeout": timeout,
        "socket_connect_timeout": timeout,
        "max_connections": connections,
        # With RESP3 redis-py uses a connection that the server has closed once more.
        "protocol": 2,
        "retry": AsyncRetry(NoBackoff(), 0),
    }
    found: AsyncRedis | AsyncCluster = _open(
        (AsyncRedis, AsyncCluster, AsyncSentinel), url, options
    )
    return found


def _open(kinds: tuple[Any, Any, Any], url: str, options: dict[str, Any]) -> Any:
    """Return a client of the URL's kind: a server's, a cluster's, or one that Sentinels name."""
    plain, cluster, sentinel = kinds
    scheme = urlsplit(url).scheme
    if scheme == "unix":
        del options["socket_connect_timeout"]
    else:
        options["socket_keepalive"] = True
    try:
        if scheme == "redis+sentinel":
            return _by_sentinel(sentinel, url, options)
        if is_cluster(url):
            return cluster.from_url(url.replace("+cluster", "", 1), **options)
        return plain.from_url(url, **options)
    except ValueError as error:
        raise ConfigError(f"server.journal {without_password(url)}: {error}") from error


def _by_sentinel(kind: Any, url: str, options: dict[str, Any]) -> Any:
    parts = urlsplit(url)
    login, _, hosts = parts.netloc.rpartition("@")
    user, _, password = login.partition(":")
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise ConfigError(
            "server.journal: redis+sentinel://HOST:PORT,HOST:PORT/NAME needs the master's NAME"
        )
    nodes = [urlsplit(f"//{node}") for node in hosts.split(",")]
    places = [(node.hostname, node.port or 26379) for node in nodes]
    return kind(places, **options).master_for(
        service,
        db=int(database or 0),
        username=unquote(user) or None,
        password=unquote(password) or None,
        **options,
    )


def without_password(url: str) -> str:
    """Return a URL as it may be shown: without its login and its options."""
    return re.sub(r"//.*@", "//***@", url.partition("?")[0], flags=re.DOTALL)
