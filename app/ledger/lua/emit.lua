-- Appends the tokens of one emission after another; one with a finish reason ends its request in the same step (rule 8).
-- Touches: rec, lease and node hashes, tok and lp lists, watch sets, events streams, clock hash, and what end_request
-- touches. O(tokens emitted).
-- Arguments: emissions, each with uid, attempt, fence, incarnation, index, tokens, finish_reason ("" = goes on), logprobs
-- (of each token, or absent), blocks of the lease (0 = as before), cached_tokens.
-- Answers, one for each: OK | SAME | GAP | DIFFERENT | FENCED | ABORTED | LATE, with the length of the answer so far; or
-- `error`: what the server said against it. That is the fate of one emission, not of those beside it.
local function emit()
  if late() then return { status = 'LATE', length = 0 } end
  local r = load(cmd.uid)
  if not r then return { status = 'FENCED', length = 0 } end
  local have, n = length(cmd.uid), #cmd.tokens
  local stop = cmd.index + n
  local function says(status) return { status = status, length = have } end

  if r.state == 'ABORTED' then return says('ABORTED') end
  if r.attempt ~= cmd.attempt or r.fence ~= cmd.fence or r.owner ~= cmd.incarnation then return says('FENCED') end
  local function overlap_is_same()
    local upto = math.min(have, stop)
    if upto <= cmd.index then return true end
    -- From the end: a list is walked from its nearer side, and what is repeated is what came last.
    local there = redis.call('LRANGE', P .. 'tok:' .. cmd.uid, cmd.index - have, upto - 1 - have)
    for i, token in ipairs(there) do
      if tonumber(token) ~= cmd.tokens[i] then return false end
    end
    return true
  end
  if not computing(r) then
    -- The last emission again, its first answer was lost.
    local ended_so = cmd.finish_reason == '' or (cmd.finish_reason == r.finish_reason and stop == have)
    local same = r.state == 'FINISHED' and stop <= have and ended_so and overlap_is_same()
    return says(same and 'SAME' or 'FENCED')
  end
  if cmd.index > have then return says('GAP') end
  if not overlap_is_same() or (cmd.finish_reason ~= '' and stop < have) then return says('DIFFERENT') end

  -- The step that computed this is over.
  if r.stamped == 1 and r.state == 'PREFILLING' then set(r, 'stamped', 0) end

  local fresh_tokens, fresh_logprobs = {}, cmd.logprobs and {}
  for i = have - cmd.index + 1, n do
    fresh_tokens[#fresh_tokens + 1] = cmd.tokens[i]
    if fresh_logprobs then fresh_logprobs[#fresh_logprobs + 1] = cmd.logprobs[i] end
  end
  if #fresh_tokens == 0 and cmd.finish_reason == '' then return says('SAME') end
  local from = have
  if #fresh_tokens > 0 then
    append(r, fresh_tokens, fresh_logprobs)
    have = stop
  end
  local texts = {}
  for i, token in ipairs(fresh_tokens) do texts[i] = int(token) end
  local logprobs = fresh_logprobs and table.concat(fresh_logprobs, '|')
  if cmd.finish_reason ~= '' then
    end_request(r, 'FINISHED', {
      finish_reason = cmd.finish_reason, index = from, tokens = texts, logprobs = logprobs,
    })
  else
    local watchers = redis.call('SMEMBERS', P .. 'watch:' .. cmd.uid)
    tell(watchers, {
      uid = cmd.uid, index = from, tokens = table.concat(texts, ','), logprobs = logprobs,
      cached_tokens = from == 0 and cmd.cached_tokens or nil,
    })
    if cmd.blocks > 0 and r.lease ~= '' then redis.call('HSET', P .. 'lease:' .. r.lease, 'blocks', cmd.blocks) end
  end
  return says('OK')
end

now = read_clock()
local answers = {}
for i, emission in ipairs(cmd.emissions) do
  cmd = emission
  local done, said = pcall(emit)
  answers[i] = done and said or { error = type(said) == 'table' and said.err or tostring(said) }
end
return answer({ answers = answers })
