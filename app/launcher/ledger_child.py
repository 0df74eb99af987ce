"""Runs the embedded Valkey: ``python -m app.launcher.ledger_child FOLDER PORT START_TIMEOUT_S``.

Port ``unix`` is for a socket. For the supervisor it is a child like all others: SIGTERM stops it, and when the server
ends it ends too.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from app.errors import StartupError
from app.launcher.wakeup import Wakeup
from app.valkey import START_TIMEOUT_S, EmbeddedValkey

UNIX = "unix"
_SOCKET_PATH_BYTES = 90  # what a unix socket's address can hold, and some room
_LOOK_EVERY_S = 60.0


def embedded_server(folder: Path, port: str, start_timeout_s: float = START_TIMEOUT_S) -> EmbeddedValkey:
    """The server as it is run here; its ``url`` is the same at every restart."""
    return EmbeddedValkey(folder, port=None if port == UNIX else int(port), start_timeout_s=start_timeout_s)


def fits_unix_socket(folder: Path) -> bool:
    """Whether a unix socket in ``folder`` has an address short enough for the kernel."""
    return len(os.fsencode(folder)) <= _SOCKET_PATH_BYTES


def main(argv: list[str]) -> int:
    """Serve until SIGTERM. Returns 1 when the server could not start, or ended by itself."""
    server = embedded_server(Path(argv[1]), argv[2], float(argv[3]))
    with Wakeup.listen() as wakeup:
        try:
            server.start()
        except StartupError as error:
            print(error, flush=True)
            return 1
        try:
            while not wakeup.stops:
                if _has_ended(server.pid):
                    print(f"the server ended; its log is {server.log}", flush=True)
                    return 1
                wakeup.wait(_LOOK_EVERY_S)
        finally:
            server.stop()
    return 0


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


if __name__ == "__main__":
    sys.exit(main(sys.argv))
