"""Decode's tasks. A bell only says "look": what to do stands in the ledger, and the node does it (see ``pool``)."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from workers.pool import outcome_of


@shared_task(name="decode.bell", bind=True)
def bell(self: Any, uid: str, attempt: int) -> str:
    """Look for a request that waits for a decode node; ``uid`` is a hint. Ends with its lease on this node."""
    return outcome_of(self.request.id)
