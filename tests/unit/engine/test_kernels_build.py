"""Building the kernels: once, whole or not at all, and one plain line where it cannot be done."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli import main
from app.errors import StartupError
from workers.engine.kernels import build
from workers.engine.kernels.build import KernelsUnavailable, build_kernels, find_kernels

Compiler = Callable[[str], Path]


def silent(_: str) -> None:
    pass


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Makes a script the only compiler there is; empty: there is none. Its calls are in ``calls``."""

    def make(script: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        if script:
            file = folder / "g++"
            calls = folder / "calls"
            version = '[ "$1" = --version ] && { echo g++ 1.2.3; exit 0; }'
            file.write_text(f'#!/bin/sh\n{version}\necho "$@" >> {calls}\n{script}\n')
            file.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/nowhere")
        return folder / "calls"

    return make


# "Compiles" by writing the path that comes last or after -o.
FAKE = 'while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done; echo library > "$out"'


@pytest.fixture
def no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script compiled cannot be tried."""
    run = build._run
    monkeypatch.setattr(
        build, "_run", lambda command, *rest, **named: "" if "-m" in command else run(command, *rest, **named)
    )


def files(home: Path) -> list[str]:
    return sorted(
        path.name for path in (home / "kernels").rglob("*") if path.is_file() and not path.name.endswith(".lock")
    )


def test_what_is_built_computes_and_is_found_again(
    tmp_path: Path, kernels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real compiler has built ``kernels``; nobody calls it for them again."""
    (tmp_path / "kernels").symlink_to(kernels.parents[1])
    monkeypatch.setattr(build, "_build_into", lambda *_: pytest.fail("built again"))
    assert build_kernels(tmp_path, silent) == tmp_path / "kernels" / kernels.parent.name / kernels.name
    ran = subprocess.run([sys.executable, "-m", "workers.engine.kernels.trial", str(kernels)], cwd=build.SOURCE_ROOT)
    assert ran.returncode == 0


def test_without_a_compiler_what_another_one_built_will_do(tmp_path: Path, kernels: Path, compiler: Compiler) -> None:
    (tmp_path / "kernels").symlink_to(kernels.parents[1])
    compiler("")
    assert build_kernels(tmp_path, silent).name == kernels.name


def test_without_a_compiler_pure_paddle_serves_with_one_line_that_says_what_to_install(
    tmp_path: Path, compiler: Compiler
) -> None:
    compiler("")
    warnings: list[str] = []
    assert find_kernels("auto", "cpu", tmp_path, silent, warnings.append) is None
    assert len(warnings) == 1
    assert "\n" not in warnings[0]
    assert "install g++" in warnings[0]
    with pytest.raises(StartupError, match=r"BATON_KERNELS=compiled: there is no C\+\+ compiler"):
        find_kernels("compiled", "cpu", tmp_path, silent, warnings.append)


def test_a_broken_compiler_is_one_line_and_leaves_nothing(tmp_path: Path, compiler: Compiler) -> None:
    compiler('echo "In file included from x:" >&2; echo "y.h:3: fatal error: no such header" >&2; exit 4')
    warnings: list[str] = []
    assert find_kernels("auto", "cpu", tmp_path, silent, warnings.append) is None
    assert len(warnings) == 1
    assert "g++ ended with 4: y.h:3: fatal error: no such header" in warnings[0]
    assert files(tmp_path) == []


def test_a_library_that_does_not_load_is_not_kept(tmp_path: Path, compiler: Compiler) -> None:
    compiler(FAKE)
    with pytest.raises(KernelsUnavailable, match="Paddle cannot load these kernels"):
        build_kernels(tmp_path, silent)
    assert files(tmp_path) == []


def test_a_compiler_that_hangs_is_not_waited_for(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("exec /bin/sleep 100")
    monkeypatch.setattr(build, "_COMPILE_TIMEOUT_S", 0.2)
    with pytest.raises(KernelsUnavailable, match=r"took more than 0\.2 s"):
        build_kernels(tmp_path, silent)


@pytest.mark.parametrize("what", ["a file", "a dangling link"])
def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path, compiler: Compiler, what: str) -> None:
    """Root may write anywhere: what is no folder stands for one that is read-only."""
    compiler(FAKE)
    if what == "a file":
        (tmp_path / "kernels").touch()
    else:
        (tmp_path / "kernels").symlink_to(tmp_path / "nothing" / "there")
    with pytest.raises(KernelsUnavailable, match=f"{tmp_path / 'kernels'} cannot be written"):
        build_kernels(tmp_path, silent)


@pytest.mark.usefixtures("no_trial")
def test_a_build_that_was_cut_short_is_no_library(tmp_path: Path, compiler: Compiler) -> None:
    calls = compiler(FAKE)
    library = build_kernels(tmp_path, silent)
    assert library.read_text() == "library\n"
    litter = library.parents[1] / f".{library.parent.name}.tmp-abc"
    library.parent.rename(litter)  # what a kill -9 before the last step leaves
    calls.unlink()
    assert build_kernels(tmp_path, silent) == library
    assert calls.exists()
    assert not litter.exists()


@pytest.mark.usefixtures("no_trial")
def test_other_sources_are_built_beside_the_old_ones(
    tmp_path: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler(FAKE)
    before = build_kernels(tmp_path, silent)
    monkeypatch.setattr(build, "_sources", lambda: [("ops.cc", b"other")])
    assert build_kernels(tmp_path, silent) != before
    assert before.exists()


def test_two_at_once_build_once(tmp_path: Path, compiler: Compiler) -> None:
    """Processes, as workers are. The first waits in the compiler until the second waits for it."""
    (tmp_path / "kernels").mkdir()
    os.mkfifo(tmp_path / "go")
    calls = compiler(f"{FAKE}; [ -p {tmp_path}/go ] && read line < {tmp_path}/go; exit 0")
    code = (
        "import sys; from pathlib import Path; from workers.engine.kernels import build\n"
        "run = build._run\n"
        "build._run = lambda command, *rest, **named: '' if '-m' in command else run(command, *rest, **named)\n"
        "print(build.build_kernels(Path(sys.argv[1]), lambda line: print(line, flush=True)), flush=True)"
    )
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=build.SOURCE_ROOT
        )
        for _ in range(2)
    ]
    try:
        said = [process.stdout.readline() for process in both if process.stdout is not None]
        assert sorted(line.split()[0] for line in said) == ["compiling", "waiting"]
        with (tmp_path / "go").open("w") as gate:
            (tmp_path / "go").unlink()  # later calls of the compiler do not wait
            gate.write("go\n" * 8)
        ends = [process.communicate(timeout=60)[0].splitlines()[-1] for process in both]
    finally:
        for process in both:
            process.kill()
    assert ends[0] == ends[1]
    assert Path(ends[0]).exists()
    assert len(calls.read_text().splitlines()) == len(build._UNITS) + 1, "each source once, and the link"


def test_on_a_gpu_there_are_none(tmp_path: Path) -> None:
    assert find_kernels("auto", "gpu:0", tmp_path, silent, lambda line: pytest.fail(line)) is None
    with pytest.raises(StartupError, match="they are for CPUs, and BATON_DEVICE is gpu:0"):
        find_kernels("compiled", "gpu:0", tmp_path, silent, silent)


def test_pure_paddle_on_demand(tmp_path: Path) -> None:
    assert find_kernels("paddle", "cpu", tmp_path, silent, lambda line: pytest.fail(line)) is None
    assert not (tmp_path / "kernels").exists()


def test_the_command_says_where_they_are_and_fails_in_one_line(
    tmp_path: Path, kernels: Path, compiler: Compiler, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full" / "kernels").parent.mkdir()
    (tmp_path / "full" / "kernels").symlink_to(kernels.parents[1])
    compiler("")
    assert main(["build-kernels", "--home", str(tmp_path / "full")]) == 0
    assert kernels.name in capsys.readouterr().out
    assert main(["build-kernels", "--home", str(tmp_path / "empty")]) == 1
    said = capsys.readouterr()
    assert said.err.count("\n") == 1
    assert "install g++" in said.err
