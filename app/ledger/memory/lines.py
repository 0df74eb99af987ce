"""The lines that wait for a node, and what a node takes of them: the counterpart of ``walk`` in _lib/nodes.lua."""

from __future__ import annotations

from collections.abc import Callable

from app.ledger.memory.state import WALK, Node, Scores, ranked

Pick = Callable[[list[str]], tuple[str | None, bool]]
"""Sees part of a line and answers (uid, stop); stop without a uid means "nothing at all"."""


def blocks(tokens: int, block_size_tokens: int) -> int:
    return -(-tokens // block_size_tokens)


def walk(scores: Scores, node: Node, pick: Pick) -> str | None:
    """The head of a line, and if ``pick`` takes none of it, a part further back: see ``walk`` in _lib/nodes.lua."""
    line = ranked(scores)
    head = line[:WALK]
    last = scores[head[-1]] if head else 0
    uid, stop = pick(head)
    if uid or stop or len(head) < WALK:
        return uid
    start = max(last, node.cursor)
    rest = [each for each in line[WALK:] if scores[each] > start][:WALK]
    last = scores[rest[-1]] if rest else 0
    uid, stop = pick(rest)
    if not uid and not stop:
        node.cursor = last if len(rest) == WALK else -1
    return uid
