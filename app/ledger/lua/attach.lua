-- Adds a watcher and reads the record in one step: no event falls between the two.
-- Touches: rec hash, tok and lp lists, watch set, owned, unwatched and nodes zsets, clock hash.
-- Arguments: uid, web, connection. Answers: ATTACHED record | ENDED record | UNKNOWN | REFUSED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local r = load(cmd.uid)
if not r then return answer({ status = 'UNKNOWN' }) end
if not in_process(r) then return answer({ status = 'ENDED', record = view(r, 0) }) end
-- A request watched by a dead web process would have nobody who aborts it.
if not fresh(cmd.web) then return answer({ status = 'REFUSED' }) end
redis.call('SADD', P .. 'watch:' .. cmd.uid, cmd.web .. ':' .. cmd.connection)
redis.call('ZADD', P .. 'owned:' .. cmd.web, now, 'w:' .. cmd.uid .. ':' .. cmd.connection)
redis.call('ZREM', P .. 'unwatched', cmd.uid)
return answer({ status = 'ATTACHED', record = view(r, 0) })
