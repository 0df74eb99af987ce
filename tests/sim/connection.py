"""One client's connection to web: admission or attachment, the product's own ``Feed``, and its end.

Acts as ``web.admission`` and ``web.relay`` do.
"""

from __future__ import annotations

import queue
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from app.errors import ApiError, LedgerError, LedgerUnknown
from app.ids import choice_uid
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
    Sibling,
    Snapshot,
    SnapshotAnswer,
    Watcher,
)
from tests.sim.ledger_client import LedgerClient, Results
from tests.sim.process import Part
from web.ends import ADMISSION_UNKNOWN, Ended
from web.feeds import Feeds

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


def _key_is_free(record: SnapshotAnswer) -> bool:
    return record.state in ("ABORTED", "EXPIRED")


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
        """Of the first sequence."""
        self._mailbox = Mailbox()
        self._feeds: Feeds | None = None
        self._records: list[SnapshotAnswer] = []
        """Of the sequences that were there before and are watched by now."""
        self._tries = 0
        self._unended = len(stream.wish.choices)

    @property
    def uids(self) -> tuple[str, ...]:
        """Of all sequences; a connection hears of each."""
        return tuple(choice_uid(self.uid, index) for index in range(len(self.stream.wish.choices)))

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
        self._records = []
        for uid, choice in zip(self.uids, wish.choices, strict=True):
            web.world.submitted(uid, choice)
        admit = Admit(
            uid=self.uid,
            client_id=wish.client_id,
            prompt_ids=wish.prompt,
            sampling=wish.sampling,
            watcher=self.watcher,
            limits=wish.limits,
            key=IdempotencyKey(wish.key, wish.body) if wish.key else None,
            salt=wish.salt,
            more=tuple(
                Sibling(uid, other.prompt, other.sampling) for uid, other in zip(self.uids[1:], wish.more, strict=True)
            ),
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
            for uid in self.uids:
                self.process.world.broker.ring(self.process, Bell("prefill", uid, 1))
            self._begin()
        elif answer.status is AdmitStatus.KNOWN:
            self.uid = self.stream.uid = answer.uid
            self._attach()
        else:
            self._refuse(_REFUSALS.get(answer.status, _UNAVAILABLE))

    def _attach(self) -> None:
        """Watch the next one of those that are there."""
        uid = self.uids[len(self._records)]
        self.process.client.call((Attach(uid, self.watcher),), partial(self._attached, uid))

    def _attached(self, uid: str, results: Results) -> None:
        answer = results[0]
        in_part = bool(self._records)
        if not isinstance(answer, LedgerError) and answer.record is not None and not _key_is_free(answer.record):
            self._records.append(answer.record)
            if len(self._records) < len(self.uids):
                self._attach()
                return
            self.process.world.count("attached")
            self._begin()
            return
        if in_part:
            self.process.say_farewell(Detach(self.uid, self.watcher))
        if isinstance(answer, LedgerError):
            if isinstance(answer, LedgerUnknown):
                self.process.say_farewell(Detach(uid, self.watcher), answer.not_after_ms)
            self._refuse(_UNAVAILABLE)
        elif answer.status in (AttachStatus.REFUSED, AttachStatus.LATE):
            self._refuse(_UNAVAILABLE)
        else:
            self.admit()

    def _begin(self) -> None:
        self._feeds = Feeds(
            cast(Any, Blocking(self.process.client)),
            self.uids,
            self.watcher,
            cast(Any, self._mailbox),
            self._records,
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
        feeds = self._feeds
        try:
            while feeds is not None and self._open:
                news = feeds.next(0.0)
                if news is not None:
                    choice, progress = news
                    if progress.finish_reason is not None:
                        self._check_cached(self.uids[choice], progress.cached_tokens)
                        self._unended -= 1
                        if not self._unended:
                            self._close()
                    self.stream.receives(choice, progress.tokens, progress.finish_reason, progress.logprobs)
                elif not self._mailbox:
                    return
        except Ended as end:
            self._leave()  # the record may go on, where only this answer cannot
            self.stream.failed(end.error.code, str(end.error))
        except ApiError as error:
            self._leave()
            self.stream.failed(error.code, str(error))

    def _check_cached(self, uid: str, cached_tokens: int) -> None:
        """Usage says what the record says."""
        world = self.process.world
        record = world.ledger.store.records.get(uid)
        if record is not None and cached_tokens != record.cached_tokens:
            raise world.violation(f"told as cached: {cached_tokens}, not {record.cached_tokens}", uid)

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
        until_ms = self._feeds.attach_until_ms if self._feeds is not None else -1
        self.process.say_farewell(Detach(self.uid, self.watcher), until_ms)
