"""Whose data they are: another version's or another program's are refused with what to do, and are not touched."""

from __future__ import annotations

import pytest
import redis

from app.errors import LedgerForeign, StartupError
from app.ledger.redis import check_server
from app.protocol.commands import Cluster, Snapshot
from app.settings import Settings
from app.valkey import EmbeddedValkey
from app.versions import SPOKEN
from tests.contract.ledger.conftest import OpenLedger
from tests.contract.ledger.worlds import ValkeyWorld


def everything(raw: redis.Redis) -> dict[bytes | str, bytes | None]:
    return {key: raw.dump(key) for key in sorted(raw.keys())}


@pytest.mark.parametrize(
    ("version", "words"), [(SPOKEN.newest + 1, "newer"), (SPOKEN.oldest - 1, "older"), ("x", "another program")]
)
def test_data_of_another_version_are_refused_with_what_to_do(
    own: EmbeddedValkey, open_ledger: OpenLedger, version: int | str, words: str
) -> None:
    with redis.Redis.from_url(own.url) as raw:
        raw.hset("own:{0}:clock", "version", str(version))
        before = everything(raw)
        with pytest.raises(LedgerForeign, match=rf"own:\{{0\}}:.*{version}.*BATON_NAMESPACE") as foreign:
            open_ledger(own.url).execute(Snapshot("u"))
        assert words in str(foreign.value)
        assert everything(raw) == before


def test_every_name_that_we_use_is_looked_at_before_a_namespace_counts_as_empty(
    real: ValkeyWorld, own: EmbeddedValkey, open_ledger: OpenLedger
) -> None:
    real.cluster()
    real.prefilling("u", "f", grace_ms=1000)
    real.reserve("l")
    real.detach("u")
    real.prefilling("v", "g")
    real.admit("x")
    real.abort("y")
    real.exit("nobody")
    real.fail("u", avoid=True)
    real.reserve("l2", "v")
    real.prefilling("z", "h")
    names = {key.removeprefix(real.prefix) for key in real.raw.scan_iter(f"{real.prefix}*")}
    fixed = {name for name in names if ":" not in name}
    assert len(fixed) == 14
    with redis.Redis.from_url(own.url) as raw:
        for name in fixed:
            raw.flushall()
            raw.restore(f"own:{{0}}:{name}", 0, _dump(real, name))
            if name == "clock":
                raw.hdel("own:{0}:clock", "version")
                raw.hset("own:{0}:clock", "schema", "1.0")
            before = everything(raw)
            with pytest.raises(LedgerForeign, match=r"another program.*BATON_NAMESPACE"):
                open_ledger(own.url).execute(Cluster())
            assert everything(raw) == before


def _dump(real: ValkeyWorld, name: str) -> bytes:
    with redis.Redis.from_url(real.url) as raw:
        value = raw.dump(f"{real.prefix}{name}")
    assert isinstance(value, bytes)
    return value


def test_a_key_of_another_type_is_foreign(own: EmbeddedValkey, open_ledger: OpenLedger) -> None:
    with redis.Redis.from_url(own.url) as raw:
        raw.set("own:{0}:clock", "hello")
    with pytest.raises(LedgerForeign, match=r"another program.*BATON_NAMESPACE"):
        open_ledger(own.url).execute(Snapshot("u"))


def test_keys_of_others_beside_the_namespace_do_not_matter(own: EmbeddedValkey, open_ledger: OpenLedger) -> None:
    with redis.Redis.from_url(own.url) as raw:
        raw.set("own", "1")
        raw.set("own:clock", "2")
        raw.set("other:{0}:clock", "3")
    assert open_ledger(own.url).execute(Cluster()).nodes == ()


def test_an_emptied_namespace_is_ours_again_whoever_comes_first(own: EmbeddedValkey, open_ledger: OpenLedger) -> None:
    running = open_ledger(own.url)
    running.execute(Cluster())
    with redis.Redis.from_url(own.url) as raw:
        raw.flushall()
        running.execute(Cluster())  # on its old connection: nothing greets
        assert raw.hget("own:{0}:clock", "version") == str(SPOKEN.newest).encode()
    assert open_ledger(own.url).execute(Cluster()).nodes == ()


def test_a_version_that_changed_while_the_server_was_away_is_noticed(
    own: EmbeddedValkey, open_ledger: OpenLedger
) -> None:
    ledger = open_ledger(own.url, timeout_s=2)
    ledger.execute(Cluster())
    with redis.Redis.from_url(own.url) as raw:
        raw.hset("own:{0}:clock", "version", "99")
    own.stop()
    own.start()
    for _ in range(2):
        with pytest.raises(LedgerForeign):
            ledger.execute(Cluster())


def test_a_process_does_not_start_on_foreign_data(own: EmbeddedValkey) -> None:
    with redis.Redis.from_url(own.url) as raw:
        raw.hset("start:{0}:clock", "version", "99")
    with pytest.raises(StartupError, match=r"version 99, newer.*BATON_NAMESPACE"):
        check_server(Settings(redis_url=own.url, namespace="start"))
