"""What tests of whole handoffs share: a cluster in which nothing is left of any request, and slow parts."""

from __future__ import annotations

from collections.abc import Callable

from app.protocol import effects as do
from app.protocol.decode.lease import Lease
from app.protocol.decode.lease import Phase as LeasePhase
from tests.unit.protocol.cluster import Cluster, Runner, reference

CHECK_S = 1.0
"""A node compares with the ledger so often; a little later, everything it does not hold any more is free."""


def at_rest(cluster: Cluster) -> bool:
    """All blocks free, nothing computed or copied, and nothing in the ledger but ended records and living nodes."""
    store = cluster.ledger.store
    lines = (store.queue, store.waiters, store.deadlines, store.rings, store.open_leases, store.unwatched, store.owned)
    computing = any(runner.sequences for runner in cluster.runners.values() if not runner.dead)
    return cluster.at_baseline() and not computing and not any(lines)


def come_to_rest(cluster: Cluster, within_s: float = CHECK_S + 0.5) -> None:
    """Run until nothing is left of any request; that must be so in time."""
    cluster.run(lambda: at_rest(cluster), within_s)


def expect_exact(cluster: Cluster, prompt: tuple[int, ...], max_tokens: int = 10, within_s: float = 10.0) -> None:
    """The next request gets the answer of an undisturbed run, at its first attempt, and leaves nothing."""
    uid = cluster.submit(prompt, max_tokens)
    cluster.run(cluster.ended(uid), within_s)
    assert_exact(cluster, uid, prompt, max_tokens)
    come_to_rest(cluster)


def assert_exact(cluster: Cluster, uid: str, prompt: tuple[int, ...], max_tokens: int, failures: int = 0) -> None:
    record = cluster.snapshot(uid)
    told = (record.state, record.failures, record.output_ids)
    assert told == ("FINISHED", failures, reference(prompt, max_tokens))


def leases_in(cluster: Cluster, phase: LeasePhase) -> list[Lease]:
    """What decode nodes hold in this phase."""
    held = (held for runner in cluster.runners.values() for held in runner.machine.table.values())
    return [one for one in held if isinstance(one, Lease) and one.phase is phase and not one.ending]


def take_longer(runner: Runner, part: str, seconds: float, how_often: int = 10**9) -> list[object]:
    """Let a part of a runner (``step``, ``pull``, ``seal``) begin ``seconds`` late, so many times; returns its jobs."""
    original: Callable[..., None] = getattr(runner, part)
    begun: list[object] = []

    def later(*job: object) -> None:
        begun.extend(job or (None,))
        if len(begun) > how_often:
            original(*job)
        else:
            runner.cluster.after(seconds, lambda: original(*job))

    setattr(runner, part, later)
    return begun


def finish(cluster: Cluster, *uids: str, limit_s: float = 60.0) -> None:
    cluster.run(cluster.ended(*uids), limit_s)
    cluster.run(cluster.at_baseline, 15)


def kinds(cluster: Cluster) -> list[str]:
    return [message.kind for message in cluster.sent]


def answer_late(cluster: Cluster, seconds: float, *kinds: type, node: str = "") -> None:
    """Let questions of these kinds (of one node) reach the ledger ``seconds`` late."""
    ask = cluster.ask

    def later(runner: Runner, question: do.Ask) -> None:
        if isinstance(question.command, kinds) and runner.incarnation.startswith(node):
            cluster.after(seconds, lambda: ask(runner, question))
        else:
            ask(runner, question)

    cluster.ask = later  # type: ignore[method-assign]
