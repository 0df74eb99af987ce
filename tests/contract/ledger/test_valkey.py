"""The embedded server: starts, keeps its data, ends with its parent, says why it cannot start."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from app.errors import StartupError
from app.valkey import EmbeddedValkey

PARENT = """
import sys, pathlib
from app.valkey import EmbeddedValkey
server = EmbeddedValkey(pathlib.Path(sys.argv[1]))
server.start()
print(server.pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    made = EmbeddedValkey(tmp_path / "data")
    yield made
    made.stop()


def write(server: EmbeddedValkey, value: str) -> None:
    with redis.Redis.from_url(server.url) as raw:
        raw.set("key", value)


def read(server: EmbeddedValkey) -> bytes | None:
    with redis.Redis.from_url(server.url) as raw:
        value = raw.get("key")
    assert value is None or isinstance(value, bytes)
    return value


def test_data_survive_a_stop(server: EmbeddedValkey) -> None:
    server.start()
    write(server, "one")
    server.stop()
    assert server.pid == 0
    server.start()
    assert read(server) == b"one"


def test_data_survive_a_kill_and_the_stale_socket_does_not_matter(server: EmbeddedValkey) -> None:
    server.start()
    write(server, "two")
    with redis.Redis.from_url(server.url) as raw:
        raw.execute_command("WAITAOF", 1, 0, 5_000)
    os.kill(server.pid, signal.SIGKILL)
    psutil.Process(server.pid).wait(5)
    server.stop()
    server.start()
    assert read(server) == b"two"


def test_nobody_else_reaches_the_socket_and_no_port_is_open(server: EmbeddedValkey) -> None:
    server.start()
    folder = Path(server.url.removeprefix("unix://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert psutil.Process(server.pid).net_connections("inet") == []
    with redis.Redis.from_url(server.url, decode_responses=True) as raw:
        assert raw.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_a_second_server_in_the_folder_is_refused(server: EmbeddedValkey, tmp_path: Path) -> None:
    server.start()
    with pytest.raises(StartupError, match="another embedded Valkey"):
        EmbeddedValkey(tmp_path / "data").start()
    write(server, "still there")


def test_a_long_path_gets_a_short_socket_that_is_removed_again(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / ("long" * 30))
    server.start()
    write(server, "three")
    private = Path(server.url.removeprefix("unix://")).parent
    assert private.stat().st_mode & 0o777 == 0o700
    server.stop()
    assert not private.exists()


def test_a_loopback_port_can_be_had_instead(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "data", port=0)
    server.start()
    write(server, "four")
    assert server.url.startswith("redis://127.0.0.1:")
    server.stop()


def test_why_it_cannot_start_is_said(tmp_path: Path) -> None:
    holder = EmbeddedValkey(tmp_path / "one", port=0)
    holder.start()
    port = int(holder.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(StartupError, match=r"did not start.*(?i:port|listen|bind)"):
        EmbeddedValkey(tmp_path / "two", port=port).start()
    holder.stop()


def test_it_ends_with_its_parent_however_that_ends(tmp_path: Path, server: EmbeddedValkey) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "data")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert parent.stdin is not None
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    child = os.pidfd_open(pid)
    os.kill(pid, signal.SIGSTOP)
    parent.kill()
    parent.wait()
    with pytest.raises(StartupError, match="another embedded Valkey"):
        server.start()  # the old one is frozen, it could still write
    os.kill(pid, signal.SIGCONT)
    ended, _, _ = select.select([child], [], [], 5)
    os.close(child)
    parent.stdin.close()
    parent.stdout.close()
    assert ended
    server.start()  # the lock is free again
