"""Clients whose machine is gone, or cut off: they close nothing, and still they are not waited for.

``test_client_vanished`` runs this where the network is its own.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.protocol.commands import Work
from tests.api.server import StartWeb, Web, body
from tests.api.support import IM_END, Send, Step, ids
from tests.waiting import wait_for

NOTICED_S = 10.0
CABLE = "cable"
HERE, THERE, SUBNET_BITS = "10.213.0.1", "10.213.0.2", 24
THERE_VARIABLE = "CLIENTS_NETWORK_NAMESPACE"
"""Names the network namespace of the clients; this process runs in that of the server."""
CLIENT = """
import socket, sys
sockets = []
for request in sys.argv[3:]:
    sockets.append(socket.create_connection((sys.argv[1], int(sys.argv[2]))))
    sockets[-1].sendall(request.encode())
while True:
    print(len(sockets[-1].recv(65536)), flush=True)
"""


class Island:
    """The clients' machine, which one cable joins to ours."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace

    def client(self, web: Web, *requests: dict[str, Any]) -> subprocess.Popen[str]:
        """Sends these requests from there, a connection each, and reads the answer of the last one."""
        inside = ["ip", "netns", "exec", self._namespace]
        argv = [*inside, sys.executable, "-c", CLIENT, HERE, str(httpx.URL(web.url).port)]
        return subprocess.Popen([*argv, *map(raw, requests)], stdout=subprocess.PIPE, text=True)

    def cut(self) -> None:
        subprocess.run(["ip", "-n", self._namespace, "link", "set", CABLE, "down"], check=True, timeout=20)


def raw(request: dict[str, Any]) -> str:
    text = json.dumps(body(max_tokens=450, stream=request["stream"]))
    head = f"Host: x\r\nContent-Type: application/json\r\nX-Request-Id: {request['id']}\r\nContent-Length: {len(text)}"
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n\r\n{text}"


@pytest.fixture
def island() -> Island:
    return Island(os.environ[THERE_VARIABLE])


def test_clients_that_are_cut_off_are_noticed_and_one_that_is_there_but_reads_nothing_is_not(
    start_web: StartWeb, island: Island
) -> None:
    """With something on its way to them, or not; streamed, or not."""
    pause = threading.Event()

    def script(work: Work) -> Iterator[Step]:
        if work.client_id.startswith("quiet"):
            pause.wait(30)
        for _ in range(140 if work.client_id == "slow" else 440):
            pause.wait(0.02 if work.client_id == "stream" else 0.1)
            yield Send(ids("a"))
        yield Send([IM_END], "stop")

    web = start_web(script, BATON_HOST="0.0.0.0")
    slow = open_slowly(web, {"id": "slow", "stream": True})
    wanted = [("quiet", False), ("quiet-stream", True), ("whole", False), ("stream", True)]
    clients = island.client(web, *({"id": name, "stream": stream} for name, stream in wanted))
    try:
        assert clients.stdout is not None
        for _ in range(5):
            assert int(clients.stdout.readline()) > 0
        wait_for(lambda: {web.state(name) for name in ("slow", "whole", "stream")} == {"DECODING"})
        island.cut()
        wait_for(lambda: {web.state(name) for name, _ in wanted} == {"ABORTED"}, NOTICED_S)
        wait_for(lambda: web.state("slow") != "DECODING", 20)
        assert web.state("slow") == "FINISHED"
        answer = b"".join(iter(lambda: slow.recv(4096), b""))
        assert answer.count(b'"text":"a"') == 140
        assert b"data: [DONE]" in answer
    finally:
        pause.set()
        slow.close()
        clients.kill()
        clients.communicate()


def open_slowly(web: Web, request: dict[str, Any]) -> socket.socket:
    """A connection with little room on either side that does not read: its window is closed after some tokens."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", httpx.URL(web.url).port or 0))
    connection.sendall(raw(request).replace("Host: x", "Host: x\r\nConnection: close").encode())
    return connection
