"""What clients do: submit, send an id again, come back with a key, leave, cancel."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import precondition

from tests.model.stepping import Stepping, step
from tests.model.wishes import ORDERS, Order

_WHICH = st.integers(0, 3)


class ClientRules(Stepping):
    """Clients may do anything at any time."""

    @step(order=ORDERS, web=_WHICH)
    def submit(self, order: Order, web: int) -> None:
        self.cluster.submit(order, web)

    @precondition(lambda self: bool(self.cluster.in_process()))
    @step(order=ORDERS, web=_WHICH, which=_WHICH)
    def submit_an_id_that_is_in_process(self, order: Order, web: int, which: int) -> None:
        uids = self.cluster.in_process()
        client_id = self.cluster.world.checker.wish_of(uids[which % len(uids)]).client_id
        self.cluster.submit(replace(order, keyed=False), web, client_id)

    @precondition(lambda self: bool(self._ended_ids()))
    @step(order=ORDERS, web=_WHICH, which=_WHICH)
    def submit_an_id_again_with_another_prompt(self, order: Order, web: int, which: int) -> None:
        ids = self._ended_ids()
        self.cluster.submit(order, web, ids[which % len(ids)])

    @precondition(lambda self: any(wish.key for wish in self.cluster.wishes))
    @step(web=_WHICH, which=_WHICH, other_body=st.sampled_from((False, False, True)))
    def attach(self, web: int, which: int, other_body: bool) -> None:
        keyed = [wish for wish in self.cluster.wishes if wish.key]
        wish = keyed[which % len(keyed)]
        prompt = (*wish.prompt, 1) if other_body else wish.prompt
        number = len(self.cluster.wishes) + 1
        self.cluster.send(replace(wish, web=self.cluster.web(web), client_id=f"r{number}", prompt=prompt))

    @precondition(lambda self: bool(self.cluster.open_streams()))
    @step(which=_WHICH)
    def client_leaves(self, which: int) -> None:
        streams = self.cluster.open_streams()
        streams[which % len(streams)].leaves()

    @precondition(lambda self: bool(self.cluster.wishes))
    @step(which=_WHICH, web=_WHICH)
    def cancel(self, which: int, web: int) -> bool:
        wishes = self.cluster.wishes[::-1]
        return self.cluster.cancel(wishes[which % len(wishes)].client_id, web)

    def _ended_ids(self) -> list[str]:
        records = self.cluster.world.ledger.store.records.values()
        return list({record.client_id: None for record in records if not record.in_process})
