"""The engine's thread: takes sequences in and out between steps, runs the steps, tells what came of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING

from app.errors import EngineError
from app.lane import END, End, take_all
from app.protocol import effects as do
from app.protocol import events as on
from app.schemas import FinishReason

if TYPE_CHECKING:
    from workers.engine.engine import Engine
    from workers.engine.sequence import StepOutput

_LOOK_AGAIN_S = 1.0


class EngineLane:
    """Owns the engine. ``entered_at`` is the monotonic time at which the running step began, 0 between steps."""

    def __init__(
        self,
        engine: Engine,
        post: Callable[[on.Event], None],
        on_crash: Callable[[str, BaseException], None],
    ) -> None:
        self.name = "engine"
        self.entered_at = 0.0
        self._engine = engine
        self._spent_s: dict[str, float] = {}
        self._post = post
        self._on_crash = on_crash
        self._inbox: SimpleQueue[do.Start | do.Extend | do.Stop | Callable[[], None] | End] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, job: do.Start | do.Extend | do.Stop) -> None:
        """Hand over a sequence to add or to drop, or more blocks for one; never blocks."""
        self._inbox.put(job)

    def between_steps(self, what: Callable[[], None], waiting: Callable[[], None]) -> None:
        """Run ``what`` on the engine's thread, between two steps; returns when it is done.

        A step that never ends is the watchdog's business, and the engine's fault, not that of who waits here: it calls
        ``waiting`` once a second.
        """
        done = threading.Event()

        def run() -> None:
            what()
            done.set()

        self._inbox.put(run)
        while not done.wait(_LOOK_AGAIN_S):
            waiting()
            if not self.alive:
                raise RuntimeError("the engine's thread has ended")

    def close(self, timeout_s: float = 5.0) -> None:
        """End the thread after the running step."""
        self._inbox.put(END)
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            more = True
            while more:
                jobs, more = take_all(self._inbox, 0 if self._engine.has_work else None)
                for job in jobs:
                    self.entered_at = time.monotonic()
                    self._do(job)
                self.entered_at = 0.0
                if more and self._engine.has_work:
                    self._step()
        except BaseException as error:  # noqa: BLE001 - ends the process
            self._on_crash("engine", error)

    def _do(self, job: do.Start | do.Extend | do.Stop | Callable[[], None]) -> None:
        if isinstance(job, do.Stop):
            self._drop(job)
        elif isinstance(job, do.Start):
            self._add(job)
        elif isinstance(job, do.Extend):
            if job.key in self._engine:  # else it ended in the last step
                self._engine.extend(job.key, job.blocks)
        else:
            job()

    def _drop(self, job: do.Stop) -> None:
        if job.key in self._engine:  # else it ended in the last step
            self._engine.stop(job.key)
            self._spent_s.pop(job.key, None)
        self._post(on.Stopped(job.key))

    def _add(self, job: do.Start) -> None:
        work = job.work
        try:
            finish_reason = self._engine.add(
                job.key,
                work.prompt_ids,
                work.output_ids,
                work.sampling,
                job.blocks,
                num_computed=job.num_computed,
                one_token=job.one_token,
            )
        except EngineError as error:
            self._end_at_once(job, None, str(error), retry_helps=False)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others keep their tokens
            self._end_at_once(job, None, f"{type(error).__name__}: {error}")
        else:
            if finish_reason is not None:  # its output has ended the answer already
                self._end_at_once(job, finish_reason)

    def _end_at_once(
        self, job: do.Start, finish_reason: FinishReason | None, error: str = "", *, retry_helps: bool = True
    ) -> None:
        index = len(job.work.output_ids)
        self._post(on.Stepped((on.Sample(job.key, index, on.NO_TOKEN, finish_reason, error, retry_helps),)))

    def _step(self) -> None:
        took_part: list[str] = []
        self.entered_at = time.monotonic()
        outputs = self._engine.step(on_start=took_part.extend)
        took_s, self.entered_at = time.monotonic() - self.entered_at, 0.0
        for key in took_part:
            self._spent_s[key] = self._spent_s.get(key, 0.0) + took_s
        if outputs:
            self._post(on.Stepped(tuple(self._sample(output) for output in outputs)))

    def _sample(self, output: StepOutput) -> on.Sample:
        token = on.NO_TOKEN if output.token_id is None else output.token_id
        engine_s = self._spent_s[output.key]
        if output.key not in self._engine:
            del self._spent_s[output.key]
        return on.Sample(
            output.key,
            output.index,
            token,
            output.finish_reason,
            output.error or "",
            engine_s=engine_s,
            logprobs=output.logprobs,
        )
