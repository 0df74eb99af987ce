"""With real child processes: what is tested here is what the kernel does."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from app.errors import StartupError
from app.launcher.child import Child, ChildSpec, last_lines, new_log, trim_log
from app.launcher.plan import SOURCE_ROOT
from tests.unit.launcher.conftest import Cluster
from tests.waiting import wait_for

FOREVER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_crashing_child_is_started_again_after_growing_delays(cluster: Cluster) -> None:
    times = cluster.folder / "times"
    cluster.start(
        "crasher", f"import time; open({str(times)!r}, 'a').write(f'{{time.monotonic()}}\\n'); raise SystemExit(3)"
    )
    cluster.supervise_until(lambda: times.exists() and len(times.read_text().split()) >= 4)
    started = [float(line) for line in times.read_text().split()]
    pauses = [later - earlier for earlier, later in itertools.pairwise(started)]
    assert pauses[0] >= 0.1
    assert pauses[1] >= 0.2
    assert pauses[2] >= 0.4
    assert all(ended.returncode == 3 for ended in cluster.exits)
    assert any("exit status 3" in line for line in cluster.said)


def test_an_exit_is_reported_once_under_its_own_incarnation_and_before_the_restart(cluster: Cluster) -> None:
    cluster.start(
        "node", "import os, time; print(os.environ['BATON_INCARNATION'], flush=True); time.sleep(600)", is_node=True
    )
    first = cluster.supervisor.incarnations["node"]
    cluster.supervise_until(lambda: cluster.wrote("node", first))
    os.kill(cluster.supervisor.pids["node"], signal.SIGKILL)
    cluster.supervise_until(lambda: bool(cluster.exits))
    assert cluster.supervisor.incarnations == {}
    cluster.supervise_until(lambda: "node" in cluster.supervisor.pids)
    second = cluster.supervisor.incarnations["node"]
    assert [ended.incarnation for ended in cluster.exits] == [first]
    assert first != second
    cluster.supervise_until(lambda: cluster.wrote("node", second))


def test_a_child_that_is_no_node_has_no_incarnation(cluster: Cluster) -> None:
    cluster.start("beat", "import os; print('BATON_INCARNATION' in os.environ, flush=True)")
    cluster.supervise_until(lambda: bool(cluster.exits), restart=False)
    assert cluster.wrote("beat", "False")
    assert cluster.exits[0].incarnation == ""


def test_an_exit_is_seen_at_once(cluster: Cluster) -> None:
    cluster.start("node", FOREVER)
    cluster.supervise_until(lambda: cluster.wrote("node", "up"))
    os.kill(cluster.supervisor.pids["node"], signal.SIGKILL)
    before = time.monotonic()
    while not cluster.supervisor.poll(restart=False):
        cluster.supervisor.wait(30.0)
    assert time.monotonic() - before < 1.0


def test_without_restart_an_exit_is_final(cluster: Cluster) -> None:
    cluster.start("once", "raise SystemExit(1)")
    cluster.supervise_until(lambda: bool(cluster.exits), restart=False)
    cluster.supervisor.poll(restart=True)
    assert cluster.supervisor.pids == {}


def test_what_a_child_leaves_in_its_process_group_ends_with_it(cluster: Cluster) -> None:
    code = (
        f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {FOREVER!r}])\n"
        "print('pid', child.pid, flush=True); child.wait()"
    )
    cluster.start("parent", code)
    cluster.supervise_until(lambda: cluster.wrote("parent", "up") and cluster.wrote("parent", "pid"))
    words = cluster.supervisor.log_of("parent").read_text().split()
    grandchild = int(words[words.index("pid") + 1])
    os.kill(cluster.supervisor.pids["parent"], signal.SIGKILL)
    cluster.supervise_until(lambda: bool(cluster.exits), restart=False)
    cluster.supervise_until(lambda: gone(grandchild))


def test_stages_stop_in_order_and_each_child_may_finish(cluster: Cluster) -> None:
    order = cluster.folder / "order"
    for name, stage in (("ledger", 2), ("web", 0), ("worker", 1)):
        cluster.start(
            name,
            "import signal, sys, time\n"
            f"def stop(*_): time.sleep(0.2); open({str(order)!r}, 'a').write('{name} '); sys.exit()\n"
            "signal.signal(15, stop); print('up', flush=True); time.sleep(600)",
            stage=stage,
        )
    cluster.supervise_until(lambda: all(cluster.wrote(n, "up") for n in ("ledger", "web", "worker")))
    cluster.supervisor.stop({0: 10.0, 1: 10.0, 2: 10.0})
    assert order.read_text().split() == ["web", "worker", "ledger"]
    assert [ended.returncode for ended in cluster.exits] == [0, 0, 0]


def test_a_child_that_ignores_sigterm_is_killed_when_its_time_is_up(cluster: Cluster) -> None:
    cluster.start("stubborn", STUBBORN)
    cluster.supervise_until(lambda: cluster.wrote("stubborn", "up"))
    before = time.monotonic()
    cluster.supervisor.stop({0: 0.3})
    assert 0.3 <= time.monotonic() - before < 2.0
    assert cluster.exits[0].reason == "SIGKILL"
    assert any("stubborn did not stop in time" in line for line in cluster.said)


def test_only_what_can_is_hurried_and_with_all_of_its_process_group(cluster: Cluster) -> None:
    """One takes its drain's time, with a child of its own; the other would dump core."""
    sleeper = "import time; print('up', flush=True); time.sleep(600)"
    quitter = f"import signal, sys; signal.signal(3, lambda *_: sys.exit()); {sleeper}"
    code = (
        f"import signal, subprocess, sys; signal.signal(15, signal.SIG_IGN)\n"
        f"child = subprocess.Popen([sys.executable, '-c', {quitter!r}]); sys.exit(child.wait())"
    )
    slow = "import signal, sys, time; signal.signal(15, lambda *_: (time.sleep(0.8), sys.exit())); " + sleeper
    cluster.start("hurries", code, hurries=True)
    cluster.start("does not", slow)
    cluster.supervise_until(lambda: cluster.wrote("hurries", "up") and cluster.wrote("does not", "up"))
    before = time.monotonic()
    cluster.supervisor.stop({0: 20.0}, hurry_after_s=0.3)
    assert 0.3 <= time.monotonic() - before < 10.0
    assert {ended.name: ended.reason for ended in cluster.exits} == {
        "hurries": "SIGQUIT",
        "does not": "exit status 0",
    }


