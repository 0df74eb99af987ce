"""The prefill node, as a pure machine: ``compute`` up to the first token, ``node`` from there to the handoff's end."""

from app.protocol.prefill.attempt import Attempt, Phase
from app.protocol.prefill.node import PrefillNode

__all__ = ["Attempt", "Phase", "PrefillNode"]
