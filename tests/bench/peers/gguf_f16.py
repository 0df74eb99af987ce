"""A GGUF file with every matrix in float16: what llama.cpp needs to compute with the weights that others have."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize

_OF_THE_FILE = ("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count", "general.architecture", "general.file_type")
_FILE_TYPE_F16 = 1
"""LLAMA_FTYPE_MOSTLY_F16 of llama.cpp's llama.h."""


def make_f16(source: Path, target: Path) -> Path:
    """Write ``target`` unless it is there. Vectors (norms) stay float32, as llama.cpp's own converter leaves them."""
    if target.exists():
        return target
    reader = GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    unfinished = target.with_suffix(".part")
    writer = GGUFWriter(unfinished, architecture)
    for name, field in reader.fields.items():
        if name in _OF_THE_FILE:
            continue
        kind = field.types[0]
        of = field.types[-1] if kind == GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=of)
    writer.add_file_type(_FILE_TYPE_F16)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        writer.add_tensor(tensor.name, values.astype(np.float16) if values.ndim > 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)
    return target
