"""The scripts that count tenants' quotas in Redis, and the connection by which a rank runs them.

Keys, all of a tenant in one slot of a cluster::

    any-agent:{RUN/tenant-NAME}:rates   hash   requests, tokens   levels of the buckets
                                               at                 the time of both
    any-agent:{RUN/tenant-NAME}:open    hash   RANK     `sessions claim number`: the sessions that
                                                        are open there, by its process of that claim
                                               total    their sum
    any-agent:{RUN/tenant-NAME}:heard   zset   RANK     the time of its last report, in ms

Times are the server's. A rank reports the number of its sessions, never a change of it, so that a
report may be lost, repeated or late: none is counted twice, and an older one has no effect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha1
from typing import Any, NamedTuple

from redis.asyncio import Redis
from redis.exceptions import NoScriptError, RedisError

from any_agent.runtime.redis_client import connect_async
from proxy_ext.web.quotas import BURST_SECONDS

RATES = f"""#!lua flags=allow-oom
local time = redis.call('TIME')
local now = time[1] + time[2] / 1000000
local h = redis.call('HMGET', KEYS[1], 'at', 'requests', 'tokens')
local passed = math.max(0, now - tonumber(h[1] or now))
local rest = 0
local function use(field, old, rate, wanted, whole)
  if rate <= 0 then return wanted, 0 end
  local most = math.max(1, rate * {BURST_SECONDS})
  local level = math.min(most, old and (tonumber(old) + rate * passed) or most)
  local used = wanted
  if whole then used = math.max(0, math.min(wanted, math.floor(level))) end
  level = level - used
  rest = math.max(rest, (most - level) / rate)
  redis.call('HSET', KEYS[1], 'at', string.format('%.6f', now), field,
    string.format('%.17g', level))
  return used, level
end
local admitted, requests = use('requests', h[2], tonumber(ARGV[1]), tonumber(ARGV[2]), true)
local _, tokens = use('tokens', h[3], tonumber(ARGV[3]), tonumber(ARGV[4]), false)
if rest > 0 then redis.call('PEXPIRE', KEYS[1], math.ceil(math.min(rest, 1e9) * 1000) + 1000) end
return {{admitted, string.format('%.17g', requests), string.format('%.17g', tokens)}}
"""
"""Use two token buckets: requests' rate, requests; tokens' rate, tokens. A rate of 0 is no limit.
Returns how many requests are admitted, and both levels. A full bucket needs no key."""

REPORT = """#!lua flags=allow-oom
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local rank, claim, number = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local held, wanted, limit, keep = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6]),
  tonumber(ARGV[7])
local h = redis.call('HMGET', KEYS[1], rank, 'total')
local before, claim_before, number_before = string.match(h[1] or '0 0 0', '(%d+) (%d+) (%d+)')
claim_before, number_before = tonumber(claim_before), tonumber(number_before)
if claim < claim_before or (claim == claim_before and number < number_before) then
  return {'stale', '0'}
end
local others = tonumber(h[2] or '0') - before
if limit >= 0 and others + held + wanted > limit then
  for _, silent in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now - keep)) do
    if silent ~= rank then
      others = others - string.match(redis.call('HGET', KEYS[1], silent) or '0', '%d+')
      redis.call('HDEL', KEYS[1], silent)
      redis.call('ZREM', KEYS[2], silent)
    end
  end
  wanted = math.max(0, math.min(wanted, limit - others - held))
end
local mine = held + wanted
redis.call('HSET', KEYS[1], rank, string.format('%d %.0f %.0f', mine, claim, number),
  'total', others + mine)
redis.call('ZADD', KEYS[2], now, rank)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, keep) end
return {'ok', wanted}
"""
"""Report a rank's sessions of a tenant, and ask for places: rank, claim, number of the report,
sessions, places, limit (-1: none), milliseconds. Returns the number of places, which count from
here on. Where too few are left, ranks that have been silent for so long are forgotten."""

_SHA = {text: sha1(text.encode(), usedforsecurity=False).hexdigest() for text in (RATES, REPORT)}
_CONNECTIONS = 4  # at most, to each server


class Rates(NamedTuple):
    """An answer of `RATES`."""

    admitted: int
    requests: float
    tokens: float


@dataclass(frozen=True, slots=True)
class Command:
    """One run of a script on a tenant's keys."""

    script: str
    tenant: str
    arguments: tuple[str | int | float, ...]


class QuotaServer:
    """The Redis in which the ranks of one run count quotas, as one rank's event loop uses it."""

    def __init__(self, url: str, run: str, rank: int, claim: int, *, timeout: float = 1.0) -> None:
        """``claim`` is the number of this process's claim of the rank; reports of processes with a
        lower one are refused from its first report on. ``timeout``: seconds after which a
        connection counts as dead; the caller ends a command earlier."""
        self.rank = rank
        self._prefix = f"any-agent:{{{run}/tenant-"
        self._claim = claim
        self._reports = 0
        self._client = connect_async(url, timeout=timeout, connections=_CONNECTIONS)

    def rates(
        self, tenant: str, *, per_second: float, wanted: int, tokens_per_second: float, spent: float
    ) -> Command:
        """Return the command that charges requests and tokens; a rate of 0 is no limit."""
        return Command(RATES, tenant, (per_second, wanted, tokens_per_second, spent))

    def report(
        self, tenant: str, *, held: int, wanted: int, limit: int | None, keep: float
    ) -> Command:
        """Return the command that reports the sessions held here, and asks for further places."""
        self._reports += 1
        most = -1 if limit is None else limit
        here = (self.rank, self._claim, self._reports)
        return Command(REPORT, tenant, (*here, held, wanted, most, int(keep * 1000)))

    async def run(self, commands: Sequence[Command]) -> list[Any]:
        """Run the commands in one round trip; return `Rates`, or the number of places.

        Raises one of `redis_client.FAILURES`; some of the commands may have been run then.
        """
        answers = await self._send(commands, "EVALSHA")
        unknown = [k for k, each in enumerate(answers) if isinstance(each, NoScriptError)]
        if unknown:
            # The server has been restarted: it learns the scripts from these.
            again = await self._send([commands[k] for k in unknown], "EVAL")
            for k, answer in zip(unknown, again, strict=True):
                answers[k] = answer
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return [_parsed(*pair) for pair in zip(commands, answers, strict=True)]

    async def _send(self, commands: Sequence[Command], by: str) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for each in commands:
            tag = f"{self._prefix}{each.tenant}}}"
            keys = [f"{tag}:rates"] if each.script is RATES else [f"{tag}:open", f"{tag}:heard"]
            script = each.script if by == "EVAL" else _SHA[each.script]
            pipeline.execute_command(by, script, len(keys), *keys, *each.arguments)
        answers: list[Any] = await pipeline.execute(raise_on_error=False)
        return answers

    async def disconnect(self) -> None:
        """Close the connections; later commands open new ones, and a cluster is looked at again."""
        if isinstance(self._client, Redis):
            await self._client.connection_pool.disconnect()
        else:
            await self._client.aclose()

    async def close(self) -> None:
        await self._client.aclose()


def _parsed(command: Command, answer: Any) -> Any:
    if command.script is RATES:
        return Rates(int(answer[0]), float(answer[1]), float(answer[2]))
    if answer[0] == b"stale":
        raise RedisError("another process reports this rank's sessions")
    return int(answer[1])
