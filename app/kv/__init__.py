"""KV blocks on one host: a shared-memory pool and the reader that pulls from it.

The owner of a pool is the only writer. Everybody else opens it read-only and copies (DESIGN, rules 5 and 6).
"""

from app.kv.layout import kv_layout
from app.kv.pool import KVPool
from app.kv.reader import KVReader
from app.kv.transport import KVTransport, PullFailure

__all__ = ["KVPool", "KVReader", "KVTransport", "PullFailure", "kv_layout"]
