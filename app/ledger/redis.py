"""The real ledger: an EVALSHA per command on a Redis or Valkey server, one for all emissions that stand together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from redis import Redis, exceptions
from redis.backoff import NoBackoff
from redis.connection import AbstractConnection, ConnectionPool
from redis.retry import Retry

from app.errors import LedgerError, LedgerForeign, LedgerUnavailable, LedgerUnknown, StartupError
from app.ledger.api import Ledger
from app.ledger.connection import (
    Arguments,
    Lost,
    Reply,
    Server,
    exchange,
    foreign,
    load_all,
    make_pool,
    other_version,
    refused,
)
from app.ledger.ids import CALL_TTL_MS, check_ids
from app.ledger.scripts import load_scripts
from app.ledger.wire import decode, decode_emits, decode_event, encode, encode_emits
from app.protocol.commands import (
    EXEMPT_FROM_NOT_AFTER,
    Answer,
    Cluster,
    Command,
    Emit,
    EmitAnswer,
    Event,
    Holdings,
    NodeAnswer,
    Snapshot,
)
from app.settings import Settings
from app.versions import SPOKEN, Versions

logger = logging.getLogger(__name__)

_READS = (Snapshot, Holdings, Cluster)
_NO_ENTRY = (exceptions.AuthenticationError, exceptions.NoPermissionError)
_EVENTS_PER_READ = 1000
_EMITS_PER_CALL = 64
"""A step's tokens go in one call: what a call costs by itself is more than what a token does. Others wait for 2 ms."""
_MOST_COMPLAINTS = 100


def connect(settings: Settings) -> RedisLedger:
    """The ledger that ``settings`` name. Contacts the server with the first call only."""
    return RedisLedger(settings.redis_url, settings.namespace, timeout_s=settings.ledger_timeout_s)


