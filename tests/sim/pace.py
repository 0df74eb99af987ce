"""How long things take when nothing is wrong. Drawn from a stream of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Slowness:
    """1 is a machine of one's own; more makes it likelier that something happens in the middle."""

    network: float = 1.0
    steps: float = 1.0
    blocks: float = 1.0


class Pace:
    """Draws each duration anew."""

    def __init__(self, seed: object, slowness: Slowness) -> None:
        rng = Random(f"{seed}/pace")
        self._random = rng.random
        self.choose: Callable[[int], int] = rng.randrange
        self._network_s = 0.0004 * slowness.network
        self._steps = slowness.steps
        self._block_s = 0.0004 * slowness.blocks

    def network(self) -> float:
        """One way between two processes."""
        return self._network_s * (0.5 + self._random())

    def thread(self) -> float:
        """Until another thread of the same process looks at what it was given."""
        return 0.00005 + 0.0001 * self._random()

    def step(self, num_tokens: int) -> float:
        """One engine step."""
        return self._steps * (0.004 + (0.0004 * num_tokens + 0.004) * self._random())

    def block(self) -> float:
        """To digest or copy one block."""
        return self._block_s * (0.5 + self._random())
