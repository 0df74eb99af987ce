"""The engine: takes sequences with the blocks they may write, and computes them step by step."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Sequence_
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from app.errors import EngineError, StartupError
from app.kv import KVPool, kv_layout
from app.kv.layout import KVDtype, block_bytes_of
from app.protocol.blocks import blocks_for
from app.schemas import FinishReason, SamplingParams
from app.text import StopChecker
from workers.engine import chances, runtime, sampler
from workers.engine.batch import build_batch
from workers.engine.biases import add_biases, ban
from workers.engine.checks import SequenceChecks, check_limits
from workers.engine.device import set_device
from workers.engine.kv_cache import KVCache
from workers.engine.loader import WeightDtype, load_weights
from workers.engine.model import LlamaModel
from workers.engine.ops import make_ops
from workers.engine.penalties import apply_penalties
from workers.engine.scheduler import Chunk, Scheduler
from workers.engine.sequence import Sequence, StepOutput

if TYPE_CHECKING:
    from app.model.folder import ModelFolder
    from workers.engine.thread_board import ThreadBoard

Floats = npt.NDArray[np.float32]


class Engine:
    """Continuous batching over blocks that somebody else allocates. One thread calls it; it starts none.

    A prefill node adds sequences with ``one_token=True``: they are computed in chunks, draw one token, and are
    forgotten. A decode node adds them with all but their last token computed (``num_computed``). One engine
    can do both at once.

    It writes KV only into the blocks of a sequence's ``block_table``, and only within ``step``.
    """

    def __init__(
        self,
        folder: ModelFolder,
        *,
        incarnation: str,
        max_model_len: int,
        num_threads: int,
        board: ThreadBoard | None = None,
        device: str = "cpu",
        kernels: Path | None = None,
        weight_dtype: WeightDtype = "float16",
        kv_cache_dtype: KVDtype = "float32",
        block_size_tokens: int = 16,
        num_blocks: int = 1024,
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 512,
    ) -> None:
        """Load the weights and make the KV pool. ``device`` is "cpu" or "gpu:N"; ``kernels``: ``find_kernels``.

        ``board``: where it tells when it computes; compiled kernels then use the processors that others leave idle.

        Raises:
            StartupError: a value makes no sense, ``runtime.configure`` was not called, or memory is short.
            ModelError: the weights do not fit the config.
        """
        runtime.require_configured(num_threads)
        config = folder.config
        check_limits(block_size_tokens, max_num_seqs, max_num_batched_tokens, max_model_len, config)
        set_device(device)
        self.folder = folder
        self.staged = device != "cpu"
        """Whether blocks lie on a device, so that ``export`` and ``import_`` have something to do."""
        self.block_size_tokens = block_size_tokens
        self.max_model_len = max_model_len
        self._board = board
        self.operations = make_ops(kernels, config.head_dim, num_threads, board)
        weights = load_weights(folder.tensors(), config, self.operations, weight_dtype)
        shape = {
            "num_layers": config.num_layers,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "block_size_tokens": block_size_tokens,
        }
        model = f"{folder.name}@{folder.fingerprint}:{weight_dtype}"
        self.layout = kv_layout(model=model, dtype=kv_cache_dtype, **shape)
        self.pool = KVPool.create(num_blocks, block_bytes_of(kv_cache_dtype, **shape), incarnation, self.layout)
        self._cache = KVCache(self.pool, staged=self.staged, dtype=kv_cache_dtype, **shape)
        self._model = LlamaModel(config, weights, self._cache, max_model_len, self.operations)
        self._scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            block_size_tokens=block_size_tokens,
        )
        self._checks = SequenceChecks(config.vocab_size, max_model_len, num_blocks, block_size_tokens)
        self._sequences: dict[str, Sequence] = {}
        self._tokenizer = folder.tokenizer()

    # What the host asks

    @property
    def has_work(self) -> bool:
        """Whether ``step`` would compute anything."""
        return self._scheduler.has_work

    @property
    def num_running(self) -> int:
        """Sequences that take part in steps, ``max_num_seqs`` at most."""
        return len(self._scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait for one of the running ones to end."""
        return len(self._scheduler.waiting)

    def keys(self) -> list[str]:
        """The sequences that are here, running or waiting."""
        return list(self._sequences)

    def __contains__(self, key: object) -> bool:
        return key in self._sequences

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks that hold the KV of ``num_tokens`` tokens."""
        return blocks_for(num_tokens, self.block_size_tokens)

    # What the host does

    def add(
        self,
        key: str,
        prompt_ids: Sequence_[int],
        output_ids: Sequence_[int],
        sampling: SamplingParams,
        block_table: Sequence_[int],
        *,
        num_computed: int,
        one_token: bool = False,
    ) -> FinishReason | None:
        """Take on a sequence. ``output_ids``: what the answer has already; drawing goes on at that index.

        ``block_table`` must reach to the last token that is there now; ``extend`` adds more later. The KV of the
        first ``num_computed`` tokens must lie in it already.

        Returns:
            Why the answer has ended, if ``output_ids`` end it: nothing is computed then, and the sequence is not here.

        Raises:
            EngineError: an argument is wrong; nothing has changed.
        """
        sequence = Sequence(
            key=key,
            prompt_ids=list(prompt_ids),
            output_ids=list(output_ids),
            sampling=sampling,
            block_table=list(block_table),
            num_computed=num_computed,
            one_token=one_token,
            eos_token_ids=self.folder.config.eos_token_ids,
        )
        if key in self._sequences:
            raise EngineError(f"sequence {key} is in the engine already")
        self._checks.check_tokens(sequence)
        if sampling.stop:
            sequence.stop_checker = StopChecker(sampling.stop, self._tokenizer, sampling.min_tokens)
            for token_id in sequence.output_ids:
                sequence.stopped = sequence.stop_checker.push(token_id)
        finish_reason = self._finish_reason(sequence)
        if finish_reason is None:
            self._checks.check_room(sequence)
            self._sequences[key] = sequence
            self._scheduler.add(sequence)
        return finish_reason

    def extend(self, key: str, blocks: Sequence_[int]) -> None:
        """Give a sequence more blocks.

        Raises:
            EngineError: no such sequence or block.
        """
        sequence = self._get(key)
        self._checks.check_blocks(key, [*sequence.block_table, *blocks])
        sequence.block_table += blocks

    def stop(self, key: str) -> None:
        """Forget a sequence. Once this returns no step touches its blocks any more.

        Raises:
            EngineError: no such sequence; it may have ended in the last step.
        """
        self._forget(self._get(key))

    def step(self, on_start: Callable[[list[str]], None] | None = None) -> list[StepOutput]:
        """Compute one step; return a token for each sequence that got that far. Empty when nothing is to do.

        ``on_start`` hears, before anything is written, whose blocks this step writes to. A sequence that cannot
        be computed comes back with an ``error`` while the others go on; if none can, that error is raised.
        """
        chunks = self._scheduler.schedule()
        if not chunks:
            return []
        if on_start is not None:
            on_start([chunk.sequence.key for chunk in chunks])
        if self._board is not None:
            self._board.computing()
        return [output for part in self._compute(chunks) for output in self._advance(*part)]

    def export(self, blocks: Sequence_[int]) -> None:
        """Bring blocks from the device into ``pool``, before they are digested and committed."""
        self._cache.export(blocks)

    def import_(self, blocks: Sequence_[int]) -> None:
        """Bring blocks from ``pool`` to the device, after they were pulled."""
        self._cache.import_(blocks)

    def warm_up(self, progress: Callable[[str], None]) -> None:
        """Run the widest steps once, so that the first request does not pay for page faults and lazy set-up.

        Uses the first blocks of the pool and leaves zeros in them: call it before any block is given out.

        Raises:
            StartupError: the model computes no finite numbers.
        """
        progress("warming up prefill")
        room = self.pool.num_blocks * self.block_size_tokens
        num_tokens = min(self._scheduler.max_num_batched_tokens, self.max_model_len - 1, room)
        self._rehearse({"warm-up": num_tokens})
        progress("warming up decode")
        num_sequences = min(self._scheduler.max_num_seqs, self.pool.num_blocks)
        self._rehearse({f"warm-up-{number}": 1 for number in range(num_sequences)})

    def close(self) -> None:
        """Forget all sequences and close the pool to other processes."""
        for sequence in list(self._sequences.values()):
            self._forget(sequence)
        self.pool.close()
        if self._board is not None:
            self._board.close()

    # How a step goes

    def _compute(self, chunks: list[Chunk]) -> list[tuple[Sequence_[Chunk], Floats | Exception]]:
        """Logits of the chunks in one forward pass; if that fails, one by one, to tell who is at fault.

        To compute a chunk again is harmless: it writes the same KV to the same places.
        """
        try:
            return [self._forward(chunks)]
        except Exception as error:
            if len(chunks) == 1:
                return [(chunks, error)]
            parts: list[tuple[Sequence_[Chunk], Floats | Exception]] = []
            for chunk in chunks:
                parts += self._compute([chunk])
            if all(isinstance(result, Exception) for _, result in parts):
                raise  # it is the engine, not a sequence
            return parts

    def _forward(self, chunks: list[Chunk]) -> tuple[Sequence_[Chunk], Floats]:
        batch = build_batch(chunks, block_size_tokens=self.block_size_tokens, row_stride=self._cache.row_stride)
        return batch.chunks, self._model.forward(batch)

    def _advance(self, chunks: Sequence_[Chunk], result: Floats | Exception) -> list[StepOutput]:
        """Book computed chunks and draw where one reached the end of its sequence."""
        if isinstance(result, Exception):
            return [self._fail(chunk.sequence, f"{type(result).__name__}: {result}") for chunk in chunks]
        for chunk in chunks:
            chunk.sequence.num_computed = chunk.end
        sampling = [chunk.sequence for chunk in chunks if chunk.samples]
        if not sampling:
            return []
        finite = sampler.finite(result)
        untouched = chances.keep(result, sampling)
        add_biases(result, sampling)
        apply_penalties(result, sampling)
        ban(result, sampling)
        likeliest = sampler.greedy(result)
        outputs = []
        for row, (sequence, logits, is_finite, best) in enumerate(
            zip(sampling, result, finite, likeliest, strict=True)
        ):
            if not is_finite:
                outputs.append(self._fail(sequence, "the model computed logits that are not finite"))
                continue
            try:
                outputs.append(self._draw(sequence, logits, int(best), untouched.get(row)))
            except Exception as error:  # noqa: BLE001  (whatever it is, the others keep their tokens)
                outputs.append(self._fail(sequence, f"{type(error).__name__}: {error}"))
        return outputs

    def _draw(self, sequence: Sequence, logits: Floats, best: int, untouched: Floats | None) -> StepOutput:
        index, sampling = len(sequence.output_ids), sequence.sampling
        if logits[best] == -np.inf:
            return self._fail(sequence, "min_tokens bans every token of the vocabulary")
        token_id = best if sampling.temperature == 0 else sampler.draw(logits, sampling, index)
        logprobs = ""
        if untouched is not None and sampling.logprobs is not None:
            logprobs = chances.token_logprobs(untouched, token_id, sampling.logprobs).pack()
        sequence.append(token_id)
        finish_reason = self._finish_reason(sequence)
        if finish_reason is not None or sequence.one_token:
            self._forget(sequence)
        return StepOutput(sequence.key, index, token_id, finish_reason, logprobs=logprobs)

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        """Whether the output so far ends the answer: a function of all output ids, whichever attempt drew them."""
        output_ids, sampling = sequence.output_ids, sequence.sampling
        if not output_ids:
            return None
        if output_ids[-1] in sequence.ends or sequence.stopped:
            return "stop"
        full = len(output_ids) >= sampling.max_tokens or len(sequence.token_ids) >= self.max_model_len
        return "length" if full else None

    def _fail(self, sequence: Sequence, error: str) -> StepOutput:
        self._forget(sequence)
        return StepOutput(sequence.key, len(sequence.output_ids), None, error=error)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.key]
        self._scheduler.remove(sequence)
        if self._board is not None and not self.has_work:
            self._board.idle()

    def _rehearse(self, lengths: dict[str, int]) -> None:
        sampling = SamplingParams(temperature=0, seed=0, max_tokens=2)
        end = 0
        for key, num_tokens in lengths.items():
            start, end = end, end + self.blocks_needed(num_tokens)
            self.add(key, [0] * num_tokens, [], sampling, range(start, end), num_computed=0, one_token=True)
        while self.has_work:
            for output in self.step():
                if output.error is not None:
                    raise StartupError(f"the model cannot be computed: {output.error}")
        self._cache.clear(range(end))

    # What is refused

    def _get(self, key: str) -> Sequence:
        if key not in self._sequences:
            raise EngineError(f"the engine has no sequence {key}")
        return self._sequences[key]
