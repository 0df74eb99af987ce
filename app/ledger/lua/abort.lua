-- Ends a request as ABORTED, whatever it is doing.
-- Touches: rec hash, tombstones zset, clock hash, and what end_request touches.
-- Arguments: uid, reason. Answers: ABORTED | ENDED state | TOMBSTONED | LATE.
now = read_clock()
if late() then return answer({ status = 'LATE' }) end
local r = load(cmd.uid)
if not r then
  -- Its admission may still be under way.
  stone(cmd.uid)
  return answer({ status = 'TOMBSTONED' })
end
if in_process(r) then end_request(r, 'ABORTED', { error_code = cmd.reason }) end
return answer({ status = r.state == 'ABORTED' and 'ABORTED' or 'ENDED', state = r.state })
