-- Reads one record. Touches: rec hash, tok and lp lists, latest string, clock hash. Arguments: uid, client_id,
-- from_index.
-- Answers: FOUND with the record | UNKNOWN. Changes nothing.
now = read_clock()
local uid = cmd.uid
if uid == '' then uid = redis.call('GET', P .. 'latest:' .. cmd.client_id) end
local r = uid and load(uid)
if not r then return answer({ status = 'UNKNOWN' }) end
return answer(view(r, cmd.from_index))
