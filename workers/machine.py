"""Makes the pure machine of a prefill or decode node from its settings and its engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from app.ids import draw_id
from app.protocol.blocks import BlockPool
from app.protocol.decode import DecodeNode
from app.protocol.holding import NodeConfig
from app.protocol.prefill import PrefillNode
from app.protocol.prefix_cache import PrefixPool
from app.protocol.tables import DECODE_BLOCK_STEPS
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
        prefix_cache=settings.prefix_cache,
    )
    num_blocks, bump = engine.pool.num_blocks, engine.pool.bump
    if role == "prefill":
        return PrefillNode(config, PrefixPool(num_blocks, bump), draw_id)
    return DecodeNode(config, BlockPool(num_blocks, DECODE_BLOCK_STEPS, bump), draw_id)
