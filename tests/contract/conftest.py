"""A real Valkey server for everything under tests/contract, started once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from app.valkey import EmbeddedValkey


@pytest.fixture(scope="session")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    """An embedded Valkey on a unix socket; tests keep apart by namespace."""
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()
