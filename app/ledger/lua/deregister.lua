-- Takes a node's entry away once it owns nothing.
-- Touches: node hash, nodes, owned, room and avoided zsets, avoided_times hash, model_nodes set, events stream, clock
-- hash. Arguments: incarnation. Answers: OK | REFUSED detail | UNKNOWN | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local state = redis.call('HGET', P .. 'node:' .. cmd.incarnation, 'state')
if not state or state == 'dead' then return answer({ status = 'UNKNOWN' }) end
local owns = redis.call('ZCARD', P .. 'owned:' .. cmd.incarnation)
if owns > 0 then return answer({ status = 'REFUSED', detail = 'it still owns ' .. int(owns) }) end
remove_node(cmd.incarnation)
return answer({ status = 'OK' })
