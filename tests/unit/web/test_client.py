"""Client: a closed connection is seen without taking a byte from an open one."""

from __future__ import annotations

import socket
import time

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
        here.settimeout(20)
        client = Client({"gunicorn.socket": here})
        began = time.monotonic()
        assert not client.gone()
        assert time.monotonic() - began < 5
        there.close()
        assert client.gone()
