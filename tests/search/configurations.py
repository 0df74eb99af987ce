"""The configurations that are searched: those of ``make test``, and larger ones for ``make search``."""

from __future__ import annotations

from dataclasses import replace

from tests.search.configuration import MANY, Configuration, Fault, Request

FIRST = Request("u1", (11, 12))
ABORTED = replace(FIRST, may_be_aborted=True)
AGAIN = Request("u2", (21, 22), after="u1")
"""The same client id with another prompt, once the first request has ended."""
TWO = (Request("u1", (11, 12), client_id="a"), Request("u2", (21, 22), client_id="b"))

ALIKE = (Request("u1", (11, 12, 13, 14, 15), client_id="a"), Request("u2", (11, 12, 13, 14, 16), client_id="b"))
"""They have a full block in common."""
ALIKE_AGAIN = (replace(ALIKE[0], may_be_aborted=True), replace(ALIKE[1], client_id="a", after="u1"))

MESSAGE_LOST = frozenset({Fault.MESSAGE_LOST})
CRASH = frozenset({Fault.CRASH_REPORTED})
LOST = frozenset({Fault.MESSAGE_LOST, Fault.REPLY_LOST, Fault.BELL_LOST})
LEDGER_CALLS = frozenset({Fault.CALL_LOST, Fault.ANSWER_LOST, Fault.CALL_LATE})
BETWEEN_NODES = LOST | {Fault.MESSAGE_DOUBLED, Fault.MESSAGE_LATE, Fault.BELL_DOUBLED}

REST_MOST_MS = 10_000
"""No state of these is further from rest, by the timeouts of ``configuration``."""

ANY_FAULT = Configuration("one fault of any kind", (FIRST,), faults=1)
TWO_LOST = Configuration("two lost messages", (FIRST,), faults=2, kinds=MESSAGE_LOST)
ALL_LATE = Configuration("everything is late once", (FIRST,), faults=1, kinds=frozenset({Fault.EVERYTHING_LATE}))
"""A part of ``ANY_FAULT``."""
DRAIN = Configuration("a drain", (FIRST,), drains=1)
TWO_DECODE = Configuration("two requests and a place on each of two decode nodes", TWO, decode=2, prefill_blocks=2)
ABORT_AGAIN = Configuration("an abort at any moment, then the same id with another prompt", (ABORTED, AGAIN))
BEGIN_ALIKE = Configuration("two requests that begin alike", ALIKE, prefill_blocks=4, decode_blocks=2)
"""At once: one finds what the other has computed, in line or later, or neither does."""
ALIKE_ABORTED = Configuration(
    "an abort at any moment, then a request that begins alike", ALIKE_AGAIN, prefill_blocks=2, decode_blocks=2
)

SMALL = (
    ABORT_AGAIN,
    ANY_FAULT,
    TWO_LOST,
    Configuration("two crashes", (FIRST,), faults=2, kinds=CRASH),
    DRAIN,
    TWO_DECODE,
    BEGIN_ALIKE,
    ALIKE_ABORTED,
)
"""Where an attempt that fails is counted, up to ``max_attempts``."""


def _large(
    name: str, requests: tuple[Request, ...], faults: int, kinds: frozenset[Fault], decode: int = 1
) -> Configuration:
    return Configuration(
        name, requests, decode=decode, prefill_blocks=decode, faults=faults, kinds=kinds, max_attempts=MANY
    )


LARGE = (
    replace(DRAIN, name="a drain and a crash", faults=1, kinds=CRASH),
    _large("one fault of any kind, an abort", (ABORTED,), 1, frozenset(Fault)),
    _large("two faults, crashes or of messages and bells", (FIRST,), 2, CRASH | BETWEEN_NODES),
    _large(
        "one fault, a crash or of messages, bells and ledger calls, an abort, another prompt",
        (ABORTED, AGAIN),
        1,
        CRASH | BETWEEN_NODES | LEDGER_CALLS,
    ),
    _large("two lost messages, an abort, another prompt", (ABORTED, AGAIN), 2, MESSAGE_LOST),
    _large("two crashes, an abort, another prompt", (ABORTED, AGAIN), 2, CRASH),
    replace(
        ALIKE_ABORTED,
        name="one lost message, bell or reply, an abort, then a request that begins alike",
        faults=1,
        kinds=LOST,
        max_attempts=MANY,
    ),
    _large("one lost message or bell, two requests, a place on each decode node", TWO, 1, LOST, decode=2),
)
"""Where an attempt may mostly fail without end: how often one has failed then makes no difference."""
