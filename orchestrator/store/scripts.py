"""The Lua scripts of the session log: each compares, then acts, in one atomic step inside Redis."""

from __future__ import annotations

import hashlib
from enum import IntEnum
from functools import cache, lru_cache
from typing import TypeAlias

# Keys of a session share the hash tag {SESSION}, so that they lie in one slot of a cluster:
#
#     specwire:{SESSION}:meta      hash: record (JSON), prompt (its length in tokens), state (running, ended, deleted),
#                                  fence, owner, claimed_us, ttl_ms, retention_ms, cancelled, once it
#                                  is read elsewhere than at its owner's read_us, once it has ended reason, text_length,
#                                  ended_us, once somebody could not read it damaged, and of a session that reports
#                                  log-probabilities 0, 1, 2, ...: those of each token, counted behind the prompt
#     specwire:{SESSION}:tokens    4 bytes each, prompt first
#     specwire:{SESSION}:outcomes  1 byte each, after the prompt
#
# Beside them, each in a slot of its own:
#
#     specwire:request:HASH        the session that a request id is bound to, the digest of its request (or -), and when
#                                  it was bound, with spaces between them
#     specwire:secret              what the seeds of requests with an id are made with
#     specwire:running:HASH        a model's roll: a sorted set of running sessions by when they are missed
#     specwire:ping:NUMBER         written again and again, to see whether a server takes writes
#
# Every script in which an owner writes sets the time to live of all three, so that what is left of it tells how long
# the owner has been silent. Of a deleted session state and fence stay. Instants are Redis time in microseconds. Fences
# are compared as numbers below 2^53 (Redis time in microseconds reaches that in the year 2255), which a Lua number
# holds exactly.


Reply: TypeAlias = list[object]


class ScriptAnswer(IntEnum):
    """First element of every script's reply."""

    OK = 0
    MISSING = 1
    FENCED = 2
    MISMATCH = 3
    GAP = 4
    EXISTS = 5
    DELETED = 6
    CHANGED = 7


# What Lua makes of a damaged lifetime.
LIFETIME_MS = 3_600_000
NO_DIGEST = "-"
# The fence of a deleted session's log: higher than any owner's, whatever clock gave that.
LAST_FENCE = (1 << 53) - 1
SECRET_KEY = "specwire:secret"


# Sessions whose keys are kept: each append asks for them.
KEYS_KEPT = 1024


@lru_cache(maxsize=KEYS_KEPT)
def session_keys(session_id: str) -> tuple[str, str, str]:
    tag = f"specwire:{{{session_id}}}"
    return f"{tag}:meta", f"{tag}:tokens", f"{tag}:outcomes"


def request_key(tenant: str, request_id: str) -> str:
    """Hashed, so that no two pairs of strings share a key."""
    name = f"{len(tenant)}:{tenant}{request_id}".encode()
    return f"specwire:request:{hashlib.sha256(name).hexdigest()}"


def roll_key(roll: str) -> str:
    return f"specwire:running:{hashlib.sha256(roll.encode()).hexdigest()}"


def ping_key(number: int) -> str:
    return f"specwire:ping:{number}"


# Everything is computed before anything is written: so a damaged value makes the script fail without a change. A fence
# is the time in microseconds, by Redis' clock or by the claimer's, whichever is ahead: so claims have their order even
# where Redis lost one of them. It rises above the newest that is known where both clocks are behind that; `step` then
# tells the next claim from a lost one.
NEXT_FENCE = """
local function whole(text)
  local number = tonumber(text)
  if number and number >= 0 and number <= 9007199254740991 then return number end
  return nil
end
local function now_us()
  local now = redis.call('TIME')
  return now[1] * 1000000 + now[2]
end
local function decimal(number) return string.format('%.0f', number) end
local function next_fence(newest, clock, step)
  local now = math.max(now_us(), clock)
  return decimal(now > newest and now or newest + 1 + step)
end
"""

