"""The protocol, pure: no sockets, clocks, threads, randomness, Redis or Paddle.

``tables`` are the states and steps as data · ``commands`` and their answers are all that changes the ledger ·
``messages`` cross the wire between a prefill and a decode node · ``events`` go into a node machine and ``effects``
come out · ``blocks`` is the block pool, ``prefix_cache`` that of a prefill node · ``asking``, ``holding`` and ``node``
are what both machines share · ``prefill`` and ``decode`` are the two machines. Whoever runs a machine does its effects
and feeds back what came of them; the workers do it with real parts.
"""
