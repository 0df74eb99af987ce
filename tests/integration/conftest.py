"""One real cluster of two prefill and two decode workers, as `baton up` runs it, for all tests that only use one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.model.resolve import resolve_model
from app.settings import load_settings
from tests.integration.baton import Baton, share_caches
from tests.integration.small import NUM_BLOCKS, STALL_S, STEP_TOKENS, Small


@pytest.fixture(scope="session")
def models() -> Path:
    """The usual cache of models; fetched once."""
    settings = load_settings()
    return resolve_model("smollm2-135m-instruct", settings.home, print).path.parent


@pytest.fixture(scope="session")
def new_home(models: Path) -> Callable[[Path], Path]:
    """Makes a BATON_HOME of its own that shares the cached models and kernels."""

    def make(folder: Path) -> Path:
        home = folder / "home"
        home.mkdir()
        share_caches(home, models)
        return home

    return make


@pytest.fixture(scope="session")
def baton(new_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    """Two prefill and two decode workers, web and Flower."""
    folder = tmp_path_factory.mktemp("cluster")
    options = ("--prefill", "2", "--decode", "2", "--num-blocks", "320", "--max-num-seqs", "32")
    cluster = Baton(new_home(folder), folder / "output", *options)
    try:
        cluster.wait_until_ready()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def small(new_home: Callable[[Path], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Small]:
    """By its silence alone a worker would be lost after a minute."""
    folder = tmp_path_factory.mktemp("small")
    orders = folder / "orders"
    orders.mkdir()
    cluster = Baton(
        new_home(folder),
        folder / "output",
        *("--num-blocks", str(NUM_BLOCKS), "--max-num-seqs", "8"),
        BATON_ENGINE_STALL_S=str(STALL_S),
        BATON_MAX_NUM_BATCHED_TOKENS=str(STEP_TOKENS),
        BATON_NODE_TTL_S="60",
        PYTHONPATH=str(Path(__file__).parent / "sabotage"),
        SABOTAGE=str(orders),
    )
    try:
        cluster.wait_until_ready()
        yield Small(cluster, orders)
    finally:
        cluster.stop()