# A damaged lifetime must not leave a key without any.
EXPIRE_ALL = f"""
local function lifetime(text)
  local number = whole(text)
  if number and number >= 1 then return decimal(number) end
  return {LIFETIME_MS}
end
local function expire_all(text)
  for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, lifetime(text)) end
end
"""

# What is reported of tokens comes last in ARGV, one element per token, if anything is: ARGV[first] is of the token with
# this index. They have no key of their own: a key that most sessions lack would hold up a cluster's migration.
ADD_LOGPROBS = """
local function add_logprobs(first, index)
  for each = first, #ARGV do redis.call('HSET', KEYS[1], index + each - first, ARGV[each]) end
end
"""

# Bytes of a string; for another type a size that no log has.
SIZE = """
local function size(key)
  local bytes = redis.pcall('STRLEN', key)
  return type(bytes) == 'number' and bytes or -1
end
"""

# APPEND to a key that does not exist creates it; an empty value would leave no key, which reads as empty. Redis asks
# whether it is out of memory before a script's first write only, and not at all before one that frees some: so what
# needs memory comes first.
WRITE_LOG = """
local function write_log(record, prompt, owner, ttl_ms, retention_ms, tokens, outcomes, fence, cancelled)
  redis.call('HSET', KEYS[1], 'fence', fence)
  redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
  redis.call('HSET', KEYS[1], 'record', record, 'prompt', prompt, 'state', 'running', 'fence', fence, 'owner', owner,
    'claimed_us', decimal(now_us()), 'ttl_ms', ttl_ms, 'retention_ms', retention_ms, 'cancelled', cancelled)
  redis.call('APPEND', KEYS[2], tokens)
  if #outcomes > 0 then redis.call('APPEND', KEYS[3], outcomes) end
end
"""

# The third element is what is left of the time to live, in milliseconds; the fourth field is what it was set to.
# `skipped` tokens of the output are left out, and with them record and prompt; nil for none.
SNAPSHOT = """
local function logprobs(skipped)
  local told = {}
  if redis.call('HEXISTS', KEYS[1], '0') == 0 then return told end
  for index = skipped, redis.call('STRLEN', KEYS[3]) - 1 do
    told[#told + 1] = redis.call('HGET', KEYS[1], index)
  end
  return told
end
local function snapshot(skipped)
  local ended = redis.call('HEXISTS', KEYS[1], 'reason') == 1
  local fields = redis.call('HMGET', KEYS[1], skipped and 'prompt' or 'record', 'fence', 'owner',
    ended and 'retention_ms' or 'ttl_ms', 'claimed_us', 'cancelled', 'reason', 'text_length', 'ended_us',
    'retention_ms')
  local first = skipped and ((whole(fields[1]) or 0) + skipped) * 4 or 0
  return {0, fields, redis.call('PTTL', KEYS[1]), redis.call('GETRANGE', KEYS[2], first, -1),
    redis.call('GETRANGE', KEYS[3], skipped or 0, -1), logprobs(skipped or 0), redis.call('STRLEN', KEYS[2])}
end
"""

# ARGV: record, prompt length, owner, ttl_ms, retention_ms, prompt tokens. Reply: {OK, fence} or {EXISTS}.
CREATE = f"""{NEXT_FENCE}{EXPIRE_ALL}{WRITE_LOG}
if redis.call('EXISTS', KEYS[1]) == 1 then return {{5}} end
local fence = next_fence(0, 0, 0)
write_log(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], '', fence, 0)
expire_all(ARGV[4])
return {{0, fence}}
"""

