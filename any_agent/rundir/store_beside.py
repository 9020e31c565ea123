"""The store of registry entries beside the run's folder, by the settings."""

from __future__ import annotations

from any_agent.config import Config
from any_agent.rundir.layout import RunDir
from any_agent.rundir.registry import EntryStore


def store_beside(config: Config) -> EntryStore | None:
    """Return the run's entries in Redis; None without `server.journal`."""
    url = config.server.journal
    if url is None:
        return None
    # Who needs no Redis does not import its client.
    from any_agent.rundir.redis_registry import RedisEntries

    run = RunDir.of(config.root, config.user, config.experiment, config.trial)
    return RedisEntries(url.get_secret_value(), run.full_name)
