"""Processes that are started one by one, as the README's section on that says."""

from __future__ import annotations

import http.client
import json
import socket


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Web:
    def __init__(self, port: int) -> None:
        self.port = port

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, dict[str, object]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, json.dumps(body), {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def answers(self, path: str, status: int) -> bool:
        try:
            return self.ask("GET", path)[0] == status
        except (OSError, http.client.HTTPException):
            return False