# ARGV: record, prompt length, owner, ttl_ms, retention_ms, tokens with the prompt, outcomes, fence, cancelled, logprobs
# ... Reply: {OK}, {FENCED, the fence held} or {MISMATCH}. The highest fence wins. The text only grows, whoever wins,
# unless the log is damaged: what it holds may have been shown, by an owner whose claim came later on a log that had
# lost this one's, or by this call's owner if the call comes late. So a promised end stays, too.
RECREATE = f"""{NEXT_FENCE}{EXPIRE_ALL}{SIZE}{ADD_LOGPROBS}{WRITE_LOG}
local held = redis.pcall('HMGET', KEYS[1], 'fence', 'reason', 'cancelled', 'damaged')
if held.err then
  redis.call('DEL', KEYS[1])
  held = {{}}
end
local tokens, outcomes, fence = ARGV[6], ARGV[7], ARGV[8]
local cancelled = (held[3] == '1' or ARGV[9] == '1') and 1 or 0
if held[1] and (whole(held[1]) or 0) > tonumber(fence) then return {{2, held[1]}} end

local length = size(KEYS[2])
local count = length / 4 - ARGV[2]
local is_whole = size(KEYS[3]) == count and not held[4]
if held[1] and is_whole then
  local overlap = math.min(length, #tokens)
  if redis.call('GETRANGE', KEYS[2], 0, overlap - 1) ~= string.sub(tokens, 1, overlap) then return {{3}} end
  if #tokens > overlap then
    if held[2] then return {{3}} end
    redis.call('APPEND', KEYS[2], string.sub(tokens, overlap + 1))
    redis.call('APPEND', KEYS[3], string.sub(outcomes, count + 1))
    add_logprobs(10 + count, count)
  end
  redis.call('HSET', KEYS[1], 'fence', fence, 'owner', ARGV[3], 'ttl_ms', ARGV[4], 'retention_ms', ARGV[5],
    'cancelled', cancelled)
  if held[1] ~= fence then redis.call('HSET', KEYS[1], 'claimed_us', decimal(now_us())) end
else
  write_log(ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tokens, outcomes, fence, cancelled)
  add_logprobs(10, 0)
end
expire_all(is_whole and held[2] and ARGV[5] or ARGV[4])
return {{0}}
"""

# ARGV: owner, the fence and the record that were read, the newest fence and the time that the claimer knows, and a
# random step. Reply: the snapshot under the new fence, {CHANGED} where fence or record have changed, or {MISSING}: a
# lost log is not claimed, its tokens are unknown.
CLAIM = f"""{NEXT_FENCE}{EXPIRE_ALL}{SNAPSHOT}
local held = redis.call('HMGET', KEYS[1], 'record', 'fence', 'ttl_ms', 'reason')
if not held[1] then return {{1}} end
if held[1] ~= ARGV[3] or held[2] ~= ARGV[2] then return {{7}} end
local newest = math.max(whole(held[2]) or 0, whole(ARGV[4]) or 0)
local fence = next_fence(newest, whole(ARGV[5]) or 0, whole(ARGV[6]) or 0)
redis.call('HSET', KEYS[1], 'fence', fence, 'owner', ARGV[1], 'claimed_us', decimal(now_us()))
redis.call('HDEL', KEYS[1], 'damaged')
if not held[4] then expire_all(held[3]) end
return snapshot()
"""

# A write that changes nothing: WAIT covers what stood before the connection's last write, so that once it is satisfied
# replicas have all that was read. A key without a time to live gets one.
SETTLED = f"""{EXPIRE_ALL}
local function settled(seen)
  local left = redis.call('PTTL', KEYS[1])
  if left < 0 then
    local ended = redis.call('HEXISTS', KEYS[1], 'reason') == 1
    expire_all(redis.call('HGET', KEYS[1], ended and 'retention_ms' or 'ttl_ms'))
  else
    redis.call('PEXPIRE', KEYS[1], math.max(1, left))
  end
  return seen
end
"""


def _reading(reply: str, more: str = "") -> str:
    return f"""{NEXT_FENCE}{SNAPSHOT}{more}
if redis.call('HGET', KEYS[1], 'state') == 'deleted' then return {{6}} end
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return {{1}} end
return {reply}
"""


# Reply: the snapshot, {MISSING} or {DELETED}. Of a tail, ARGV: tokens of the output that are left out; its snapshot is
# without record and prompt.
READ = _reading("snapshot()")
TAIL = _reading("snapshot(tonumber(ARGV[1]))")
READ_SETTLED = _reading("settled(snapshot())", SETTLED)
TAIL_SETTLED = _reading("settled(snapshot(tonumber(ARGV[1])))", SETTLED)

