"""Log lines that nobody takes hold nobody up: stderr may be a pipe whose reader is frozen, or a paused terminal."""

from __future__ import annotations

import logging
import queue
import threading
from logging.handlers import QueueHandler

MOST_LINES = 10_000
"""Lines that wait; further ones are dropped, and counted."""
FLUSH_S = 1.0


class LogLane(QueueHandler):
    """Puts lines where a thread of its own finds them, which writes them with ``target``."""

    queue: queue.Queue[logging.LogRecord]

    def __init__(self, target: logging.Handler) -> None:
        super().__init__(queue.Queue(MOST_LINES))
        self.setLevel(target.level)
        self.dropped = 0
        self._target = target
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self.queue.put_nowait(record)
        except queue.Full:
            self.dropped += 1

    def flush(self) -> None:
        """Wait until everything is written, but not for long."""
        self.written()

    def written(self) -> bool:
        """Whether everything is written; waits for it as ``flush`` does."""
        with self.queue.all_tasks_done:
            return self.queue.all_tasks_done.wait_for(lambda: not self.queue.unfinished_tasks, FLUSH_S)

    def _write(self) -> None:
        while True:
            self._target.handle(self.queue.get())
            dropped, self.dropped = self.dropped, 0
            if dropped:
                text = f"{dropped} log lines were dropped: nobody took them"
                self._target.handle(logging.LogRecord("log", logging.WARNING, __file__, 0, text, None, None))
            self.queue.task_done()


def unblock(logger: logging.Logger) -> None:
    """Let nothing that logs to ``logger`` wait for its lines to be written. Once is enough."""
    for handler in list(logger.handlers):
        if not isinstance(handler, LogLane):
            logger.removeHandler(handler)
            logger.addHandler(LogLane(handler))
