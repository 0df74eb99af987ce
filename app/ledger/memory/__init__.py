"""The twin of the Redis ledger: the same commands on plain Python values, for the simulator and for tests."""

from app.ledger.memory.ledger import MemoryLedger

__all__ = ["MemoryLedger"]
