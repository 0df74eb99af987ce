"""A decode node that holds several leases: none of them counts for an attempt that is not its own."""

from __future__ import annotations

import pytest

from app.protocol.commands import ActivateStatus, FailStatus
from tests.contract.ledger.support import World


@pytest.fixture(autouse=True)
def _two_leases_of_one_node(world: World, cluster: None) -> None:
    for uid, fence, lease in (("u", "f", "l"), ("v", "g", "m")):
        world.prefilling(uid, fence)
        world.reserve(lease, uid)


def test_an_attempt_is_activated_in_its_own_lease_only(world: World) -> None:
    assert world.activate("u", lease="m").status is ActivateStatus.FENCED
    assert (world.state("u"), world.lease_state("l"), world.lease_state("m")) == ("PREFILLING", "RESERVED", "RESERVED")


def test_an_attempt_is_failed_with_its_own_lease_only(world: World) -> None:
    assert world.fail("u", node="d", lease="m").status is FailStatus.FENCED
    assert (world.state("u"), world.lease_state("l"), world.lease_state("m")) == ("PREFILLING", "RESERVED", "RESERVED")