# ARGV: fence, position, tokens, outcomes, reason (empty: not to finish), text_length, logprobs ...
# Reply: {OK, length, cancelled, microseconds since it was read elsewhere or -1}, {MISSING}, {FENCED, the fence held},
# {MISMATCH} or {GAP, length}. A failed append changes nothing. A log of which only a part is left (evicted, in an unfit
# Redis), or that nobody can read, has a gap from its start.
APPEND = f"""{NEXT_FENCE}{EXPIRE_ALL}{SIZE}{ADD_LOGPROBS}
local meta = redis.pcall('HMGET', KEYS[1], 'fence', 'ttl_ms', 'cancelled', 'reason', 'text_length', 'prompt',
  'retention_ms', 'damaged', 'read_us')
if meta.err then return {{4, 0}} end
if not meta[1] then return {{1}} end
if meta[1] ~= ARGV[1] then return {{2, meta[1]}} end
local length, prompt = size(KEYS[2]), whole(meta[6])
local start, tokens, reason = ARGV[2] * 4, ARGV[3], ARGV[5] ~= '' and ARGV[5]
if meta[8] or not prompt or size(KEYS[3]) ~= length / 4 - prompt then return {{4, 0}} end
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
  redis.call('HSET', KEYS[1], 'state', 'ended', 'reason', reason, 'text_length', ARGV[6], 'ended_us', decimal(now_us()))
end
if fresh > 0 then
  length = redis.call('APPEND', KEYS[2], string.sub(tokens, overlap + 1))
  redis.call('APPEND', KEYS[3], string.sub(ARGV[4], overlap / 4 + 1))
  add_logprobs(7 + overlap / 4, (start + overlap) / 4 - prompt)
end
if reason or meta[4] then expire_all(meta[7]) else expire_all(meta[2]) end
local read_us = whole(meta[9])
return {{0, length / 4, tonumber(meta[3]) or 0, read_us and math.max(0, now_us() - read_us) or -1}}
"""

# Mark it as unreadable: its owner, if it lives, has all of it, and learns this with its next append.
DAMAGED = """
if redis.call('HEXISTS', KEYS[1], 'record') == 1 then redis.call('HSET', KEYS[1], 'damaged', 1) end
return {0}
"""

# Reply: {OK} or {MISSING}.
CANCEL = """
if redis.call('HEXISTS', KEYS[1], 'record') == 0 then return {1} end
redis.call('HSET', KEYS[1], 'cancelled', 1)
return {0}
"""

# Reply: {OK}.
NOTE_READER = f"""{NEXT_FENCE}
if redis.call('HGET', KEYS[1], 'state') == 'running' then
  redis.call('HSET', KEYS[1], 'read_us', decimal(now_us()))
end
return {{0}}
"""

# Reply: {OK, record, empty where it was deleted before} or {MISSING}. It frees memory, so it may go on without any. The
# fence that stays is the last one: no owner can append or recreate.
DELETE = f"""{NEXT_FENCE}{EXPIRE_ALL}
if redis.call('EXISTS', KEYS[1], KEYS[2], KEYS[3]) == 0 then return {{1}} end
local held = redis.call('HMGET', KEYS[1], 'record', 'ttl_ms', 'state')
if held[3] == 'deleted' then return {{0, ''}} end
redis.call('DEL', KEYS[1], KEYS[2], KEYS[3])
redis.call('HSET', KEYS[1], 'state', 'deleted', 'fence', '{LAST_FENCE}')
redis.call('PEXPIRE', KEYS[1], lifetime(held[2]))
return {{0, held[1] or ''}}
"""

# KEYS: a key of its own. It shows that scripts may run and write, not only that somebody answers.
PING = """
redis.call('SET', KEYS[1], '1', 'PX', 60000)
return {0}
"""


# ----------------------------------------------------------------------------------------------------------------------
# The Lua scripts of what stands beside the logs, each key in a slot of its own: request ids, a secret, rolls.

