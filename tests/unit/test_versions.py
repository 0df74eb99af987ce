"""How messages are written for readers of an older version."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import ValidationError

from app.protocol.messages import MESSAGES, Grant
from app.versions import SPOKEN, Since, written_as

GRANT = Grant(uid="u", attempt=1, fence="f", lease_id="l", decode_incarnation="d", decode_address="tcp://d")


class NextGrant(Grant):
    """One that the next release may send."""

    reason: Annotated[str, Since(SPOKEN.newest + 1)] = ""


def test_a_field_that_is_newer_than_the_version_is_left_out() -> None:
    message = NextGrant(**GRANT.model_dump(), reason="because")
    assert MESSAGES.validate_python(written_as(message, SPOKEN.newest)) == GRANT
    assert written_as(message, SPOKEN.newest + 1)["reason"] == "because"


@pytest.mark.parametrize("version", [SPOKEN.oldest - 1, SPOKEN.newest + 1])
def test_a_message_of_a_version_that_is_not_read_is_refused(version: int) -> None:
    with pytest.raises(ValidationError) as refusal:
        MESSAGES.validate_python(written_as(GRANT, version))
    assert [error["loc"] for error in refusal.value.errors()] == [("grant", "v")]