def test_a_second_request_to_stop_kills_at_once(cluster: Cluster) -> None:
    cluster.start("stubborn", STUBBORN)
    cluster.start("later", STUBBORN, stage=1)
    cluster.supervise_until(lambda: cluster.wrote("stubborn", "up") and cluster.wrote("later", "up"))
    os.kill(os.getpid(), signal.SIGINT)
    assert cluster.wakeup.stops == 1
    interrupter = subprocess.Popen(
        [sys.executable, "-c", f"import os, time; time.sleep(0.5); os.kill({os.getpid()}, 2)"]
    )
    before = time.monotonic()
    cluster.supervisor.stop({0: 60.0, 1: 60.0})
    assert time.monotonic() - before < 5.0
    assert cluster.supervisor.pids == {}
    interrupter.wait()


def test_a_restart_that_waits_is_forgotten_by_stop(cluster: Cluster) -> None:
    cluster.start("crasher", "raise SystemExit(1)")
    cluster.supervise_until(lambda: bool(cluster.exits))
    cluster.supervisor.stop({0: 1.0})
    cluster.wakeup.wait(0.15)  # longer than the restart delay
    cluster.supervisor.poll(restart=True)
    assert cluster.supervisor.pids == {}


def test_children_of_a_launcher_that_was_killed_end(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            (
                "import sys, time\n"
                "from pathlib import Path\n"
                "from app.launcher.child import ChildSpec\n"
                "from app.launcher.supervisor import Supervisor\n"
                "from app.launcher.wakeup import Wakeup\n"
                f"folder = Path({str(tmp_path)!r})\n"
                "with Wakeup.listen() as wakeup:\n"
                "    supervisor = Supervisor(wakeup, folder, folder, lambda ended: None, print)\n"
                "    for name in ('one', 'two'):\n"
                f"        supervisor.start(ChildSpec(name, (sys.executable, '-c', {STUBBORN!r}), {{}}))\n"
                "    while not all('up' in supervisor.log_of(n).read_text() for n in ('one', 'two')):\n"
                "        supervisor.wait(0.05)\n"
                "    print(*supervisor.pids.values(), flush=True)\n"
                "    supervisor.wait(600)\n"
            ),
        ],
        cwd=SOURCE_ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    with launcher.stdout:
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 2
        assert not any(gone(pid) for pid in pids)
        launcher.kill()
        launcher.wait()
    wait_for(lambda: all(gone(pid) for pid in pids))


def test_a_child_whose_launcher_is_gone_already_does_not_start(tmp_path: Path) -> None:
    wrapper = SOURCE_ROOT / "app" / "parent_death.py"
    marker = tmp_path / "ran"
    done = subprocess.run(
        [sys.executable, str(wrapper), "1", "9", sys.executable, "-c", f"open({str(marker)!r}, 'w')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "has ended" in done.stderr
    assert not marker.exists()


def test_a_program_that_does_not_exist_ends_with_a_line_in_its_log(cluster: Cluster) -> None:
    cluster.supervisor.start(ChildSpec("ghost", ("/no/such/program",), {}))
    cluster.supervise_until(lambda: bool(cluster.exits), restart=False)
    assert last_lines(cluster.supervisor.log_of("ghost")) == ["cannot run /no/such/program: No such file or directory"]


def test_a_child_that_the_system_refuses_is_a_startup_error(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="ghost cannot be started"):
        Child(ChildSpec("ghost", ("/bin/true",), {}), tmp_path / "no such folder", tmp_path / "ghost.log")


def test_a_new_log_keeps_the_last_run_and_a_large_one_is_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, old = tmp_path / "web.log", tmp_path / "web.log.1"
    log.write_text("last run\n")
    new_log(log)
    assert (log.read_text(), old.read_text()) == ("", "last run\n")
    with log.open("a") as writer:
        writer.write("x" * 100)
        writer.flush()
        trim_log(log)
        assert log.stat().st_size == 100
        monkeypatch.setattr("app.launcher.child._LOG_KEPT_BYTES", 50)
        trim_log(log)
        writer.write("after")
    assert (log.read_text(), old.read_text()) == ("after", "x" * 100)