class RedisLedger:
    """Implements ``app.ledger.api.Ledger``. Thread-safe: a pooled connection per call, none shared.

    Nothing is retried here: a repeated command is the caller's decision (rule 2).
    """

    def __init__(
        self,
        url: str,
        namespace: str,
        *,
        timeout_s: float,
        call_ttl_ms: int = CALL_TTL_MS,
        versions: Versions = SPOKEN,
    ) -> None:
        """
        Args:
            url: redis://, rediss:// or unix:///path.
            namespace: prefix of every key.
            timeout_s: connecting, and waiting for an answer.
            call_ttl_ms: how far behind the last seen ledger time a write's ``not_after`` lies.
            versions: of the data that this process reads.
        """
        self._versions = versions
        self._url = url
        self._prefix = f"{namespace}:{{0}}:"
        self._timeout_s = timeout_s
        self._call_ttl_ms = call_ttl_ms
        self._server = Server(url, self._prefix, timeout_s, versions)
        self._events: tuple[int, ConnectionPool] | None = None
        self._complaints: set[str] = set()

    def execute(self, command: Any) -> Any:
        (result,) = self._run([command])
        if isinstance(result, LedgerError):
            raise result
        return result

    def execute_many(self, commands: Sequence[Command]) -> list[Answer | LedgerError]:
        return self._run(list(commands)) if commands else []

    def read_events(self, web: str, after: str, block_ms: int) -> list[tuple[str, Event]]:
        arguments: Arguments = ("COUNT", _EVENTS_PER_READ)
        if block_ms > 0:  # BLOCK 0 would wait for ever
            arguments += ("BLOCK", block_ms)
        pool = self._event_pool(block_ms)
        try:
            connection = pool.get_connection()
            try:
                key = f"{self._prefix}events:{web}"
                connection.send_command("XREAD", *arguments, "STREAMS", key, after)
                reply = connection.read_response()
            finally:
                pool.release(connection)
        except (exceptions.RedisError, OSError) as error:
            raise LedgerUnavailable(f"ledger: {error}") from error
        if not reply:
            return []
        return [(entry_id.decode(), self._event(fields[1])) for entry_id, fields in reply[0][1]]

    def close(self) -> None:
        self._server.close()
        if self._events:
            self._events[1].disconnect()

    def _event(self, text: bytes) -> Event:
        """One that is not understood becomes one of no request: it was only a wake-up, and those behind it count."""
        try:
            return decode_event(text)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            self._complain(LedgerForeign(f"ledger: an event is not understood: {problem!r}"))
            return Event(uid="", index=0, tokens=())

    def _event_pool(self, block_ms: int) -> ConnectionPool:
        """A client of its own, whose socket timeout lies above the block time."""
        if self._events is None or self._events[0] != block_ms:
            timeout_s = max(block_ms, 0) / 1000 + self._timeout_s
            pool = make_pool(self._url, socket_timeout_s=timeout_s, connect_timeout_s=self._timeout_s)
            self._events = (block_ms, pool)
        return self._events[1]

    def _run(self, commands: list[Command]) -> list[Answer | LedgerError]:
        for command in commands:
            check_ids(command)
        not_after_ms = 0
        try:
            with self._server.connection() as connection:
                if any(type(command) not in EXEMPT_FROM_NOT_AFTER for command in commands):
                    not_after_ms = self._server.time_ms(connection) + self._call_ttl_ms
                calls = _in_calls(commands)
                replies = self._exchange(connection, [self._call(call, not_after_ms) for call in calls])
        except LedgerError as error:  # nothing was sent
            self._complain(error)
            return [error] * len(commands)
        return [
            result
            for call, reply in zip(calls, replies, strict=True)
            for result in self._results(call, reply, not_after_ms)
        ]

    def _exchange(self, connection: AbstractConnection, calls: list[Arguments]) -> list[Reply]:
        replies = exchange(connection, calls)
        missing = [i for i, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
        if missing and not isinstance(replies[-1], Lost):
            # Somebody flushed the scripts; a NOSCRIPT command has certainly not run.
            load_all(connection, self._versions)
            for i, reply in zip(missing, exchange(connection, [calls[i] for i in missing]), strict=True):
                replies[i] = reply
        return replies

    def _call(self, commands: list[Command], not_after_ms: int) -> Arguments:
        first = commands[0]
        emits = [command for command in commands if isinstance(command, Emit)]
        text = encode_emits(emits) if emits else encode(first)
        exempt = type(first) in EXEMPT_FROM_NOT_AFTER
        sha = load_scripts(self._versions)[first.name].sha
        return ("EVALSHA", sha, 1, self._prefix, text, "" if exempt else not_after_ms)

    def _results(self, commands: list[Command], reply: Reply, not_after_ms: int) -> list[Answer | LedgerError]:
        """What became of the commands of one call."""
        if not isinstance(commands[0], Emit) or isinstance(reply, Exception):
            return [self._result(command, reply, not_after_ms) for command in commands]
        try:
            answers = decode_emits(reply)
            if len(answers) != len(commands):
                raise ValueError(f"{len(answers)} answers to {len(commands)} emissions")
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            return [self._not_understood(commands[0], problem)] * len(commands)
        return [
            self._seen(answer)
            if isinstance(answer, EmitAnswer)
            else self._result(command, exceptions.ResponseError(answer), not_after_ms)
            for command, answer in zip(commands, answers, strict=True)
        ]

    def _result(self, command: Command, reply: Reply, not_after_ms: int) -> Answer | LedgerError:
        """What became of one command; that of its neighbours is theirs."""
        if isinstance(reply, Exception):
            error = self._error(command, reply, not_after_ms)
            self._complain(error)
            return error
        try:
            answer = decode(command, reply)
        except (ValueError, KeyError, TypeError, AttributeError) as problem:
            return self._not_understood(command, problem)
        return self._seen(answer)

    def _not_understood(self, command: Command, problem: Exception) -> LedgerForeign:
        error = LedgerForeign(f"ledger: the answer to {command.name} is not understood: {problem!r}")
        self._complain(error)
        return error

    def _seen(self, answer: Answer) -> Answer:
        self._server.saw(answer.time_ms)
        if isinstance(answer, NodeAnswer):
            return replace(answer, run_id=self._server.run_id)
        return answer

    def _error(self, command: Command, reply: Exception, not_after_ms: int) -> LedgerError:
        if isinstance(reply, LedgerError):
            return reply
        message = f"ledger: {reply}"
        if refused(reply):
            unavailable = LedgerUnavailable(message)
            unavailable.__cause__ = reply
            return unavailable
        if str(reply).startswith("WRONGTYPE"):
            return foreign(self._prefix, f"belong to another program ({reply})")
        if str(reply).startswith("FOREIGN "):
            return other_version(self._prefix, str(reply).split()[1], self._versions)
        if not isinstance(reply, Lost):
            self._complain(LedgerError(f"{command.name}: the script failed: {reply}"))
        if isinstance(command, _READS):
            return LedgerUnavailable(message)
        return LedgerUnknown(message, not_after_ms=not_after_ms)

    def _complain(self, error: LedgerError) -> None:
        """Log once what no waiting will cure; callers repeat such calls, and each has its own way with an outage."""
        if isinstance(error, LedgerUnavailable | LedgerUnknown):
            return
        message = str(error)
        if message not in self._complaints and len(self._complaints) < _MOST_COMPLAINTS:
            self._complaints.add(message)
            logger.error("%s", message)


def _in_calls(commands: list[Command]) -> list[list[Command]]:
    """The commands in their order; emissions that follow each other share a call."""
    calls: list[list[Command]] = []
    for command in commands:
        last = calls[-1] if calls else []
        if isinstance(command, Emit) and last and isinstance(last[0], Emit) and len(last) < _EMITS_PER_CALL:
            last.append(command)
        else:
            calls.append([command])
    return calls


def check_server(settings: Settings) -> None:
    """Look once whether the server can hold a ledger; for the launcher and for workers that start.

    Raises:
        LedgerUnavailable: it cannot be reached now; that may pass.
        StartupError: waiting will not help: it may evict keys, does not let us in, or holds data of another version.
    """
    ledger = connect(settings)
    client = Redis.from_url(
        settings.redis_url,
        retry=Retry(NoBackoff(), 0),
        socket_timeout=settings.ledger_timeout_s,
        socket_connect_timeout=settings.ledger_timeout_s,
    )
    try:
        ledger.execute(Cluster())
        policy = _eviction_policy(client)
    except LedgerUnavailable as error:
        if isinstance(error.__cause__, _NO_ENTRY):
            raise StartupError(f"BATON_REDIS_URL: {error}") from error
        raise
    except (exceptions.ConnectionError, exceptions.TimeoutError) as error:
        raise LedgerUnavailable(f"ledger: {error}") from error
    except LedgerForeign as error:
        raise StartupError(str(error)) from error
    except (LedgerError, exceptions.RedisError) as error:
        raise StartupError(f"BATON_REDIS_URL: {error}") from error
    finally:
        client.close()
        ledger.close()
    if policy != "noeviction":
        raise StartupError(
            f"BATON_REDIS_URL: the server's maxmemory-policy is {policy}: it may drop records. Set it to noeviction."
        )


def _eviction_policy(client: Any) -> str:
    try:
        policy = client.config_get("maxmemory-policy").get("maxmemory-policy")
    except (exceptions.NoPermissionError, exceptions.ResponseError):
        policy = None  # CONFIG is forbidden or renamed here
    return str(policy or client.info("memory")["maxmemory_policy"])


if TYPE_CHECKING:
    _SEAM: type[Ledger] = RedisLedger
