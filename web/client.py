"""The client's end of the connection: is anybody still there?"""

from __future__ import annotations

import select
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_SILENT_S = 8
"""A machine that has acknowledged nothing for so long is gone: with the time until somebody looks, 10 s."""
_KEEPALIVE = {"TCP_KEEPIDLE": _SILENT_S // 2, "TCP_KEEPINTVL": _SILENT_S // 4, "TCP_KEEPCNT": 2}
"""Where nothing is on its way the kernel asks that machine, and reports an error when it does not answer."""
_ROOM_BYTES = 1 << 20
"""To be sent: what a fast answer adds in that time. Its thread would wait in a write, for longer, and not look."""
_TCP_INFO = struct.Struct("=2xB21xI28xI")
"""Of Linux's ``tcp_info``: times the oldest segment was sent again, segments on their way, ms since the last ACK."""


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


class Client:
    """One client connection, seen through the socket that gunicorn puts into the WSGI environ.

    Other servers put none there; then only a failed write shows that a client has gone.
    """

    def __init__(self, environ: Mapping[str, Any]) -> None:
        self._socket: socket.socket | None = environ.get("gunicorn.socket")
        if self._socket is not None:
            _keep_asking(self._socket)

    def gone(self) -> bool:
        """Whether the client has closed its side, or its machine is gone. Takes nothing and does not block.

        The plain socket's ``recv`` is used because a TLS one refuses flags; the end of a stream looks alike in both.
        """
        if self._socket is None:
            return False
        try:
            if not _has_something(self._socket):
                return _unanswered(self._socket)
            return socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except (OSError, ValueError):  # an error that is pending, or our own end is closed
            return True


def _has_something(connection: socket.socket) -> bool:
    """Whether there is anything to read, its end or an error too. Asked first: ``recv`` on a socket that has a timeout
    waits for that, whatever its flags say."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _keep_asking(connection: socket.socket) -> None:
    with suppress(OSError, AttributeError):  # no TCP, or a system that calls them otherwise: its own patience then
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM_BYTES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _unanswered(connection: socket.socket) -> bool:
    """Whether what is on its way to the client has been sent again, in vain, for too long. TCP itself would go on for a
    quarter of an hour. A client that is there and reads nothing acknowledges all the same."""
    try:
        state = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        sent_again, on_their_way, silent_ms = _TCP_INFO.unpack(state)
    except (OSError, AttributeError, struct.error):
        return False
    return bool(sent_again and on_their_way) and silent_ms > 1000 * _SILENT_S
