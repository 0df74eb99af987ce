"""One client's connection to web: admission or attachment, the product's own ``Feed``, and its end.

Acts as ``web.admission`` and ``web.relay`` do.
"""

from __future__ import annotations

import queue
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from app.errors import ApiError, LedgerError, LedgerUnknown
from app.protocol.commands import (
    Abort,
    Admit,
    AdmitStatus,
    Attach,
    AttachStatus,
    Bell,
    Detach,
    Event,
    IdempotencyKey,
    Snapshot,
    SnapshotAnswer,
    Watcher,
)
from tests.sim.ledger_client import LedgerClient, Results
from tests.sim.process import Part
from web.ends import ADMISSION_UNKNOWN, Ended
from web.feed import Feed

if TYPE_CHECKING:
    from tests.sim.client import Stream
    from tests.sim.web import Web

_TICK_S = 0.5
"""How often a connection looks whether its client is still there."""
_KEY_TRIES = 3
_REFUSALS = {
    AdmitStatus.DUPLICATE: "duplicate_request",
    AdmitStatus.FULL: "queue_full",
    AdmitStatus.TOO_LARGE: "context_length_exceeded",
    AdmitStatus.OTHER_BODY: "idempotency_key_reused",
}
_UNAVAILABLE = "service_unavailable"


class Mailbox:
    """Events for one connection: ``queue.SimpleQueue`` without waiting, and a value that can be copied."""

    def __init__(self) -> None:
        self._mail: deque[Event | None] = deque()

    def put(self, mail: Event | None) -> None:
        self._mail.append(mail)

    def get(self, timeout: float) -> Event | None:
        if not self._mail:
            raise queue.Empty
        return self._mail.popleft()

    def __len__(self) -> int:
        return len(self._mail)


class Blocking:
    """The ledger as a feed sees it: it waits for an answer, or gets none."""

    def __init__(self, client: LedgerClient) -> None:
        self._client = client

    def execute(self, command: Snapshot | Attach) -> Any:
        return self._client.ask_now(command)


class Connection(Part):
    """From admission to the last token, the error, or the client's leaving."""

    process: Web

    def __init__(self, web: Web, stream: Stream) -> None:
        self.process = web
        self.stream = stream
        self.watcher = Watcher(web.incarnation, web.draw())
        self.uid = ""
        self._mailbox = Mailbox()
        self._feed: Feed | None = None
        self._tries = 0

    # admission

    def admit(self) -> None:
        """Ask the ledger for a place, or for the request that our key has already."""
        web, wish = self.process, self.stream.wish
        if not web.beats.registered:
            self._refuse(_UNAVAILABLE)
            return
        self._tries += 1
        if self._tries > _KEY_TRIES:
            self._refuse(_UNAVAILABLE)
            return
        self.uid = self.stream.uid = web.draw()
        web.world.submitted(self.uid, wish)
        admit = Admit(
            uid=self.uid,
            client_id=wish.client_id,
            prompt_ids=wish.prompt,
            sampling=wish.sampling,
            watcher=self.watcher,
            limits=wish.limits,
            key=IdempotencyKey(wish.key, wish.body) if wish.key else None,
            salt=wish.salt,
        )
        web.client.call((admit,), self._admitted)

    def _admitted(self, results: Results) -> None:
        answer = results[0]
        if isinstance(answer, LedgerError):
            if isinstance(answer, LedgerUnknown):
                unkeyed = not self.stream.wish.key
                farewell = Abort(self.uid, ADMISSION_UNKNOWN) if unkeyed else Detach(self.uid, self.watcher)
                self.process.say_farewell(farewell)
            self._refuse(_UNAVAILABLE)
        elif answer.status is AdmitStatus.ADMITTED:
            self.process.world.broker.ring(self.process, Bell("prefill", self.uid, 1))
            self._begin(None)
        elif answer.status is AdmitStatus.KNOWN:
            self.uid = self.stream.uid = answer.uid
            self.process.client.call((Attach(answer.uid, self.watcher),), partial(self._attached, answer.uid))
        else:
            self._refuse(_REFUSALS.get(answer.status, _UNAVAILABLE))

    def _attached(self, uid: str, results: Results) -> None:
        answer = results[0]
        if isinstance(answer, LedgerError):
            if isinstance(answer, LedgerUnknown):
                self.process.say_farewell(Detach(uid, self.watcher), answer.not_after_ms)
            self._refuse(_UNAVAILABLE)
        elif answer.status in (AttachStatus.REFUSED, AttachStatus.LATE):
            self._refuse(_UNAVAILABLE)
        elif answer.record is None:
            self.admit()
        else:
            self.process.world.count("attached")
            self._begin(answer.record)

    def _begin(self, record: SnapshotAnswer | None) -> None:
        self._feed = Feed(
            cast(Any, Blocking(self.process.client)),
            self.uid,
            self.watcher,
            cast(Any, self._mailbox),
            record,
            self.process.world.clock,
        )
        self.after(_TICK_S, self._tick)
        self._follow()

    def _refuse(self, code: str) -> None:
        self._close()
        self.stream.failed(code)

    # the answer

    def hears(self, mail: Event | None) -> None:
        """An event of this request, or (None) news that only the record can be trusted."""
        self._mailbox.put(mail)
        self._follow()

    @property
    def _open(self) -> bool:
        return self.watcher.connection in self.process.connections

    def _follow(self) -> None:
        """Hand on what there is."""
        feed = self._feed
        try:
            while feed is not None and self._open:
                progress = feed.next(0.0)
                if progress is not None:
                    if progress.finish_reason is not None:
                        self._check_cached(progress.cached_tokens)
                        self._close()
                    self.stream.receives(progress.tokens, progress.finish_reason, progress.logprobs)
                elif not self._mailbox:
                    return
        except Ended as end:
            self._leave()  # the record may go on, where only this answer cannot
            self.stream.failed(end.error.code, str(end.error))
        except ApiError as error:
            self._leave()
            self.stream.failed(error.code, str(error))

    def _check_cached(self, cached_tokens: int) -> None:
        """Usage says what the record says."""
        world = self.process.world
        record = world.ledger.store.records.get(self.uid)
        if record is not None and cached_tokens != record.cached_tokens:
            raise world.violation(f"told as cached: {cached_tokens}, not {record.cached_tokens}", self.uid)

    def _tick(self) -> None:
        if not self._open:
            return
        if self.stream.client_gone:
            self._leave()
            return
        self._follow()
        self.after(_TICK_S, self._tick)

    def _close(self) -> None:
        self.process.connections.pop(self.watcher.connection, None)

    def _leave(self) -> None:
        """Nobody waits here any more, and the request has not ended."""
        self._close()
        until_ms = self._feed.attach_until_ms if self._feed is not None else -1
        self.process.say_farewell(Detach(self.uid, self.watcher), until_ms)
