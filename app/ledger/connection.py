"""Connections to the ledger's server: never retried, checked on every new one, and exact about what was sent."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, ConnectionPool
from redis.retry import Retry

from app.errors import LedgerForeign, LedgerUnavailable
from app.ledger.scripts import load_scripts
from app.versions import Versions

Arguments = tuple[str | bytes | int, ...]
Reply = Any
"""What the server said, the RedisError that it answered with, or what says why there is no reply: Lost, LedgerError."""

_REFUSALS = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.OutOfMemoryError,
    exceptions.AuthenticationError,
    exceptions.NoPermissionError,
    exceptions.NoScriptError,
)
_REFUSAL_CODES = ("MISCONF", "NOREPLICAS", "BUSY ", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "READONLY", "OOM")
_STALE_AFTER_S = 1.0
_MAX_CONNECTIONS = 4096


class Lost(Exception):
    """The connection broke, or no answer came in time, after something was sent. A reply, never raised."""


def refused(error: Exception) -> bool:
    """Whether the server said that it did not even begin the command."""
    return isinstance(error, _REFUSALS) or str(error).startswith(_REFUSAL_CODES)


def make_pool(url: str, *, socket_timeout_s: float, connect_timeout_s: float, **options: Any) -> ConnectionPool:
    """A pool without redis-py's ten silent retries, which would repeat commands whose outcome is unknown."""
    return ConnectionPool.from_url(
        url,
        max_connections=_MAX_CONNECTIONS,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=socket_timeout_s,
        socket_connect_timeout=connect_timeout_s,
        protocol=2,
        **options,
    )


def foreign(prefix: str, why: str, instead: str = "or remove those keys") -> LedgerForeign:
    """The error for data that are not ours to touch, with what to do."""
    return LedgerForeign(f"ledger: the keys {prefix}* {why}: set BATON_NAMESPACE to a name that is free, {instead}")


def other_version(prefix: str, version: str, ours: Versions) -> LedgerForeign:
    """The error for data of a version that this program does not read."""
    if not version.isdigit():
        return foreign(prefix, f"belong to another program (their version is {version!r})")
    age = "newer" if int(version) > ours.newest else "older"
    reads = str(ours.newest) if ours.oldest == ours.newest else f"{ours.oldest} to {ours.newest}"
    return foreign(
        prefix, f"have version {version}, {age} than this process reads ({reads})", "or run the release that wrote them"
    )


class Server:
    """The server's life that this process has met, and ledger time as last seen."""

    def __init__(self, url: str, prefix: str, timeout_s: float, versions: Versions) -> None:
        self._prefix = prefix
        self._versions = versions
        self._life = threading.Lock()
        self._run_id = ""
        self._seen = (0, float("-inf"))
        options = {} if url.startswith("unix:") else {"socket_keepalive": True}
        self._pool = make_pool(
            url,
            socket_timeout_s=timeout_s,
            connect_timeout_s=timeout_s,
            redis_connect_func=self._greet,
            **options,
        )

    @property
    def run_id(self) -> str:
        """Identity of the server's life at the newest connection."""
        return self._run_id

    @contextmanager
    def connection(self) -> Iterator[AbstractConnection]:
        """A connection that is open and checked.

        Raises:
            LedgerUnavailable: there is none; nothing was sent.
            LedgerForeign: the data there are of a version that is not read here.
        """
        try:
            connection = self._pool.get_connection()
        except (exceptions.RedisError, OSError) as error:
            raise LedgerUnavailable(f"ledger: {error}") from error
        try:
            yield connection
        finally:
            self._pool.release(connection)

    def time_ms(self, connection: AbstractConnection) -> int:
        """Ledger time, read anew if it was last seen over a second ago: an idle process must not send writes whose
        ``not_after`` has passed."""
        seen, at = self._seen
        if time.monotonic() - at > _STALE_AFTER_S:
            try:
                return self._hello(connection)
            except (exceptions.RedisError, OSError) as error:
                raise LedgerUnavailable(f"ledger: {error}") from error
        return seen

    def saw(self, time_ms: int) -> None:
        """Note the ledger time of an answer."""
        self._seen = (time_ms, time.monotonic())

    def close(self) -> None:
        self._pool.disconnect()

    def _greet(self, connection: AbstractConnection) -> None:
        """On every new connection: after a restart or failover the scripts are gone and the data may be others."""
        try:
            connection.on_connect()
            info = bytes(_ask(connection, ("INFO", "server"))).decode()
            run_id = next((line[7:].strip() for line in info.splitlines() if line.startswith("run_id:")), "")
            if run_id and run_id == self._run_id:
                return
            load_all(connection, self._versions)
            self._hello(connection)
            with self._life:
                self._run_id = run_id
        except BaseException:
            # Else redis-py would put it back into the pool, open and unchecked.
            connection.disconnect()
            raise

    def _hello(self, connection: AbstractConnection) -> int:
        arguments = (1, self._prefix, "{}", "")
        script = load_scripts(self._versions)["hello"]
        try:
            text = _ask(connection, ("EVALSHA", script.sha, *arguments))
        except exceptions.NoScriptError:
            text = _ask(connection, ("EVAL", script.text, *arguments))
        except exceptions.ResponseError as error:
            if str(error).startswith("WRONGTYPE"):
                raise foreign(self._prefix, f"belong to another program ({error})") from error
            raise
        try:
            answer = json.loads(text)
            version, time_ms = str(answer["version"]), int(answer["time_ms"])
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerForeign(f"ledger: what answers is no ledger of ours: {error!r}") from error
        if not (version.isdigit() and int(version) in self._versions):
            raise other_version(self._prefix, version, self._versions)
        self.saw(time_ms)
        return time_ms


def _ask(connection: AbstractConnection, arguments: Arguments) -> Reply:
    connection.send_packed_command(connection.pack_command(*arguments))
    return connection.read_response()


def load_all(connection: AbstractConnection, versions: Versions) -> None:
    """Load every script. Where the server refuses one, its first call says NOSCRIPT, and that it has not run."""
    exchange(connection, [("SCRIPT", "LOAD", script.text) for script in load_scripts(versions).values()])


def exchange(connection: AbstractConnection, commands: Sequence[Arguments]) -> list[Reply]:
    """Send ``commands`` in one piece and read their replies, one for each; never raises for one of them.

    What the server answered with an error has that error as its reply; what got no reply, ``Lost``: anything may have
    happened to it. ``LedgerUnavailable``: the only command was not sent completely, so the server cannot have run it.
    """
    try:
        connection.send_packed_command(connection.pack_commands(commands))
    except (exceptions.RedisError, OSError) as error:
        if len(commands) == 1:
            return [LedgerUnavailable(f"ledger: {error}")]
        return [Lost(str(error))] * len(commands)
    replies: list[Reply] = []
    for _ in commands:
        try:
            replies.append(connection.read_response())
        except exceptions.ResponseError as error:
            replies.append(error)
        except (exceptions.RedisError, OSError) as error:
            # redis-py treats a few refusals (LOADING) as broken connections and closes them: what follows is lost.
            replies.append(error if refused(error) else Lost(str(error)))
            break
    lost = Lost(f"the connection was given up: {replies[-1]}")
    return replies + [lost] * (len(commands) - len(replies))
