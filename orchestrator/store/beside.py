"""The Lua scripts of what stands beside the logs, each key in a slot of its own: request ids, a secret, rolls."""

from __future__ import annotations

from orchestrator.store.scripts import NEXT_FENCE, NO_DIGEST

# What a request's key holds. What cannot be read as such stands for a session that nobody has.
HELD = f"""
local value = redis.call('GET', KEYS[1])
local session, digest, bound_us
if value then
  session, digest, bound_us = string.match(value, '^(%S+) (%S+) (%d+)$')
  if not session then session, digest, bound_us = value, '{NO_DIGEST}', '0' end
end
"""

# KEYS: the request's key. ARGV: session id, ttl_ms, digest, a session that has no log, for how many microseconds after
# it was bound that means nothing. Reply: {OK, the session that it stands for, its digest}. What is bound again has
# begun.
BIND = f"""{NEXT_FENCE}{HELD}
if session == ARGV[1] then
  if bound_us ~= '0' then redis.call('SET', KEYS[1], session .. ' ' .. digest .. ' 0', 'KEEPTTL') end
  redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), ARGV[2]))
  return {{0, session, digest}}
end
if session and not (session == ARGV[4] and now_us() - bound_us > tonumber(ARGV[5])) then
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

# KEYS: the secret's key. ARGV: what it is unless there is one, ttl_ms. Reply: {OK, the secret}. What has another length
# was made by nobody here.
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

# KEYS: a roll. ARGV: again_ms, most. Reply: {OK, session ids}. What is no session's id is nobody's.
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
