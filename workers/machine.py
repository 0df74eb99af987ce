"""Makes the pure machine of a prefill or decode node from its settings and its engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from app.ids import draw_id
from app.protocol.blocks import BlockPool
from app.protocol.decode import DecodeNode
from app.protocol.holding import NodeConfig
from app.protocol.prefill import PrefillNode
from app.protocol.tables import DECODE_BLOCK_STEPS, PREFILL_BLOCK_STEPS
from app.settings import Settings

if TYPE_CHECKING:
    from workers.engine.engine import Engine

KVRole = Literal["prefill", "decode"]
Machine = PrefillNode | DecodeNode


def make_machine(
    settings: Settings, role: KVRole, nodename: str, engine: Engine, incarnation: str, address: str
) -> Machine:
    """The machine of a node whose ``engine`` is loaded and whose link listens at ``address``."""
    config = NodeConfig(
        incarnation=incarnation,
        name=nodename,
        address=address,
        block_size_tokens=engine.block_size_tokens,
        block_bytes=engine.pool.block_bytes,
        max_num_seqs=settings.max_num_seqs,
        eos_token_ids=frozenset(engine.folder.config.eos_token_ids),
        link_timeout_s=settings.link_timeout_s,
        pull_min_bytes_per_s=settings.pull_min_bytes_per_s,
        check_s=settings.check_s,
        grant_timeout_s=settings.grant_timeout_s,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )
    steps = PREFILL_BLOCK_STEPS if role == "prefill" else DECODE_BLOCK_STEPS
    pool = BlockPool(engine.pool.num_blocks, steps, on_take=engine.pool.bump)
    kind: Callable[..., Machine] = PrefillNode if role == "prefill" else DecodeNode
    return kind(config, pool, draw_id)
