"""From a checked request to one that the ledger has admitted, and back out when nobody waits for it any more."""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass

from app.errors import LedgerError, LedgerUnknown, Overloaded, ServiceUnavailable
from app.ids import choice_uid, draw_id
from app.protocol.commands import (
    Abort,
    Admit,
    AdmitAnswer,
    AdmitStatus,
    Attach,
    AttachAnswer,
    AttachStatus,
    Bell,
    Detach,
    IdempotencyKey,
    Limits,
    Sibling,
    SnapshotAnswer,
    Watcher,
)
from app.protocol.tables import RequestState
from app.settings import Settings
from web.ends import ADMISSION_UNKNOWN
from web.events import Mail
from web.logs import log_event
from web.params import Prepared
from web.refusals import FULL_RETRY_AFTER_S, refusal
from web.services import Services

KEY_TRIES = 3
"""The request of a key may end between being found and being attached to; so often in a row it does not."""


@dataclass(frozen=True)
class Asked:
    """What one client wants, before it is known which request answers it."""

    client_id: str
    prepared: Prepared
    key: IdempotencyKey | None
    watcher: Watcher

    def uids(self, uid: str) -> tuple[str, ...]:
        """Of all sequences of the request ``uid``."""
        return tuple(choice_uid(uid, index) for index in range(len(self.prepared.choices)))


@dataclass(frozen=True)
class Job:
    """One admitted request, with the connection that watches it."""

    uids: tuple[str, ...]
    """Of its sequences, in the order of the choices."""
    client_id: str
    """The request's own: of one that was there before, the first client's."""
    created: int
    """Unix time of its admission, by the ledger server's clock, in seconds."""
    prepared: Prepared
    watcher: Watcher
    mailbox: queue.SimpleQueue[Mail]
    records: tuple[SnapshotAnswer, ...] = ()
    """Of a request that was there before: what stood in the ledger when ``watcher`` was added."""


def admit(services: Services, client_id: str, prepared: Prepared, key: IdempotencyKey | None = None) -> Job:
    """Admit the request and ring prefill, or attach to the one that ``key`` has already.

    ``leave`` must be called with the job in the end.

    Raises:
        DuplicateRequest, IdempotencyKeyReused, Overloaded, PromptTooLong, ServiceUnavailable: nothing is left behind,
            or it will be aborted.
    """
    services.node.demand_registered()
    services.node.demand_version(prepared.needs_version)
    if services.process.drain_over:  # before that: what comes now was let in before, and finishes as what is open
        raise ServiceUnavailable("this web process is shutting down; try again", retry_after_s=1)
    if not services.seats.acquire(blocking=False):
        raise Overloaded(
            f"all {services.settings.web_threads} places of this web process are taken (BATON_WEB_THREADS)",
            retry_after_s=FULL_RETRY_AFTER_S,
        )
    try:
        asked = Asked(client_id, prepared, key, Watcher(services.node.incarnation, draw_id()))
        return _admit_or_attach(services, asked)
    except BaseException:
        services.seats.release()
        raise


def leave(services: Services, job: Job, *, ended: bool, attach_until_ms: int = -1) -> None:
    """Nobody waits for ``job`` here any more. Unless it has ended, the last watcher gone aborts it, after its grace."""
    services.node.mailboxes.close(job.uids, job.watcher.connection)
    services.seats.release()
    if not ended:
        services.node.say_farewell(Detach(job.uids[0], job.watcher), attach_until_ms)


def _admit_or_attach(services: Services, asked: Asked) -> Job:
    for _ in range(KEY_TRIES):
        uid = draw_id()
        uids = asked.uids(uid)
        mailbox = services.node.mailboxes.open(uids, asked.watcher.connection)
        try:
            answer = _admit(services, asked, uid)
        except BaseException:
            services.node.mailboxes.close(uids, asked.watcher.connection)
            raise
        if answer.status is AdmitStatus.ADMITTED:
            for each in uids:
                services.bells.ring(Bell("prefill", each, 1))
            created = answer.admitted_wall_ms // 1000
            return Job(uids, asked.client_id, created, asked.prepared, asked.watcher, mailbox)
        services.node.mailboxes.close(uids, asked.watcher.connection)
        job = _attach(services, asked, answer.uid)
        if job is not None:
            return job
    raise ServiceUnavailable("the request of this Idempotency-Key ends again and again; try again", retry_after_s=1)


