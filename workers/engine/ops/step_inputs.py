"""Index arrays of a step as CPU tensors, in memory that is kept: each tensor that Paddle makes of an array leaks a list
(about 120 bytes, Paddle 3), and a step has several."""

from __future__ import annotations

from typing import Any

import numpy as np
import paddle

_Array = np.ndarray[Any, np.dtype[Any]]


class InputBuffers:
    """One growing buffer per name. A step's tensors are overwritten by the next step's."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[_Array, paddle.Tensor]] = {}

    def tensor(self, name: str, array: _Array) -> paddle.Tensor:
        """``array`` in the buffer of that name, which always gets the same dtype."""
        held = self._held.get(name)
        if held is None or held[0].size < array.size:
            memory = np.empty(1 << array.size.bit_length(), array.dtype)
            held = self._held[name] = memory, paddle.utils.dlpack.from_dlpack(memory)
        held[0][: array.size] = array.reshape(-1)
        return held[1][: array.size].reshape(list(array.shape))
