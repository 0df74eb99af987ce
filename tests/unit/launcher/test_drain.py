"""``baton drain`` against what web says, look by look."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from app.launcher.drain import GONE, DrainRefused, drain
from app.settings import load_settings

Said = tuple[int, dict[str, Any]]

SETTINGS = load_settings()
AWAY: Said = (503, {"error": {"message": "the ledger does not answer"}})


def node(health: str, incarnation: str = "i1", name: str = "decode1@h") -> dict[str, Any]:
    return {"name": name, "incarnation": incarnation, "health": health}


def listed(*nodes: dict[str, Any]) -> Said:
    return 200, {"nodes": list(nodes)}


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Has web answer these, one after the other, and the last from then on; returns the paths that it was asked."""

    def answering(*answers: Said) -> list[str]:
        left, asked = list(answers), list[str]()

        def get_json(_: object, path: str, method: str = "GET") -> Said:
            asked.append(f"{method} {path}")
            return left.pop(0) if len(left) > 1 else left[0]

        monkeypatch.setattr("app.launcher.drain.get_json", get_json)
        return asked

    monkeypatch.setattr("app.launcher.drain._LOOK_EVERY_S", 0.0)
    return answering


def test_a_drain_is_over_when_the_node_holds_nothing_and_not_before(web: Callable[..., list[str]]) -> None:
    asked = web((200, node("draining")), listed(node("draining")), listed(node("draining")), listed(node("drained")))
    assert drain(SETTINGS, "decode1@h", 600)["health"] == "drained"
    assert asked == ["POST /cluster/nodes/decode1%40h/drain", *["GET /cluster"] * 3]


def test_a_ledger_that_is_away_for_a_moment_is_no_end_of_a_drain(web: Callable[..., list[str]]) -> None:
    asked = web((200, node("draining")), AWAY, AWAY, listed(node("drained")))
    assert drain(SETTINGS, "decode1", 600)["health"] == "drained"
    assert len(asked) == 4


def test_a_node_that_left_is_gone_though_its_successor_has_its_name(web: Callable[..., list[str]]) -> None:
    web((200, node("draining")), listed(node("draining"), node("healthy", "i2")), listed(node("healthy", "i2")))
    shown = drain(SETTINGS, "decode1", 5)
    assert (shown["incarnation"], shown["health"]) == ("i1", GONE)


def test_a_drain_that_takes_longer_than_one_waits_is_not_called_over(web: Callable[..., list[str]]) -> None:
    web((200, node("draining")), listed(node("draining")))
    assert drain(SETTINGS, "decode1", 0)["health"] == "draining"


def test_what_web_refuses_is_the_message(web: Callable[..., list[str]]) -> None:
    web((404, {"error": {"message": "no living node is called decode9"}}))
    with pytest.raises(DrainRefused, match="no living node is called decode9"):
        drain(SETTINGS, "decode9", 600)
