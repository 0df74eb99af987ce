"""The engine: continuous batching of a Llama-family model over a paged KV cache.

Sequence, scheduler and batch know no Paddle; model, ops, KV cache and loader do. Importing this package does
not import Paddle: call ``workers.engine.runtime.configure`` first, then import ``workers.engine.engine``.
"""
