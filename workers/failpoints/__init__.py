"""Places where a real process stops, loses its link, or hands over wrong bytes, because a test says so.

Nothing here is imported unless ``BATON_FAILPOINTS`` names a folder; ``tests/chaos`` writes its orders there.
"""
