"""The Celery side: prefill, decode and control workers. Imports ``app``, never ``web``.

``pool`` is the Celery pool · ``host`` runs one node: its machine, engine, mover, link and ledger, a lane (thread)
each · ``prefill``, ``decode`` and ``control`` are the thin tasks · ``engine`` computes.
"""
