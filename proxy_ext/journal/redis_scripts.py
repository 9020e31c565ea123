"""The scripts by which a rank's log in Redis changes: each is atomic, and knows who may do it.

Keys, both in one slot of a cluster::

    any-agent:{RUN/rank-N}:head   hash   owner     the process that may write; others are refused
                                         until     its lease's end, by the server's clock, in ms
                                         turn      changes whenever what was sent before must not
                                                   count any more, should it only arrive now
                                         home      the machine and file that have all of it
                                         run       a random id, which the journal's file has, too
                                         schema    the version of the journal's tables
                                         seq       the number of the last commit
                                         snapshot  the name of the newest snapshot
                                         base      the number of the last commit that it has
    any-agent:{RUN/rank-N}:log    stream  seq-turn -> d: the commit's lines, msgpack

Those that free memory, or need none to speak of, also run when the server has no more.
"""

from __future__ import annotations

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""
_OURS = """
local h = redis.call('HMGET', KEYS[1], 'owner', 'turn', 'seq', 'base')
if h[1] ~= ARGV[1] then return {h[1] and 'fenced' or 'missing', '0'} end
"""

CLAIM = f"""#!lua flags=allow-oom
{_NOW}
local h = redis.call('HMGET', KEYS[1], 'owner', 'until', 'turn')
if h[1] and h[1] ~= ARGV[1] and h[1] ~= ARGV[2] and tonumber(h[2]) > now then
  return {{h[1], tonumber(h[2]) - now}}
end
local turn = string.format('%.0f', math.max(now, tonumber(h[3] or '0') + 1))
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'until', now + ARGV[3], 'turn', turn)
return redis.call('HGETALL', KEYS[1])
"""
"""Take the lease: owner, an owner that is known to be dead, milliseconds. Returns the head, or the
owner that has it and the milliseconds that are left."""

APPEND = f"""#!lua
{_NOW}{_OURS}
if h[2] ~= ARGV[2] or tonumber(h[3]) ~= ARGV[3] - 1 then return {{'behind', h[2]}} end
redis.call('XADD', KEYS[2], ARGV[3] .. '-' .. ARGV[2], 'd', ARGV[5])
redis.call('HSET', KEYS[1], 'seq', ARGV[3], 'until', now + ARGV[4])
return {{'ok', ARGV[2]}}
"""
"""Append a commit: owner, turn, number, milliseconds of the lease, lines. `behind` has the turn."""

RETRACT = f"""#!lua flags=allow-oom
{_OURS}
if h[2] ~= ARGV[2] then return {{'ok', h[2]}} end
if redis.call('XDEL', KEYS[2], ARGV[3] .. '-' .. ARGV[2]) == 1 then
  redis.call('HSET', KEYS[1], 'seq', ARGV[3] - 1)
end
local turn = string.format('%.0f', h[2] + 1)
redis.call('HSET', KEYS[1], 'turn', turn)
return {{'ok', turn}}
"""
"""Undo an append that got no answer: owner, turn, number. Returns a new turn: should the append, or
this, only arrive then, it does nothing."""

RENEW = f"""#!lua flags=allow-oom
{_NOW}{_OURS}
redis.call('HSET', KEYS[1], 'until', now + ARGV[2])
return {{'ok', h[2]}}
"""
"""Renew the lease, or end it: owner, milliseconds."""

SNAPSHOT = f"""#!lua flags=allow-oom
{_OURS}
if tonumber(h[4] or '0') > tonumber(ARGV[2]) then return {{'ok', h[2]}} end
redis.call('HSET', KEYS[1], 'base', ARGV[2], 'snapshot', ARGV[3], 'schema', ARGV[4],
  'home', ARGV[5])
redis.call('XTRIM', KEYS[2], 'MINID', '=', string.format('%.0f-0', ARGV[2] + 1))
return {{'ok', h[2]}}
"""
"""Record a snapshot, and drop the commits that it has: owner, number, name, schema, home."""

SEED = f"""#!lua
{_NOW}
local h = redis.call('HMGET', KEYS[1], 'owner', 'turn')
if h[1] and h[1] ~= ARGV[1] then return {{'fenced', '0'}} end
if h[1] and h[2] ~= ARGV[8] then return {{'behind', h[2]}} end
local turn = string.format('%.0f', math.max(now, ARGV[8] + 1))
redis.call('HSET', KEYS[1], 'owner', ARGV[1], 'seq', ARGV[2], 'base', ARGV[2],
  'snapshot', ARGV[3], 'schema', ARGV[4], 'home', ARGV[5], 'run', ARGV[6],
  'until', now + ARGV[7], 'turn', turn)
redis.call('DEL', KEYS[2])
return {{'ok', turn}}
"""
"""Begin the log anew: as SNAPSHOT, then run, milliseconds, turn. Returns a turn."""
