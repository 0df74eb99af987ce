-- The files of this folder are put in front of every script, in the order in which scripts.py names them, with the
-- lines `local OLDEST, NEWEST = <versions that this program reads>` above. KEYS[1] is the prefix "<namespace>:{0}:": the literal hash tag {0} keeps every
-- key of a partition in one slot. ARGV[1] is the command as JSON, ARGV[2] its not_after in ledger ms (empty: exempt).
-- Answers are JSON. Lists that may be empty, 64-bit numbers and prompts travel as opaque strings, because cjson turns
-- [] into {} and loses integers above 2^53.
--
-- Keys (after the prefix):
--   clock           hash    time: ledger ms; last: TIME at the last advance; scan: ledger ms of the last scan;
--                           version: how everything below, and messages between nodes, are written (see versions.py)
--   seq             string  counter of admissions
--   rec:{uid}       hash    the record; PEXPIRE only after its end, and from then without prompt, sampling and salt. Besides what its name says:
--                             stamped  1: its sequence is in the prefill node's running step
--                             losses   losses of a node that did not count as failures
--                             overloads, overload_at  attempts in a row that ended as overload, at this length of the
--                                                     answer
--                             overloaded  1: that is what it FAILED of
--                             suspect  length of the answer up to which it is a suspect; 0: it is none
--                             shunned, shunned_prefill, shunned_until  a decode and a prefill node that it keeps away
--                                                     from, and till when (ledger ms)
--                             logprobs  1: each output token comes with its logprobs
--                             group    uid of the first record of its request, where that has several; theirs are
--                                      {group}.1, {group}.2, …, and they go together
--                             choices, left, ended_as  of the first one: how many they are, how many are in process, and
--                                      the end that one of them brought on all, if not all have FINISHED
--                             key, body               its idempotency key, and the hash of what was asked for
--                             salt     only requests with the same one share cached KV; goes with the prompt
--                             cached_tokens  of the prompt, not computed by the attempt that drew the first token
--   tok:{uid}       list    output tokens: O(1) length and append, whatever the answer's length
--   lp:{uid}        list    of each output token its logprobs, opaque; only where the record has `logprobs`
--   watch:{uid}     set     "web:connection" of those who want its events; none: the uid is in `unwatched`
--   unwatched       zset    uids in process that nobody watches, by the ledger ms at which they are aborted
--   guard:{client}  string  uid that is in process under this client id (of a group the first); no TTL meanwhile, deleted by compare on the
--                           uid. After a FINISHED one it may stay for its deduplication window (PEXPIRE)
--   latest:{client} string  uid of the newest record of this client id
--   idem:{key}      string  uid of the newest record with this idempotency key; PEXPIRE together with that record
--   queue           zset    QUEUED uids by admission number
--   waiters         zset    PREFILLING uids that still need a decode lease, by admission number
--   deadlines       zset    uid by the ledger ms at which its state times out
--   rings           zset    QUEUED uids by the ledger ms of their next bell
--   fence:{fence}   string  uid claimed with this fence, so that a repeated claim finds it; PEXPIRE only after the end
--   lease:{id}      hash    uid, attempt, fence, node, state, blocks, at; PEXPIRE only after its end
--   leases          zset    open lease ids by ledger ms of their reservation
--   nodes           zset    incarnation by the ledger ms until which it counts as fresh; -1: declared dead
--   node:{inc}      hash    info and gauges (JSON), state, role, name, address, model, layout, num_blocks, ttl,
--                           heartbeat, cursor, newest (version that it reads), suspect (uid of the one suspect that it
--                           holds)
--   room:{role}     zset    incarnations of prefill, of decode nodes that are not declared dead, by the tokens that
--                           their pools can hold; without those that name no size
--   model_nodes     set     incarnations of web, prefill and decode nodes that are not declared dead
--   owned:{inc}     zset    "c:uid" claims, "l:lease" leases, "w:uid:connection" watchers, by ledger ms of acquisition
--   avoided         zset    "prefill:decode" incarnations that failed each other, by the ledger ms until which they are
--                           kept apart; it stays for a minute longer, so that the next time is seen to be the next
--   avoided_times   hash    how often in a row, for each member of `avoided`
--   events:{web}    stream  one field e: an event as JSON; wakes the web process up
--   tombstones      zset    uids aborted before their admission came, by the ledger ms of their expiry
--   exited          zset    incarnations whose exit was reported, by the ledger ms of their expiry

local P = KEYS[1]
local cmd = cjson.decode(ARGV[1])
local not_after = tonumber(ARGV[2])
local now = 0
local VERSION = NEWEST      -- of the data; known once the clock was read

local WALK = 64             -- candidates looked at per walk
local PASSED_OVER_MS = 2000 -- waiting longer than this, a request is not passed any more
local RING_MS = 1000        -- first pause between bells; doubles up to RING_MAX_MS
local RING_MAX_MS = 8000
local PER_KIND = 128        -- of each kind of work per scan, so that a scan never blocks the server for long
local CLOSED_TTL_MS = 600000 -- a closed lease or used fence is remembered this long for repeated calls
local STONE_MS = 600000     -- a tombstone outlives every not_after (5 s) by far
local MOST_OVERLOADS = 30   -- attempts in a row that end as overload without a token; each further one is a failure
local MOST_LOSSES = 5       -- from this many on, a node's loss that would not count does
local SUSPECT_TOKENS = 16   -- a suspect is trusted again after this many more tokens
local AVOID_MS = 2000       -- first time that a pair is kept apart; doubles AVOID_DOUBLINGS times
local AVOID_DOUBLINGS = 2
local AVOID_MEMORY_MS = 60000 -- after its time a pair is remembered this long
local EVENTS_MAXLEN = 100000
local PUSH = 1000           -- arguments per RPUSH; Lua's stack takes no more than some thousands

local function int(n) return string.format('%.0f', n) end

local wall
local function wall_ms()
  if not wall then
    local t = redis.call('TIME')
    wall = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
  end
  return wall
end

-- Ledger time starts at the server's clock, so that it does not run backwards when all data were lost. Whoever comes
-- first after that says the version too: it need not be a process that connects.
local function start_clock()
  local t = wall_ms()
  redis.call('HSET', P .. 'clock', 'time', t, 'last', t, 'scan', -1, 'version', NEWEST)
  return t
end

-- Data of a version that this program does not read are not touched, whatever the call.
local function check_version(version)
  VERSION = tonumber(version) or 0
  if VERSION < OLDEST or VERSION > NEWEST then error({ err = 'FOREIGN ' .. (version or 'unknown') }) end
end

local function read_clock()
  local c = redis.call('HMGET', P .. 'clock', 'time', 'version')
  if not c[1] then return start_clock() end
  check_version(c[2])
  return tonumber(c[1])
end

-- Rule 9: a frozen or stepped clock moves ledger time by a second at most, a clock set back by nothing.
local function advance_clock()
  local c = redis.call('HMGET', P .. 'clock', 'time', 'last', 'version')
  if not c[1] then return start_clock() end
  check_version(c[3])
  local t = tonumber(c[1]) + math.max(0, math.min(wall_ms() - tonumber(c[2]), 1000))
  redis.call('HSET', P .. 'clock', 'time', t, 'last', wall_ms())
  return t
end

-- Rule 2: what arrives after its not_after changes nothing.
local function late() return not_after ~= nil and now > not_after end

local function answer(t)
  t.time_ms = now
  return cjson.encode(t)
end
