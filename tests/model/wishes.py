"""What clients ask for and on what cluster, as hypothesis draws it; small, so that failures become plain."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hypothesis import strategies as st

from app.protocol.commands import Limits
from app.schemas import SamplingParams
from tests.sim.client import Wish
from tests.sim.pace import Slowness
from tests.sim.scenario import Scenario, Shape
from tests.sim.times import Times

LONG_S = 300
_TOO_LARGE = 70
"""Tokens of a prompt that no node can hold."""


@dataclass(frozen=True, slots=True)
class Order:
    """A request without its names."""

    prompt_tokens: int = 5
    common_tokens: int = 0
    """So many of them are those of every other prompt too; the last one never is."""
    salt: str = ""
    max_tokens: int = 3
    seed: int = 0
    ignore_eos: bool = False
    max_attempts: int = 3
    max_queued: int = 100
    queue_timeout_s: int = LONG_S
    first_token_timeout_s: int = LONG_S
    dedup_window_s: int = 0
    keyed: bool = False
    """With an Idempotency-Key, and a grace when its client leaves."""

    def wish(self, number: int, client_id: str, web: str) -> Wish:
        """The request number ``number``: its prompt, and so its answer, is no other one's."""
        too_large = self.prompt_tokens >= _TOO_LARGE
        return Wish(
            at_s=0.0,
            web=web,
            client_id=client_id,
            prompt=tuple(position + 100 * number * self._is_own(position) for position in range(self.prompt_tokens)),
            sampling=SamplingParams(
                temperature=1.0, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=self.ignore_eos
            ),
            limits=Limits(
                max_attempts=self.max_attempts,
                max_queued=self.max_queued,
                # Admitted while no node lived, one that no node can hold can only expire.
                queue_timeout_ms=3000 if too_large else 1000 * self.queue_timeout_s,
                first_token_timeout_ms=1000 * self.first_token_timeout_s,
                record_ttl_ms=86_400_000,
                grace_ms=3000 if self.keyed else 0,
                dedup_window_ms=1000 * self.dedup_window_s,
            ),
            key=f"key-{number}" if self.keyed else "",
            salt=self.salt,
        )

    def _is_own(self, position: int) -> bool:
        return position >= min(self.common_tokens, self.prompt_tokens - 1)


def mostly(usual: int, *others: int) -> st.SearchStrategy[int]:
    """``usual`` most of the time; shrinks to it."""
    return st.sampled_from((usual, usual, usual, *others))


ORDERS = st.builds(
    Order,
    prompt_tokens=st.sampled_from((5, 1, 4, 9, 14, 5, 9, _TOO_LARGE)),
    common_tokens=st.sampled_from((8, 0, 4, 12)),
    salt=st.sampled_from(("", "", "tenant")),
    max_tokens=st.sampled_from((3, 2, 6, 12, 1)),
    seed=st.integers(0, 9),
    ignore_eos=st.booleans(),
    max_attempts=mostly(3, 1, 2),
    max_queued=mostly(100, 1),
    queue_timeout_s=mostly(LONG_S, 3),
    first_token_timeout_s=mostly(LONG_S, 2),
    dedup_window_s=mostly(0, 2),
    keyed=st.booleans(),
)


class Mood(StrEnum):
    """Which faults there may be. Where they are mild, more is demanded of what comes of them."""

    ANY = "any"
    BLAMELESS = "blameless"
    """Only those that are nobody's failure: none may count as one."""
    HARMLESS = "harmless"
    """Only those that need not cost an attempt: none may."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a cluster is made, apart from how many nodes it has."""

    mood: Mood = Mood.ANY
    num_blocks: int = 8
    max_num_seqs: int = 4
    max_num_batched_tokens: int = 16
    emit_buffer_tokens: int = 2
    webs: int = 1
    ledger_lanes: int = 1
    one_host: bool = True
    one_server: bool = True
    check_s: float = 1.0
    """How often a node compares its holdings; often, so that the comparison meets every call in flight."""
    slow_network: bool = False
    slow_steps: bool = False
    slow_blocks: bool = False

    def scenario(self, prefill_nodes: int, decode_nodes: int) -> Scenario:
        """A world in which nothing goes wrong by itself and nobody asks for anything yet."""
        names = [f"p{n}" for n in range(prefill_nodes)] + [f"d{n}" for n in range(decode_nodes)]
        shape = Shape(self.num_blocks, self.max_num_seqs, self.max_num_batched_tokens, self.emit_buffer_tokens)
        return Scenario(
            seed=0,
            nodes=dict.fromkeys(names, shape),
            webs=self.webs,
            wishes=(),
            poison=frozenset(),
            rates={},
            disasters=(),
            times=Times(check_s=self.check_s),
            slowness=Slowness(
                network=20.0 if self.slow_network else 1.0,
                steps=5.0 if self.slow_steps else 1.0,
                blocks=20.0 if self.slow_blocks else 1.0,
            ),
            ledger_lanes=self.ledger_lanes,
            one_host=self.one_host,
            one_server=self.one_server,
            exits_reported=1.0,
        )


SETTINGS = st.builds(
    Setting,
    mood=st.sampled_from((Mood.ANY, Mood.ANY, Mood.ANY, Mood.BLAMELESS, Mood.HARMLESS)),
    num_blocks=st.sampled_from((8, 6, 16)),
    max_num_seqs=st.sampled_from((4, 1, 2)),
    max_num_batched_tokens=st.sampled_from((16, 4)),
    emit_buffer_tokens=st.sampled_from((2, 6)),
    webs=st.sampled_from((1, 2)),
    ledger_lanes=st.sampled_from((1, 3)),
    one_host=st.booleans(),
    one_server=st.booleans(),
    check_s=st.sampled_from((1.0, 0.1)),
    slow_network=st.booleans(),
    slow_steps=st.booleans(),
    slow_blocks=st.booleans(),
)
