"""The decode node, as a pure machine: ``receive`` up to the activation, ``node`` from there to the last token,
``growth`` of the blocks that a lease holds meanwhile."""

from app.protocol.decode.lease import Lease, Phase
from app.protocol.decode.node import DecodeNode

__all__ = ["DecodeNode", "Lease", "Phase"]
