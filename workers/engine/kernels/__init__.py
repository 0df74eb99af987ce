"""Compiled kernels for CPUs: C++ in ``csrc``, built once per machine by ``build``. Importing this imports no Paddle."""
