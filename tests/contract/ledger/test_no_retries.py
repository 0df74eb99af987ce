"""Nothing is tried again behind the caller's back: to repeat a call is its decision, and its time is bounded."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from app.errors import LedgerUnavailable
from app.protocol.commands import Abort, Cluster
from tests.contract.ledger.conftest import OpenLedger


@pytest.fixture
def hangs_up() -> Iterator[tuple[str, Callable[[], int]]]:
    """A server that closes every connection; its address, and how many there were."""
    listener = socket.create_server(("127.0.0.1", 0))
    count = [0]

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            count[0] += 1
            connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0", lambda: count[0]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


@pytest.mark.parametrize("command", [Abort("u", "user"), Cluster()], ids=["write", "read"])
def test_a_ledger_call_connects_once(
    hangs_up: tuple[str, Callable[[], int]], open_ledger: OpenLedger, command: Abort | Cluster
) -> None:
    url, connections = hangs_up
    with pytest.raises(LedgerUnavailable):
        open_ledger(url).execute(command)
    assert connections() == 1
