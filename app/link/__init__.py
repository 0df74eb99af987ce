"""ZMQ between nodes: acknowledged calls with a deadline, addressed to an incarnation.

A call ends in exactly one of four ways, and never later than its deadline: accepted, refused with a reason,
*not sent* (certainly), or *unacknowledged* (the peer may or may not have acted: ask the ledger). Nothing is cached
for a peer that is away: a socket queues only while it is connected (IMMEDIATE), a message waits for that connection
no longer than its deadline, and a socket that missed a deadline sends nothing more; its successor starts empty. What a
frozen peer reads late carries its deadline and is refused; what its successor might read carries the incarnation.

One thread owns all sockets. Wire format: JSON in one frame. No pickle.
"""

from app.link.link import Link
from app.link.wire import CallOutcome

__all__ = ["CallOutcome", "Link"]
