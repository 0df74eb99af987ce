import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from app.errors import StartupError
from app.launcher.checks import MemoryPlan, available_memory, check_memory, free_port, make_folders
from app.launcher.lock import only_one
from app.launcher.model_facts import ModelFacts, model_facts
from app.launcher.plan import SOURCE_ROOT, Nodes
from app.launcher.up import Options, up
from app.model.config import ModelConfig
from app.settings import load_settings

MIB = 2**20
SMOLLM2 = ModelConfig.from_hf(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        yield other.getsockname()[1]


def test_a_taken_port_is_refused_by_the_name_of_its_option(taken: int) -> None:
    with pytest.raises(StartupError, match=rf"port {taken} of 127.0.0.1 is taken.*--flower-port \(BATON_FLOWER_PORT\)"):
        free_port("127.0.0.1", taken, "--flower-port")


def test_a_port_that_another_baton_has_is_refused_with_that_word() -> None:
    class Ready(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503)
            self.end_headers()
            self.wfile.write(b'{"ready": false, "reasons": ["no decode node"]}')

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        with pytest.raises(StartupError, match=r"is taken, by a Baton that runs already: choose another with --port"):
            free_port("127.0.0.1", server.server_address[1], "--port")
        thread.join()


def test_a_port_taken_on_one_address_is_taken_for_all_of_them(taken: int) -> None:
    with pytest.raises(StartupError, match="is taken"):
        free_port("0.0.0.0", taken, "--port")


def test_port_zero_becomes_a_free_one_and_a_free_one_stays() -> None:
    port = free_port("127.0.0.1", 0, "--port")
    assert port > 0
    assert free_port("127.0.0.1", port, "--port") == port


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_an_address_that_is_not_ours_is_refused(host: str) -> None:
    with pytest.raises(StartupError, match=host):
        free_port(host, 0, "--port")


def test_sizes_of_the_default_model() -> None:
    facts = model_facts("smollm2", "/models/smollm2", SMOLLM2)
    assert facts.weight_bytes == 134_515_008 * 4  # its published parameter count
    assert facts.kv_bytes_per_token == 46_080
    assert facts.table_bytes == 2 * 8192 * 64 * 4
    halved = model_facts("smollm2", "/models/smollm2", SMOLLM2, weight_item_bytes=2, kv_dtype="float16")
    assert halved.kv_bytes_per_token == 23_040
    assert halved.weight_bytes == 134_515_008 * 2 + 61 * 576 * 2  # two norms in each of 30 layers and one more
    assert ModelFacts.model_validate_json(facts.model_dump_json()) == facts


def test_untied_embeddings_count_twice() -> None:
    tied = model_facts("m", "/m", SMOLLM2)
    untied = model_facts("m", "/m", ModelConfig(**{**vars(SMOLLM2), "tie_word_embeddings": False}))
    assert untied.weight_bytes - tied.weight_bytes == 49152 * 576 * 4


def test_memory_is_counted_per_node_and_refused_with_the_options_that_help() -> None:
    plan = MemoryPlan.of(load_settings(num_blocks=1024), model_facts("m", "/m", SMOLLM2), kv_nodes=3)
    assert plan.pool_bytes == 720 * MIB
    assert plan.needed_bytes == 3 * (720 * MIB + 134_515_008 * 4 + 4 * MIB + 400 * MIB) + 600 * MIB
    check_memory(plan, plan.needed_bytes)
    with pytest.raises(StartupError, match=r"not enough memory: 3 nodes.*lower --num-blocks, --prefill or --decode"):
        check_memory(plan, plan.needed_bytes - 1)


def cgroup(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_a_limit_of_any_enclosing_control_group_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    cgroup(root / "outer/inner", {"memory.max": "max\n", "memory.current": "1", "memory.stat": ""})
    assert available_memory(root, membership) > 500 * MIB
    outer = {"memory.max": f"{500 * MIB}\n", "memory.current": f"{450 * MIB}\n"}
    cgroup(root / "outer", {**outer, "memory.stat": f"anon 5\ninactive_file {100 * MIB}\n"})
    assert available_memory(root, membership) == 150 * MIB


def test_the_limit_of_a_container_and_of_the_older_control_groups_count(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/\n")
    cgroup(root, {"memory.max": f"{300 * MIB}", "memory.current": f"{100 * MIB}", "memory.stat": ""})
    assert available_memory(root, membership) == 200 * MIB
    membership.write_text("4:memory:/docker/abc\n3:cpu:/docker/abc\n")
    old = {"memory.limit_in_bytes": f"{80 * MIB}", "memory.usage_in_bytes": f"{30 * MIB}", "memory.stat": ""}
    cgroup(root / "memory/docker/abc", old)
    assert available_memory(root, membership) == 50 * MIB


def test_without_control_groups_the_machine_counts(tmp_path: Path) -> None:
    assert available_memory(tmp_path, tmp_path / "none") > 0


def test_a_folder_that_cannot_be_made_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="choose another BATON_HOME"):
        make_folders(tmp_path / "file" / "home")


def test_folders_are_for_their_owner_only(tmp_path: Path) -> None:
    make_folders(tmp_path / "run" / "logs")
    assert (tmp_path / "run" / "logs").stat().st_mode & 0o077 == 0


def test_a_second_launcher_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    lock = tmp_path / "run" / "lock"
    lock.parent.mkdir()
    with (
        only_one(lock),
        pytest.raises(StartupError, match=rf"runs already: another `baton up` \(pid {os.getpid()}\) uses {tmp_path}"),
        only_one(lock),
    ):
        pytest.fail("both held it")
    assert not lock.exists()


def test_a_second_launcher_hears_of_the_first_and_not_of_its_ports(tmp_path: Path, taken: int) -> None:
    make_folders(tmp_path / "run")
    options = Options(Nodes(), 1.0)
    with only_one(tmp_path / "run" / "lock"), pytest.raises(StartupError, match=r"^Baton runs already"):
        up(load_settings(home=tmp_path, port=taken), options, print)
    with pytest.raises(StartupError, match=f"port {taken} of 127.0.0.1 is taken"):
        up(load_settings(home=tmp_path, port=taken), options, print)


def test_the_lock_is_gone_after_a_launch_that_failed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with pytest.raises(StartupError, match="no model"), only_one(lock):
        raise StartupError("no model")
    assert not lock.exists()


def test_the_lock_of_a_killed_launcher_is_free(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    code = (
        "import subprocess, sys; from pathlib import Path; from app.launcher.lock import only_one\n"
        f"with only_one(Path({str(lock)!r})):\n"
        "    child = subprocess.Popen(['/bin/sleep', '60'], stdout=subprocess.DEVNULL)\n"
        "    print(child.pid, flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code], cwd=SOURCE_ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdin is not None
    with holder.stdout, holder.stdin:
        child = int(holder.stdout.readline())
        try:
            with pytest.raises(StartupError, match=f"pid {holder.pid}"), only_one(lock):
                pytest.fail("both held it")
            holder.kill()
            holder.wait()
            with only_one(lock):  # although its child still lives
                assert lock.read_text() == f"{os.getpid()}\n"
        finally:
            os.kill(child, 9)
