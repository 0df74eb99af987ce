"""Client: a closed connection is seen without taking a byte from an open one."""

from __future__ import annotations

import socket
import struct
from typing import Any

import pytest

from web import client as of_client
from web.client import Client


def test_a_client_is_gone_when_it_has_closed() -> None:
    here, there = socket.socketpair()
    with here:
        with there:
            client = Client({"gunicorn.socket": here})
            assert not client.gone()
            there.send(b"next request")
            assert not client.gone()
            assert here.recv(100) == b"next request"
        assert client.gone()


def test_a_closed_socket_of_our_own_counts_as_gone() -> None:
    here, there = socket.socketpair()
    with there:
        here.close()
        assert Client({"gunicorn.socket": here}).gone()


def test_without_a_socket_nobody_is_known_to_be_gone() -> None:
    assert not Client({}).gone()


def test_a_client_that_is_there_is_asked_without_waiting_though_its_socket_has_a_timeout() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(0.5)  # a read that waits for it ends in an error, as that of a client that is gone
        client = Client({"gunicorn.socket": here})
        assert not client.gone()
        there.close()
        assert client.gone()


def test_the_kernel_asks_a_silent_machine_and_gives_it_up_within_ten_seconds() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        here, _ = server.accept()
        with here:
            Client({"gunicorn.socket": here})
            assert here.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
            idle_s, every_s, times = (
                here.getsockopt(socket.IPPROTO_TCP, option)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
            )
            assert idle_s + every_s * times <= 10


@pytest.mark.parametrize(
    ("sent_again", "on_their_way", "silent_s", "gone"),
    [
        (3, 2, 9, True),
        (1, 1, 3, False),  # a lost packet or two
        (0, 0, 600, False),  # there is nothing that it could acknowledge
        (4, 1, 0.2, False),  # it reads nothing, and says so each time that it is asked
    ],
)
def test_a_machine_is_gone_that_has_acknowledged_nothing_for_long_of_what_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, sent_again: int, on_their_way: int, silent_s: float, gone: bool
) -> None:
    info = bytearray(of_client._TCP_INFO.size)
    struct.pack_into("=B", info, 2, sent_again)  # tcpi_retransmits
    struct.pack_into("=I", info, 24, on_their_way)  # tcpi_unacked
    struct.pack_into("=I", info, 56, round(1000 * silent_s))  # tcpi_last_ack_recv

    class Connection:
        def getsockopt(self, *_: int) -> bytes:
            return bytes(info)

    connection: Any = Connection()
    assert of_client._unanswered(connection) is gone
