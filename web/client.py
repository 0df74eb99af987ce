"""The client's end of the connection: is anybody still there?"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any


class ClientGone(Exception):
    """The client closed its connection before its answer was complete."""


class Client:
    """One client connection, seen through the socket that gunicorn puts into the WSGI environ.

    Other servers put none there; then only a failed write shows that a client has gone.
    """

    def __init__(self, environ: Mapping[str, Any]) -> None:
        self._socket: socket.socket | None = environ.get("gunicorn.socket")

    def gone(self) -> bool:
        """Whether the client has closed its side. Takes nothing from the socket and does not block.

        The plain socket's ``recv`` is used because a TLS one refuses flags; the end of a stream looks alike in both.
        """
        if self._socket is None:
            return False
        try:
            return socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
