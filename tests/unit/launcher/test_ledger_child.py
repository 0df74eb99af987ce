import os
import signal
import time
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from app.errors import StartupError
from app.launcher.child import ChildSpec
from app.launcher.launch import Launch, Stopped
from app.launcher.ledger_child import UNIX, embedded_server, fits_unix_socket
from app.launcher.model_facts import ModelFacts
from app.launcher.plan import SOURCE_ROOT, Nodes, ledger_spec
from app.launcher.wakeup import Wakeup
from app.settings import load_settings
from app.valkey import EmbeddedValkey
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
    spec = ledger_spec({"PYTHONPATH": str(SOURCE_ROOT)}, cluster.folder / "ledger", UNIX, 30.0)
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


def data_that_load_in(folder: Path, seconds: float) -> None:
    """An append-only file of a last run: the server executes its commands before it answers anybody."""
    words = ("DEBUG", "SLEEP", str(seconds))
    folder.mkdir()
    (folder / "appendonly.aof").write_text("*3\r\n" + "".join(f"${len(word)}\r\n{word}\r\n" for word in words))


def test_a_server_that_is_still_loading_gets_the_time_it_was_given(tmp_path: Path) -> None:
    data_that_load_in(tmp_path / "ledger", 1.5)
    impatient = EmbeddedValkey(tmp_path / "ledger", start_timeout_s=0.5)
    with pytest.raises(StartupError, match=r"does not answer after 0\.5 s"):
        impatient.start()
    patient = EmbeddedValkey(tmp_path / "ledger", start_timeout_s=20)
    began_at = time.monotonic()
    patient.start()
    took_s = time.monotonic() - began_at
    patient.stop()
    assert took_s >= 1.5


class LedgerOnly(Launch):
    """A launch that stops where the cluster would start."""

    def _prepare_model(self) -> ModelFacts:
        return ModelFacts(
            name="none", path="", weight_bytes=0, table_bytes=0, kv_bytes_per_token=0, max_position_embeddings=1
        )

    def _start_cluster(self, flower_login: str) -> None:
        raise Stopped


def launch_the_ledger(home: Path, start_timeout_s: float, said: list[str]) -> None:
    run = home / "run"
    (run / "logs").mkdir(parents=True)
    with Wakeup.listen() as wakeup:
        LedgerOnly(load_settings(home=home), Nodes(), start_timeout_s, run, wakeup, said.append).run()


@pytest.fixture
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("BATON_")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("nothing_set")
def test_a_launch_waits_for_a_ledger_that_loads_and_says_so(tmp_path: Path) -> None:
    data_that_load_in(tmp_path / "ledger", 1.5)
    said: list[str] = []
    with pytest.raises(Stopped):
        launch_the_ledger(tmp_path, 60, said)
    assert any(line.endswith("waiting for valkey") for line in said)


@pytest.mark.usefixtures("nothing_set")
def test_a_launch_gives_its_ledger_the_start_timeout_and_no_other(tmp_path: Path) -> None:
    data_that_load_in(tmp_path / "ledger", 6)
    with pytest.raises(StartupError, match="not ready after 1 s: waiting for valkey"):
        launch_the_ledger(tmp_path, 1, [])
