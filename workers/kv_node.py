"""What a prefill and a decode worker load before they start: model, engine, warm-up."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from app.errors import StartupError
from app.ids import draw_id
from app.ledger.redis import connect
from app.model.resolve import resolve_model
from app.settings import Settings
from workers.engine import runtime
from workers.engine.kernels.build import find_kernels
from workers.engine.thread_board import ThreadBoard
from workers.host import NodeHost
from workers.machine import KVRole

logger = logging.getLogger("baton.node")


def make_host(settings: Settings, role: KVRole, nodename: str, on_room: Callable[[], None]) -> NodeHost:
    """Load the model and make the node. See ``NodeHost`` for ``on_room``.

    Raises:
        StartupError: one line that says what is wrong: model, memory, device.
    """
    num_threads = settings.num_threads or len(settings.core_numbers) or 1
    runtime.configure(num_threads, settings.core_numbers)
    from workers.engine.engine import Engine  # imports Paddle, which must be configured first

    folder = resolve_model(settings.model, settings.home, lambda line: logger.info("%s", line))
    kernels = find_kernels(
        settings.kernels,
        settings.device,
        settings.home,
        lambda line: logger.info("%s", line),
        lambda line: logger.warning("%s", line),
    )
    incarnation = settings.incarnation or draw_id()
    engine = Engine(
        folder,
        incarnation=incarnation,
        device=settings.device,
        kernels=kernels,
        weight_dtype="float32" if settings.weight_dtype == "float32" else "float16",
        kv_cache_dtype="float16" if settings.kv_cache_dtype == "float16" else "float32",
        block_size_tokens=settings.block_size_tokens,
        num_blocks=settings.num_blocks,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        # Web bounds what a request may become; a worker that knew a smaller bound would cut answers short.
        max_model_len=folder.config.max_context_tokens,
        num_threads=num_threads,
        board=_thread_board(settings, num_threads),
    )
    logger.info(
        "computing with %s, weights in %s, KV in %s",
        engine.operations.name,
        settings.weight_dtype,
        settings.kv_cache_dtype,
    )
    engine.warm_up(lambda line: logger.info("%s node=%s", line, nodename))
    host_class = _failing_host(settings, nodename) if settings.failpoints else NodeHost
    return host_class(settings, role, nodename, engine, incarnation, connect(settings), on_room)


def _thread_board(settings: Settings, num_threads: int) -> ThreadBoard | None:
    if settings.device != "cpu" or not settings.borrow_threads:
        return None
    file = settings.home / "threads"
    try:
        return ThreadBoard(file, num_threads)
    except OSError as error:
        logger.warning("no idle processors of other workers will be used: %s: %s", file, error.strerror or error)
        return None


def _failing_host(settings: Settings, nodename: str) -> type[NodeHost]:
    """For chaos tests only."""
    from workers.failpoints.host import FailingHost

    if not Path(settings.failpoints).is_dir():
        raise StartupError(f"BATON_FAILPOINTS={settings.failpoints}: no such folder")
    logger.warning("failpoints are on node=%s: it fails when a test says so", nodename)
    return FailingHost
