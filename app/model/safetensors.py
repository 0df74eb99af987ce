"""Read and write ``*.safetensors`` one tensor at a time, through the page cache.

The safetensors package cannot hand bfloat16 to numpy; the format is simple enough to read here: 8 bytes of header
length (little-endian), a JSON header, then the bytes of the tensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import ModelError

Array = npt.NDArray[np.float32]

_ITEM_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: ``start`` is a byte offset in ``file``."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Return the tensors of one file by name, every offset checked against the file's size.

    Raises:
        ModelError: the file cannot be read, is truncated, or is no safetensors file.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ModelError(f"{file}: truncated, or not a safetensors file")
            header = json.loads(stream.read(length))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file}: not a safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ModelError(f"{file}: not a safetensors file: the header is no object")
    header.pop("__metadata__", None)
    return {name: _tensor_info(file, name, entry, 8 + length, size) for name, entry in header.items()}


def _tensor_info(file: Path, name: str, entry: Any, base: int, size: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(int(n) for n in entry["shape"]), entry["data_offsets"]
        sane = 0 <= begin <= end and min(shape, default=0) >= 0
    except (TypeError, KeyError, ValueError) as error:
        raise ModelError(f"{file}: tensor {name}: broken header entry") from error
    if not sane:
        raise ModelError(f"{file}: tensor {name}: broken header entry")
    if base + end > size:
        raise ModelError(f"{file}: truncated: tensor {name} ends at byte {base + end}, the file has {size}")
    if dtype in _ITEM_BYTES and prod(shape) * _ITEM_BYTES[dtype] != end - begin:
        raise ModelError(f"{file}: tensor {name}: {end - begin} bytes do not hold {dtype} {list(shape)}")
    return TensorInfo(file, str(dtype), shape, base + begin, end - begin)


def read_tensor(info: TensorInfo) -> Array:
    """Return one tensor as float32. F32 comes as a read-only view into the page cache, the others as copies."""
    raw = read_raw(info)
    if info.dtype == "F32":
        array: Array = raw.view(np.float32).reshape(info.shape)
        return array if array.flags.aligned else array.copy()
    if info.dtype == "F16":
        return raw.view(np.float16).astype(np.float32).reshape(info.shape)
    if info.dtype == "BF16":  # the upper half of a float32
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(info.shape)
    raise ModelError(f"{info.file}: dtype {info.dtype} is not supported; supported: {', '.join(_ITEM_BYTES)}")


def read_raw(info: TensorInfo) -> npt.NDArray[np.uint8]:
    """Return the bytes of one tensor as a read-only view into the page cache."""
    if info.nbytes == 0:
        return np.empty(0, np.uint8)
    try:
        return np.memmap(info.file, np.uint8, mode="r", offset=info.start, shape=(info.nbytes,)).view(np.ndarray)
    except (OSError, ValueError) as error:
        raise ModelError(f"{info.file}: cannot be mapped: {error}") from error


def write_safetensors(file: Path, shapes: Mapping[str, tuple[int, ...]], chunks: Iterable[Array]) -> None:
    """Write float32 tensors in the order of ``shapes``; ``chunks`` are their values, end to end, in pieces of any size.

    Raises:
        ValueError: ``chunks`` hold fewer or more values than ``shapes`` say.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + prod(shape) * 4
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-(8 + len(encoded)) % _ALIGN_BYTES)  # so that a mapped tensor is an aligned array
    with file.open("wb") as stream:
        stream.write(len(encoded).to_bytes(8, "little") + encoded)
        written = sum(stream.write(np.ascontiguousarray(chunk, "<f4").data.cast("B")) for chunk in _nonempty(chunks))
        if written != offset:
            raise ValueError(f"{file}: {written} bytes written, {offset} announced")


def _nonempty(chunks: Iterable[Array]) -> Iterator[Array]:
    return (chunk for chunk in chunks if chunk.size)
