"""Builds the compiled kernels into the user's cache, once: ``python -m workers.engine.kernels.build``.

``baton up`` and ``baton build-kernels`` run it as a process of its own; a worker that is started by hand builds them
itself. Paddle is not imported here: its headers and libraries are enough.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from app.cache import StillHeld, lock_for, making
from app.errors import StartupError
from app.launcher.kernels import ERROR, PROGRESS, RESULT
from app.settings import get_settings

Say = Callable[[str], None]

SOURCES = Path(__file__).parent / "csrc"
SOURCE_ROOT = Path(__file__).resolve().parents[3]
LIBRARY = "baton_kernels.so"
COMPILERS = ("g++", "clang++", "c++")

_LOCK_TIMEOUT_S = 600.0
_COMPILE_TIMEOUT_S = 300.0
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-pthread", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_UNITS: dict[str, tuple[str, ...]] = {"ops.cc": (), "team.cc": (), "level_portable.cc": ()}
if platform.machine() == "x86_64":
    # Each processor level is compiled for itself and chosen when the program runs: the cache may be shared.
    _UNITS |= {
        "level_avx2.cc": _AVX2,
        "level_avx512.cc": (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"),
    }
_PADDLE_LIBRARIES = ("base/libpaddle.so", "libs/libphi.so", "libs/libphi_core.so", "libs/libcommon.so")


class KernelsUnavailable(Exception):
    """The kernels cannot be had here. The message is one line: why, and what to do about it."""


@dataclass(frozen=True)
class _Paddle:
    folder: Path
    version: str


def find_kernels(mode: str, device: str, home: Path, progress: Say, warn: Say) -> Path | None:
    """The library to compute with, built now if it is not there; None: compute in pure Paddle.

    ``mode`` is BATON_KERNELS. With "auto", what stands against kernels on a CPU is one line to ``warn``.

    Raises:
        StartupError: ``mode`` is "compiled", and there are none.
    """
    if mode == "paddle" or (mode == "auto" and device != "cpu"):
        return None
    try:
        if device != "cpu":
            raise KernelsUnavailable(f"they are for CPUs, and BATON_DEVICE is {device}")
        return build_kernels(home, progress)
    except KernelsUnavailable as error:
        if mode == "compiled":
            raise StartupError(f"BATON_KERNELS=compiled: {error}") from None
        warn(f"computing in pure Paddle, which is much slower than compiled kernels: {error}")
        return None


def build_kernels(home: Path, progress: Say) -> Path:
    """Return the library in ``home/kernels``, built if it is not there. Several processes may call this at once.

    Its folder is named after sources, Paddle and compiler, and gets its name when it is complete. Without a
    compiler one that another compiler built will do.

    Raises:
        KernelsUnavailable: it is not there and cannot be built.
    """
    paddle, compiler = _find_paddle(), _find_compiler()
    root, key = home / "kernels", _key(_sources(), Path(__file__).read_bytes(), paddle.version, platform.machine())
    if compiler is None:
        for library in sorted(root.glob(f"{key}-*/{LIBRARY}")):
            return library
        raise KernelsUnavailable("there is no C++ compiler: install g++ (Debian: apt install g++)")
    target = root / f"{key}-{_key(_version_of(compiler))}"
    library = target / LIBRARY
    if library.is_file():  # complete: its folder got its name only when it was
        return library
    try:
        root.mkdir(parents=True, exist_ok=True)
        waiting = "waiting for another process that compiles them"
        with lock_for(target, _LOCK_TIMEOUT_S, lambda: progress(waiting)):
            if not library.is_file():
                _build_into(target, paddle, compiler, progress)
    except StillHeld as error:
        raise KernelsUnavailable(str(error)) from None
    except OSError as error:
        raise KernelsUnavailable(f"{root} cannot be written: {error.strerror or error}") from None
    return library


def _find_paddle() -> _Paddle:
    spec = importlib.util.find_spec("paddle")
    locations = list(spec.submodule_search_locations or []) if spec is not None else []
    if not locations:
        raise KernelsUnavailable("Paddle is not installed")
    versions = []
    for name in ("paddlepaddle", "paddlepaddle-gpu"):
        try:
            versions.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return _Paddle(Path(locations[0]), " ".join(versions))


def _find_compiler() -> str | None:
    return next((path for name in COMPILERS if (path := shutil.which(name))), None)


def _version_of(compiler: str) -> str:
    return _run([compiler, "--version"], 10.0).splitlines()[0]


def _sources() -> list[tuple[str, bytes]]:
    return [(file.name, file.read_bytes()) for file in sorted(SOURCES.iterdir()) if file.suffix in (".h", ".cc")]


def _key(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def _build_into(target: Path, paddle: _Paddle, compiler: str, progress: Say) -> None:
    """Build, and try the result out, under the lock."""
    progress("compiling for CPUs (once, 10 to 60 s)")
    with making(target) as (work, result):
        _compile(work, result / LIBRARY, paddle, compiler)
        progress("trying them out")
        _run([sys.executable, "-m", "workers.engine.kernels.trial", str(result / LIBRARY)], 120.0, cwd=SOURCE_ROOT)
    progress("ready")


def _compile(work: Path, library: Path, paddle: _Paddle, compiler: str) -> None:
    include = paddle.folder / "include"
    common = [compiler, *_FLAGS, f"-I{include}", f"-I{include / 'third_party'}", "-c"]
    objects = [str(work / f"{unit}.o") for unit in _UNITS]
    commands = [
        [*common, *flags, str(SOURCES / unit), "-o", output]
        for (unit, flags), output in zip(_UNITS.items(), objects, strict=True)
    ]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(lambda command: _run(command, _COMPILE_TIMEOUT_S), commands))
    libraries = [file for name in _PADDLE_LIBRARIES if (file := paddle.folder / name).exists()]
    # Undefined symbols would be looked up in whatever else the process has loaded.
    link = [compiler, "-shared", "-pthread", "-Wl,--no-undefined", *objects, "-o", str(library)]
    for file in libraries:
        link += [f"-L{file.parent}", f"-l:{file.name}"]
    _run(link, _COMPILE_TIMEOUT_S)


def _run(command: Sequence[str], timeout_s: float, cwd: Path | None = None) -> str:
    """What the command writes to its standard output.

    Raises:
        KernelsUnavailable: it failed; the message has the line of its errors that says most.
    """
    try:
        ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, cwd=cwd)
    except subprocess.TimeoutExpired:
        raise KernelsUnavailable(f"{command[0]} took more than {timeout_s:g} s") from None
    except OSError as error:
        raise KernelsUnavailable(f"{command[0]} cannot be run: {error.strerror}") from None
    if ran.returncode:
        lines = [line.strip() for line in (ran.stderr + ran.stdout).splitlines() if line.strip()]
        said = next((line for line in lines if "error" in line.lower()), lines[-1] if lines else "")
        raise KernelsUnavailable(f"{Path(command[0]).name} ended with {ran.returncode}: {said[:300]}")
    return ran.stdout


def main() -> int:
    """Build what BATON_KERNELS asks for and say where it is. See ``app.launcher.kernels`` for the lines."""
    settings = get_settings()

    def say(line: str) -> None:
        print(PROGRESS + line, flush=True)

    try:
        library = find_kernels(
            settings.kernels, settings.device, settings.home, say, lambda line: say("warning: " + line)
        )
    except StartupError as error:
        print(ERROR + " ".join(str(error).split()), flush=True)
        return 1
    print(RESULT + str(library or ""), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
