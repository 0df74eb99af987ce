-- Schema check and a read of ledger time: run on connecting to a server life that this process has not met.
-- Touches: meta hash, clock hash. Arguments: schema (ours). Answers: schema (theirs), time_ms.
-- The first process to come writes the version; whether a different one is an error is decided by the caller.
now = read_clock()
local theirs = redis.call('HGET', P .. 'meta', 'schema')
if not theirs then
  theirs = int(cmd.schema)
  redis.call('HSET', P .. 'meta', 'schema', theirs)
end
return answer({ schema = theirs })