def _admit(services: Services, asked: Asked, uid: str) -> AdmitAnswer:
    """ADMITTED, or KNOWN by its key; everything else is raised."""
    first, *others = asked.prepared.choices
    command = Admit(
        uid=uid,
        client_id=asked.client_id,
        prompt_ids=first.prompt_ids,
        sampling=first.sampling,
        watcher=asked.watcher,
        limits=_limits(services.settings, asked.key),
        key=asked.key,
        salt=asked.prepared.salt,
        more=tuple(
            Sibling(choice_uid(uid, index), other.prompt_ids, other.sampling) for index, other in enumerate(others, 1)
        ),
    )
    try:
        answer = services.ledger.execute(command)
    except LedgerUnknown as error:
        # By its key the client, told to try again, may attach to it: then only this connection is gone.
        farewell = Abort(uid, ADMISSION_UNKNOWN) if asked.key is None else Detach(uid, asked.watcher)
        services.node.say_farewell(farewell)
        raise _away("admission_unknown", asked, uid, error) from error
    except LedgerError as error:
        raise _away("admission_unavailable", asked, uid, error) from error
    if answer.status is AdmitStatus.ADMITTED:
        choices = asked.prepared.choices
        log_event(
            logging.INFO,
            "admitted",
            request_id=asked.client_id,
            uid=uid,
            choices=len(choices),
            prompt_tokens=sum(len(choice.prompt_ids) for choice in choices[:: asked.prepared.n]),
            max_tokens=first.sampling.max_tokens,
        )
    elif answer.status is not AdmitStatus.KNOWN:
        raise refusal(services, asked.client_id, asked.prepared, answer)
    return answer


def _attach(services: Services, asked: Asked, uid: str) -> Job | None:
    """Watch ``uid``. None if it has gone, or ended so that its key is free again."""
    uids = asked.uids(uid)
    mailbox = services.node.mailboxes.open(uids, asked.watcher.connection)
    records: list[SnapshotAnswer] = []
    try:
        for each in uids:
            record = _record_of(_ask_attach(services, asked, each))
            if record is None:
                break
            records.append(record)
    finally:
        if len(records) < len(uids):
            services.node.mailboxes.close(uids, asked.watcher.connection)
            if records:  # watched in part
                services.node.say_farewell(Detach(uid, asked.watcher))
    if len(records) < len(uids):
        return None
    first = records[0]
    log_event(logging.INFO, "attached", request_id=asked.client_id, uid=uid, of=first.client_id, state=first.state)
    created = first.timeline["queued"] // 1000
    return Job(uids, first.client_id, created, asked.prepared, asked.watcher, mailbox, tuple(records))


def _ask_attach(services: Services, asked: Asked, uid: str) -> AttachAnswer:
    try:
        return services.ledger.execute(Attach(uid, asked.watcher))
    except LedgerUnknown as error:
        services.node.say_farewell(Detach(uid, asked.watcher), error.not_after_ms)
        raise _away("attachment_unknown", asked, uid, error) from error
    except LedgerError as error:
        raise _away("attachment_unavailable", asked, uid, error) from error


def _record_of(answer: AttachAnswer) -> SnapshotAnswer | None:
    if answer.status in (AttachStatus.REFUSED, AttachStatus.LATE):
        raise ServiceUnavailable(
            f"the ledger did not take the connection ({answer.status}); try again", retry_after_s=1
        )
    record = answer.record
    if record is None or record.state in (RequestState.ABORTED, RequestState.EXPIRED):
        return None
    return record


def _away(what: str, asked: Asked, uid: str, error: LedgerError) -> ServiceUnavailable:
    log_event(logging.ERROR, what, request_id=asked.client_id, uid=uid, error=error)
    silent = "did not answer in time" if isinstance(error, LedgerUnknown) else "cannot be reached or takes no writes"
    return ServiceUnavailable(f"the ledger {silent}; try again", retry_after_s=1)


def _limits(settings: Settings, key: IdempotencyKey | None) -> Limits:
    return Limits(
        max_attempts=settings.max_attempts,
        max_queued=settings.max_queued,
        queue_timeout_ms=round(settings.queue_timeout_s * 1000),
        first_token_timeout_ms=round(settings.first_token_timeout_s * 1000),
        record_ttl_ms=round(settings.record_ttl_s * 1000),
        grace_ms=0 if key is None else round(settings.idempotency_grace_s * 1000),
        dedup_window_ms=round(settings.dedup_window_s * 1000),
    )
