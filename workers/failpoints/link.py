"""A link that can be cut: what this node sends and what is sent to it is lost, and nobody is told.

Frames are dropped between Link and ZMQ, so that all of Link's own logic meets the silence. The connections stay, as
they do when a network drops packets; but ZMQ's heartbeats pass, which is the harder case: no side notices early.
A namespace or packet filter per worker would need root and cut the ledger too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import zmq

from app.link import Link
from app.protocol.messages import Message
from workers.failpoints.orders import Orders


class CutLink(Link):
    """A Link that loses every frame while ``orders.cut``."""

    def __init__(
        self,
        orders: Orders,
        incarnation: str,
        host: str,
        on_call: Callable[[str, Message], None],
        on_crash: Callable[[str, BaseException], None],
    ) -> None:
        self._orders = orders
        super().__init__(incarnation, host, on_call, on_crash)

    def _new_context(self) -> zmq.Context[zmq.Socket[bytes]]:
        orders = self._orders

        class Socket(zmq.Socket[bytes]):
            """Only frames of calls and answers travel as multipart messages."""

            def send_multipart(self, msg_parts: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
                return None if orders.cut else super().send_multipart(msg_parts, *args, **kwargs)

            def recv_multipart(self, *args: Any, **kwargs: Any) -> Any:
                frames = super().recv_multipart(*args, **kwargs)
                while orders.cut:
                    frames = super().recv_multipart(*args, **kwargs)  # ends with Again
                return frames

        class Context(zmq.Context[zmq.Socket[bytes]]):
            _socket_class = Socket

        return Context()
