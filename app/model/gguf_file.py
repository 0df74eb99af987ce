"""Read the metadata and the raw tensors of a GGUF file (versions 2 and 3, little-endian).

The gguf package's own reader takes seconds for a vocabulary and can loop without end on a damaged file; here every
length is checked against the bytes that are left before it is used. Layout: the GGUF specification of the ggml project.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from app.errors import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMS = 4


@dataclass(frozen=True)
class RawTensor:
    """One tensor as stored. ``shape`` is in numpy order ([out, in]); ``start`` is a byte offset in the file."""

    name: str
    qtype: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    nbytes: int


@dataclass(frozen=True)
class GgufFile:
    """A file whose header has been read. Its weights are mapped, not loaded."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, RawTensor]
    _buffer: mmap.mmap = field(repr=False)

    def rows(self, tensor: RawTensor) -> npt.NDArray[np.uint8]:
        """Return the stored bytes as [rows, bytes per row], read-only, without copying."""
        raw = np.frombuffer(self._buffer, np.uint8, tensor.nbytes, tensor.start)
        return raw.reshape(prod(tensor.shape[:-1]), -1)


def read_gguf(path: Path) -> GgufFile:
    """Read the header of ``path``.

    Raises:
        ModelError: the file cannot be read, is no GGUF file of a known version, or is truncated or damaged.
    """
    try:
        with path.open("rb") as stream:
            buffer = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelError(f"{path}: the file is empty") from error
    cursor = _Cursor(path, buffer)
    if cursor.take(4) != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file")
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise ModelError(f"{path}: GGUF version {version} is not supported (2 and 3, little-endian, are)")
    tensor_count, entry_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(cursor.count(entry_count, least_bytes=12)):
        key = cursor.text()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = [cursor.tensor() for _ in range(cursor.count(tensor_count, least_bytes=24))]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0:
        raise ModelError(f"{path}: general.alignment is {alignment!r}")
    base = -(-cursor.position // alignment) * alignment
    tensors = {}
    for info in infos:
        tensor = RawTensor(info.name, info.qtype, info.shape, base + info.start, info.nbytes)
        if tensor.start + tensor.nbytes > len(buffer):
            end = tensor.start + tensor.nbytes
            raise ModelError(f"{path}: truncated: tensor {info.name} ends at byte {end}, the file has {len(buffer)}")
        if info.name in tensors:
            raise ModelError(f"{path}: tensor {info.name} is there twice")
        tensors[info.name] = tensor
    return GgufFile(path, metadata, tensors, buffer)


class _Cursor:
    """Reads from a buffer and never past its end."""

    def __init__(self, path: Path, buffer: mmap.mmap) -> None:
        self._path = path
        self._buffer = buffer
        self.position = 0

    def damaged(self, what: str) -> ModelError:
        return ModelError(f"{self._path}: truncated or damaged: {what} at byte {self.position}")

    def take(self, nbytes: int) -> bytes:
        if nbytes > len(self._buffer) - self.position:
            raise self.damaged("the file ends too early")
        self.position += nbytes
        return self._buffer[self.position - nbytes : self.position]

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, count: int, least_bytes: int) -> int:
        """Check that ``count`` things of at least ``least_bytes`` each can still follow."""
        if count * least_bytes > len(self._buffer) - self.position:
            raise self.damaged(f"a count of {count}")
        return count

    def text(self) -> str:
        raw = self.take(self.scalar("Q"))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise self.damaged("a string that is not UTF-8") from error

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind != _ARRAY:
            raise self.damaged(f"a value of unknown type {kind}")
        item, length = self.scalar("I"), self.scalar("Q")
        if item == _STRING:
            return [self.text() for _ in range(self.count(length, least_bytes=8))]
        if item not in _SCALARS:
            raise self.damaged(f"an array of type {item}")
        code = _SCALARS[item]
        size = struct.calcsize("<" + code)
        return list(struct.unpack(f"<{length}{code}", self.take(self.count(length, size) * size)))

    def tensor(self) -> RawTensor:
        """Read one tensor entry; ``start`` is still relative to the data section."""
        name, dims = self.text(), self.scalar("I")
        if not 1 <= dims <= _MAX_DIMS:
            raise self.damaged(f"tensor {name} with {dims} dimensions")
        shape = tuple(reversed([self.scalar("Q") for _ in range(dims)]))
        number, start = self.scalar("I"), self.scalar("Q")
        try:
            qtype = GGMLQuantizationType(number)
        except ValueError as error:
            raise ModelError(f"{self._path}: tensor {name}: quantization type {number} is not supported") from error
        block, block_bytes = GGML_QUANT_SIZES[qtype]
        if min(shape) == 0 or shape[-1] % block:
            raise self.damaged(f"tensor {name} of shape {list(shape)} in blocks of {block}")
        return RawTensor(name, qtype, shape, start, prod(shape) // block * block_bytes)
