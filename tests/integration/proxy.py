"""A TCP proxy that stands before a server and breaks the connections to it: reset, half-open, frozen, refused."""

from __future__ import annotations

import selectors
import socket
import struct
import threading

_LOOK_EVERY_S = 0.1
_CHUNK_BYTES = 65_536
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: closing sends RST."""


class Proxy:
    """Forwards connections to ``127.0.0.1:target`` from a port of its own. Its methods may be called on any thread."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._peers: dict[socket.socket, socket.socket] = {}
        self._forgotten: list[socket.socket] = []
        self._lock = threading.RLock()
        self._flowing = threading.Event()
        self._flowing.set()
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()

    def freeze(self) -> None:
        """Nothing passes any more, nothing is closed; new connections are made, and get no answer either."""
        self._flowing.clear()

    def thaw(self) -> None:
        """What was held back passes now."""
        self._flowing.set()

    def reset(self) -> None:
        """Every connection ends with RST; new ones are served."""
        with self._lock:
            for each in list(self._peers):
                self._drop(each)

    def forget(self) -> None:
        """Every connection is half-open from now on, for ever: the server's side is gone, and nobody tells the
        client's. New ones are served."""
        with self._lock:
            for client in [each for each in self._peers if each.getsockname()[1] == self.port]:
                server = self._peers.pop(client)
                del self._peers[server]
                self._selector.unregister(client)
                self._forgotten.append(client)
                self._end(server)

    def refuse(self) -> None:
        """Nobody listens here any more, and every connection ends with RST."""
        with self._lock:
            self._selector.unregister(self._listener)
            self._listener.close()
            self.reset()

    def accept(self) -> None:
        """After ``refuse``: listen again."""
        with self._lock:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self._selector.register(self._listener, selectors.EVENT_READ)

    def close(self) -> None:
        self._closed = True
        self.thaw()
        self._thread.join()
        self.refuse()
        for each in self._forgotten:
            each.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._closed:
            self._flowing.wait()
            for key, _ in self._selector.select(_LOOK_EVERY_S):
                with self._lock:
                    self._serve(key.fileobj)

    def _serve(self, ready: object) -> None:
        if ready is self._listener:
            self._connect()
        elif isinstance(ready, socket.socket) and ready in self._peers:
            try:
                data = ready.recv(_CHUNK_BYTES)
                if data:
                    self._peers[ready].sendall(data)
                    return
            except OSError:
                pass
            self._drop(ready)

    def _connect(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(("127.0.0.1", self._target), timeout=5)
        except OSError:
            client.close()
            return
        self._peers |= {client: server, server: client}
        for each in (client, server):
            self._selector.register(each, selectors.EVENT_READ)

    def _drop(self, one: socket.socket) -> None:
        other = self._peers.pop(one, None)
        if other is not None:
            del self._peers[other]
            self._end(one)
            self._end(other)

    def _end(self, one: socket.socket) -> None:
        if one in self._selector.get_map():
            self._selector.unregister(one)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        one.close()