# What a request's key holds. An unreadable value stands for a session that does not exist.
HELD = f"""
local value = redis.call('GET', KEYS[1])
local session, digest, bound_us
if value then
  session, digest, bound_us = string.match(value, '^(%S+) (%S+) (%d+)$')
  if not session then session, digest, bound_us = value, '{NO_DIGEST}', '0' end
end
"""

# KEYS: the request's key. ARGV: session id, ttl_ms, digest, a session that has no log, and for how many microseconds
# after the binding that is normal. Reply: {OK, the session that it stands for, its digest}. What is bound again has
# begun.
BIND = f"""{NEXT_FENCE}{HELD}
if session == ARGV[1] then
  if bound_us ~= '0' then redis.call('SET', KEYS[1], session .. ' ' .. digest .. ' 0', 'KEEPTTL') end
  redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), ARGV[2]))
  return {{0, session, digest}}
end
-- A binding of a later time than now was made before Redis' clock was set back.
local age_us = now_us() - (bound_us or 0)
if session and not (session == ARGV[4] and (age_us > tonumber(ARGV[5]) or age_us < 0)) then
  return {{0, session, digest}}
end
redis.call('SET', KEYS[1], ARGV[1] .. ' ' .. ARGV[3] .. ' ' .. decimal(now_us()), 'PX', ARGV[2])
return {{0, ARGV[1], ARGV[3]}}
"""

# KEYS: the request's key. Reply: {OK, the session that it stands for, its digest} or {MISSING}.
BOUND = f"""{HELD}
if not session then return {{1}} end
return {{0, session, digest}}
"""

# KEYS: the request's key. ARGV: session id. Reply: {OK}.
UNBIND = f"""{HELD}
if session == ARGV[1] then redis.call('DEL', KEYS[1]) end
return {{0}}
"""

# KEYS: the secret's key. ARGV: what it is unless there is one, ttl_ms. Reply: {OK, the secret}. A secret of another
# length is replaced.
SECRET = """
local held = redis.call('GET', KEYS[1])
if not held or #held ~= #ARGV[1] then
  held = ARGV[1]
  redis.call('SET', KEYS[1], held)
end
redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), ARGV[2]))
return {0, held}
"""

# KEYS: a roll. ARGV: within_ms, ttl_ms, session ids ... Reply: {OK}.
CALL_ROLL = f"""{NEXT_FENCE}
local missed = decimal(now_us() / 1000 + ARGV[1])
for each = 3, #ARGV do redis.call('ZADD', KEYS[1], missed, ARGV[each]) end
redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), ARGV[2]))
return {{0}}
"""

# KEYS: a roll. ARGV: session ids ... Reply: {OK}.
STRIKE = """
for each = 1, #ARGV do redis.call('ZREM', KEYS[1], ARGV[each]) end
return {0}
"""

# KEYS: a roll. ARGV: again_ms, most. Reply: {OK, session ids}. Members that are no session ids are removed.
MISSED = f"""{NEXT_FENCE}
local now, told = now_us() / 1000, {{}}
for _, session in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', decimal(now), 'LIMIT', 0, ARGV[2])) do
  if string.match(session, '^[%w_-]+$') then
    redis.call('ZADD', KEYS[1], decimal(now + ARGV[1]), session)
    told[#told + 1] = session
  else
    redis.call('ZREM', KEYS[1], session)
  end
end
return {{0, told}}
"""

# ----------------------------------------------------------------------------------------------------------------------
# What their callers need to know of them.

OF_LOGS = (CREATE, RECREATE, CLAIM, READ, READ_SETTLED, TAIL, TAIL_SETTLED, APPEND, DAMAGED, CANCEL, NOTE_READER)
ALL = (*OF_LOGS, DELETE, BIND, BOUND, UNBIND, SECRET, CALL_ROLL, STRIKE, MISSED, PING)
READ_ONLY = frozenset({READ, TAIL, BOUND})
# Whose callers repeat them where there is no answer.
REPEATED = frozenset({APPEND, CALL_ROLL, STRIKE})


@cache
def sha_of(script: str) -> str:
    """What Redis calls it by."""
    return hashlib.sha1(script.encode(), usedforsecurity=False).hexdigest()
