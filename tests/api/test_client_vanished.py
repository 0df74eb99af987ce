"""Clients whose machine is gone, in network namespaces of their own: see ``vanished_clients``, which runs in one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.api.vanished_clients import CABLE, HERE, SUBNET_BITS, THERE, THERE_VARIABLE

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs network namespaces"),
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, timeout=20)


@pytest.fixture
def machines() -> Iterator[tuple[str, str]]:
    """Two network namespaces, and one cable between them. Nothing of it is in ours."""
    here, there = (f"baton-{side}-{os.getpid()}" for side in ("here", "there"))
    with ExitStack() as stack:
        for name in (here, there):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", here, "link", "add", CABLE, "type", "veth", "peer", "name", CABLE, "netns", there)
        for name, address in ((here, HERE), (there, THERE)):
            ip("-n", name, "addr", "add", f"{address}/{SUBNET_BITS}", "dev", CABLE)
            ip("-n", name, "link", "set", CABLE, "up")
        yield here, there


def test_clients_that_vanish(machines: tuple[str, str]) -> None:
    here, there = machines
    inside = Path(__file__).with_name("vanished_clients.py")
    argv = ["ip", "netns", "exec", here, sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(inside)]
    done = subprocess.run(
        argv, env=os.environ | {THERE_VARIABLE: there}, cwd=Path(__file__).parents[2], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
