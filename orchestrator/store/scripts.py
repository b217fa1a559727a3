"""The Lua scripts of the session log: each compares, then acts, in one atomic step inside Redis.

Keys of a session share the hash tag {SESSION}, so that they lie in one slot of a cluster:

    specwire:{SESSION}:meta      hash: record, prompt (its length in tokens), fence, owner, ttl_ms, cancelled,
                                 reason and text_length once it has ended
    specwire:{SESSION}:tokens    4 bytes each, prompt first
    specwire:{SESSION}:outcomes  1 byte each, after the prompt

Every script that writes sets the time to live of all three. Fences are compared as numbers below 2^53 (Redis time in
microseconds reaches that in the year 2255), which a Lua number holds exactly.
"""

from __future__ import annotations

import hashlib
from enum import IntEnum


class Answer(IntEnum):
    """First element of every script's reply."""

    OK = 0
    MISSING = 1
    FENCED = 2
    MISMATCH = 3
    GAP = 4
    EXISTS = 5


def session_keys(session_id: str) -> tuple[str, str, str]:
    tag = f"specwire:{{{session_id}}}"
    return f"{tag}:meta", f"{tag}:tokens", f"{tag}:outcomes"


def request_key(tenant: str, request_id: str) -> str:
    """Hashed, so that no choice of the two strings can meet another pair's key."""
    name = f"{len(tenant)}:{tenant}{request_id}".encode()
    return f"specwire:request:{hashlib.sha256(name).hexdigest()}"


# fence = max(old + 1, Redis time in microseconds): it rises, and it does so even where Redis lost the old one.
NEXT_FENCE = """
local function next_fence(old)
  local now = redis.call('TIME')
  return string.format('%.0f', math.max(old + 1, now[1] * 1000000 + now[2]))
end
"""

EXPIRE_ALL = """
local function expire_all(ttl_ms)
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, ttl_ms) end
end
"""

# APPEND to a key that does not exist creates it; an empty value would leave no key, which reads as empty.
WRITE_LOG = """
local function write_log(record, prompt, fence, owner, ttl_ms, tokens, outcomes)
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
  redis.call('HSET', KEYS[1], 'record', record, 'prompt', prompt, 'fence', fence, 'owner', owner, 'ttl_ms', ttl_ms,
    'cancelled', 0)
  redis.call('APPEND', KEYS[2], tokens)
  if #outcomes > 0 then redis.call('APPEND', KEYS[3], outcomes) end
end
"""

SNAPSHOT = """
local function snapshot()
  return {0, redis.call('HMGET', KEYS[1], 'record', 'fence', 'owner', 'reason', 'text_length', 'cancelled'),
    redis.call('GET', KEYS[2]) or '', redis.call('GET', KEYS[3]) or ''}
end
"""

# ARGV: record, prompt length, owner, ttl_ms, prompt tokens. Reply: {OK, fence} or {EXISTS}.
CREATE = f"""{NEXT_FENCE}{EXPIRE_ALL}{WRITE_LOG}
if redis.call('EXISTS', KEYS[1]) == 1 then return {{5}} end
local fence = next_fence(0)
write_log(ARGV[1], ARGV[2], fence, ARGV[3], ARGV[4], ARGV[5], '')
expire_all(ARGV[4])
return {{0, fence}}
"""

# ARGV: record, prompt length, owner, ttl_ms, tokens with the prompt, outcomes, fence. Reply: {OK} or {FENCED}.
# The highest fence wins: several may still hold the lost log's text, and only the newest owner's counts.
RECREATE = f"""{EXPIRE_ALL}{WRITE_LOG}
local held = redis.call('HGET', KEYS[1], 'fence')
if held and tonumber(held) > tonumber(ARGV[7]) then return {{2}} end
write_log(ARGV[1], ARGV[2], ARGV[7], ARGV[3], ARGV[4], ARGV[5], ARGV[6])
expire_all(ARGV[4])
return {{0}}
"""

# ARGV: owner. Reply: the snapshot under the new fence, or {MISSING}: a lost log is not claimed, its tokens are unknown.
CLAIM = f"""{NEXT_FENCE}{EXPIRE_ALL}{SNAPSHOT}
local held = redis.call('HMGET', KEYS[1], 'fence', 'ttl_ms')
if not held[1] then return {{1}} end
redis.call('HSET', KEYS[1], 'fence', next_fence(held[1]), 'owner', ARGV[1])
expire_all(held[2])
return snapshot()
"""

# Reply: the snapshot or {MISSING}.
READ = f"""{SNAPSHOT}
if redis.call('EXISTS', KEYS[1]) == 0 then return {{1}} end
return snapshot()
"""

# ARGV: fence, position, tokens, outcomes, and to finish also reason and text_length.
# Reply: {OK, length, cancelled}, {MISSING}, {FENCED}, {MISMATCH} or {GAP, length}. What fails changes nothing.
APPEND = f"""{EXPIRE_ALL}
local meta = redis.call('HMGET', KEYS[1], 'fence', 'ttl_ms', 'cancelled', 'reason', 'text_length')
if not meta[1] then return {{1}} end
if meta[1] ~= ARGV[1] then return {{2}} end
local length = redis.call('STRLEN', KEYS[2])
local start, tokens, reason = ARGV[2] * 4, ARGV[3], ARGV[5]
if start > length then return {{4, length / 4}} end

-- Where the log already reaches, it must hold the same; what lies behind its end is new.
local overlap = math.min(length - start, #tokens)
if overlap > 0 and redis.call('GETRANGE', KEYS[2], start, start + overlap - 1) ~= string.sub(tokens, 1, overlap) then
  return {{3}}
end
local fresh = #tokens - overlap
if meta[4] and fresh > 0 then return {{3}} end
if reason then
  if length > start + #tokens then return {{3}} end
  if meta[4] and (meta[4] ~= reason or meta[5] ~= ARGV[6]) then return {{3}} end
  redis.call('HSET', KEYS[1], 'reason', reason, 'text_length', ARGV[6])
end
if fresh > 0 then
  length = redis.call('APPEND', KEYS[2], string.sub(tokens, overlap + 1))
  redis.call('APPEND', KEYS[3], string.sub(ARGV[4], overlap / 4 + 1))
end
expire_all(meta[2])
return {{0, length / 4, tonumber(meta[3])}}
"""

# Reply: {OK} or {MISSING}.
CANCEL = """
if redis.call('EXISTS', KEYS[1]) == 0 then return {1} end
redis.call('HSET', KEYS[1], 'cancelled', 1)
return {0}
"""

# KEYS: the request's key. ARGV: session id, ttl_ms. Reply: {OK, the session that was bound first}.
BIND = """
local held = redis.call('GET', KEYS[1])
if held then return {0, held} end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return {0, ARGV[1]}
"""

# A script too: it shows that scripts may run, not only that somebody answers.
PING = """
return {0}
"""
