"""Owns what the store does inside Redis, each script in one atomic step: epochs, the lease, appending."""

from __future__ import annotations

# What a script answers when the stored epoch is the caller's.
IS_OURS = -1

# The epoch never goes back, even when Redis has lost its data: it is at least the time in microseconds, and at least
# what the opener knows of (ARGV[1]).
OPEN = """
local time = redis.call('TIME')
local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
local epoch = math.max(stored + 1, tonumber(ARGV[1]) + 1, time[1] * 1000000 + time[2])
redis.call('SET', KEYS[1], string.format('%.0f', epoch))
return epoch
"""

# ARGV: epoch of ours, name of the candidate, milliseconds, newest epoch it has heard of. Answers our new epoch (0: not
# ours), the epoch and the leader found, and the milliseconds that this leader has left.
ACQUIRE = """
local stored = tonumber(redis.call('GET', KEYS[1]) or '0')
local leader = redis.call('GET', KEYS[2])
if leader then return {0, stored, leader, redis.call('PTTL', KEYS[2])} end
if stored < tonumber(ARGV[4]) then return {0, stored, '', 0} end
local time = redis.call('TIME')
local epoch = math.max(stored + 1, tonumber(ARGV[1]) + 1, time[1] * 1000000 + time[2])
redis.call('SET', KEYS[1], string.format('%.0f', epoch))
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return {epoch, stored, ARGV[2], tonumber(ARGV[3])}
"""

# ARGV: our epoch, our name, milliseconds. Only whoever took the stored epoch ever took the lease after it, so that the
# epoch alone says whose lease it is. Answers IS_OURS, or the stored epoch when that is not ours.
RENEW = """
local stored = redis.call('GET', KEYS[1]) or '0'
if stored ~= ARGV[1] then return tonumber(stored) end
redis.call('SET', KEYS[2], ARGV[2], 'PX', ARGV[3])
return -1
"""

# ARGV: our epoch.
RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[2]) end
return -1
"""

# ARGV: our epoch, journal bound, journal text, then table number, key, value ('' forgets) for each record.
# Answers IS_OURS when it is done, or the stored epoch when that is not ours; then nothing has changed.
APPEND = """
local stored = redis.call('GET', KEYS[1]) or '0'
if stored ~= ARGV[1] then return tonumber(stored) end
for i = 4, #ARGV, 3 do
  local table_key = KEYS[2 + tonumber(ARGV[i])]
  if ARGV[i + 2] == '' then
    redis.call('HDEL', table_key, ARGV[i + 1])
  else
    redis.call('HSET', table_key, ARGV[i + 1], ARGV[i + 2])
  end
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', ARGV[2], '*', 'epoch', ARGV[1], 'keys', ARGV[3])
return -1
"""
