"""``python -m workers.engine.kernels.trial LIBRARY``: whether Paddle loads the kernels and they compute."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from app.errors import StartupError
from workers.engine import runtime


def main(library: str) -> int:
    """Compute one product. Prints why it does not work."""
    runtime.configure(1)
    from workers.engine.ops.compiled_ops import CompiledOps

    try:
        ops = CompiledOps(Path(library))
    except StartupError as error:
        print(error, file=sys.stderr)
        return 1
    weight = np.arange(6, dtype=np.float32).reshape(3, 2)
    found = ops.linear(ops.vector(np.ones((1, 2), np.float32)), ops.matrix([weight.astype(np.float16)])).numpy()
    if found.tolist() != [[1.0, 5.0, 9.0]]:
        print(f"the kernels compute {found.tolist()}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
