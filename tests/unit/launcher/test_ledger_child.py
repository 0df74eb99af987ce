import os
import signal
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from app.launcher.child import ChildSpec
from app.launcher.ledger_child import UNIX, embedded_server, fits_unix_socket
from app.launcher.plan import SOURCE_ROOT, ledger_spec
from tests.unit.launcher.conftest import Cluster


@pytest.fixture
def client(tmp_path: Path) -> Redis:
    return Redis.from_url(embedded_server(tmp_path / "ledger", UNIX).url, retry=Retry(NoBackoff(), 0))


def answers(client: Redis) -> bool:
    try:
        return bool(client.ping())
    except RedisError:
        return False


def start_ledger(cluster: Cluster) -> ChildSpec:
    spec = ledger_spec({"PYTHONPATH": str(SOURCE_ROOT)}, cluster.folder / "ledger", UNIX)
    cluster.supervisor.start(spec)
    return spec


def server_of(cluster: Cluster) -> int:
    (server,) = psutil.Process(cluster.supervisor.pids["valkey"]).children()
    return server.pid


def test_a_killed_server_comes_back_at_the_same_address_with_its_data(cluster: Cluster, client: Redis) -> None:
    with client:
        start_ledger(cluster)
        cluster.supervise_until(lambda: answers(client))
        client.set("key", "value")
        os.kill(server_of(cluster), signal.SIGKILL)
        cluster.supervise_until(lambda: bool(cluster.exits))
        cluster.supervise_until(lambda: answers(client))
        assert client.get("key") == b"value"


def test_the_server_ends_with_the_process_that_holds_it(cluster: Cluster, client: Redis) -> None:
    with client:
        start_ledger(cluster)
        cluster.supervise_until(lambda: answers(client))
        server = psutil.Process(server_of(cluster))
        os.kill(cluster.supervisor.pids["valkey"], signal.SIGKILL)
        cluster.supervise_until(lambda: bool(cluster.exits), restart=False)
        server.wait(5)


def test_stopping_it_is_clean(cluster: Cluster, client: Redis) -> None:
    with client:
        spec = start_ledger(cluster)
        cluster.supervise_until(lambda: answers(client))
        cluster.supervisor.stop({spec.stop_stage: 5.0})
        assert [ended.returncode for ended in cluster.exits] == [0]
        assert not (cluster.folder / "ledger" / "valkey.sock").exists()


def test_a_folder_too_deep_for_a_unix_socket_is_known_before() -> None:
    assert fits_unix_socket(Path("/home/somebody/.cache/baton/ledger"))
    assert not fits_unix_socket(Path("/" + "x" * 91))
    assert embedded_server(Path("/x"), "7001").url == "redis://127.0.0.1:7001/0"
