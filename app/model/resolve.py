"""A reference to a model → a folder that can be served, through a cache of conversions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from app.cache import StillHeld, lock_for, making
from app.errors import ModelError
from app.model.fetch import DEFAULT_MODEL, GGUF_SHA256, fetch_default_gguf
from app.model.folder import ModelFolder, open_folder

Progress = Callable[[str], None]

_FORMAT_VERSION = 1  # of a converted folder: raise it when gguf_convert writes something else
_LOCK_TIMEOUT_S = 1800  # another process fetches and converts under the lock; a large model takes minutes


def resolve_model(ref: str, home: Path, progress: Progress) -> ModelFolder:
    """Return the model that ``ref`` names: the default model's name, a .gguf file, or a folder (used in place).

    Conversions are kept in ``home/models``. Several processes may call this at once; one works, the others wait.
    A conversion that was cut short leaves nothing that a later call would use.

    Raises:
        ModelError: the message is one line that says what is wrong with which file.
    """
    if ref == DEFAULT_MODEL:
        key = _key(GGUF_SHA256)
        return _cached(DEFAULT_MODEL, key, home, progress, lambda folder: fetch_default_gguf(folder, progress))
    path = Path(ref).expanduser()
    if path.is_dir():
        return open_folder(path)
    if not path.is_file():
        raise ModelError(f"no model at {ref!r}: give a model folder, a .gguf file or {DEFAULT_MODEL!r}")
    if path.suffix != ".gguf":
        raise ModelError(f"{path}: a model file must be a .gguf file")
    path = path.resolve()
    stat = path.stat()
    return _cached(path.stem, _key(str(path), stat.st_size, stat.st_mtime_ns), home, progress, lambda _: path)


def _key(*parts: object) -> str:
    return hashlib.sha256(repr((_FORMAT_VERSION, *parts)).encode()).hexdigest()[:12]


def _cached(name: str, key: str, home: Path, progress: Progress, source: Callable[[Path], Path]) -> ModelFolder:
    models = home.expanduser() / "models"
    target = models / f"{name}-{key}"
    if target.is_dir():  # complete: it got its name only when it was
        return open_folder(target, name)
    try:
        models.mkdir(parents=True, exist_ok=True)
        waiting = "waiting for another process that prepares this model"
        with lock_for(target, _LOCK_TIMEOUT_S, lambda: progress(waiting)):
            if not target.is_dir():
                _convert_into(target, source, progress)
    except StillHeld as error:
        raise ModelError(str(error)) from error
    except OSError as error:
        raise ModelError(f"{models}: the model cache cannot be written: {error.strerror or error}") from error
    return open_folder(target, name)


def _convert_into(target: Path, source: Callable[[Path], Path], progress: Progress) -> None:
    """Fetch and convert, under the lock."""
    from app.model.gguf_convert import convert_gguf  # here: only a conversion needs the gguf package

    with making(target) as (work, result):
        convert_gguf(source(work), result, progress)
