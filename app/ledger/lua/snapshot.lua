-- Reads one record. Touches: rec hash, tok list, latest string, clock hash. Arguments: uid, client_id, from_index.
-- Answers: FOUND with the record | UNKNOWN. Changes nothing.
now = read_clock()
local uid = cmd.uid
if uid == '' then uid = redis.call('GET', P .. 'latest:' .. cmd.client_id) end
local r = uid and load(uid)
if not r then return answer({ status = 'UNKNOWN' }) end
local names = redis.call('HMGET', P .. 'rec:' .. uid, 'prefill_node', 'decode_node')
local timeline = {}
for _, phase in ipairs({ 'queued', 'claimed', 'granted', 'first_token', 'committed', 'activated', 'finished' }) do
  local stamp = redis.call('HGET', P .. 'rec:' .. uid, 't:' .. phase)
  if stamp then timeline[phase] = tonumber(stamp) end
end
return answer({
  status = 'FOUND', uid = uid, client_id = r.client, state = r.state, attempt = r.attempt, failures = r.failures,
  prompt_tokens = r.prompt_tokens, output_from = cmd.from_index, finish_reason = r.finish_reason,
  error_code = r.error_code, error_detail = r.error_detail, prefill_node = names[1] or '', decode_node = names[2] or '',
  output = '[' .. table.concat(redis.call('LRANGE', P .. 'tok:' .. uid, cmd.from_index, -1), ',') .. ']',
  timeline = timeline,
})
