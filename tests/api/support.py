"""Stand-ins for tests of web: a toy model, a worker that follows a script through the real ledger."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from app.ledger.api import Ledger
from app.logprobs import TokenLogprobs
from app.model.chat import ChatTemplate
from app.model.limits import LengthLimits
from app.model.tokenizer import Tokenizer
from app.protocol.commands import (
    Activate,
    ActivateStatus,
    Bell,
    Claim,
    ClaimStatus,
    Emit,
    EmitStatus,
    FailAttempt,
    FailureKind,
    Heartbeat,
    Register,
    ReserveNext,
    ReserveStatus,
    Work,
)
from app.schemas import FinishReason, Gauges, NodeInfo
from app.settings import Settings, load_settings
from web.served import ServedModel

IM_START, IM_END = 256, 257
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_tokenizer() -> Tokenizer:
    """Token i < 256 is byte i; then the two marks of ChatML."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet(), key=_byte_of)
    inner = tokenizers.Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(inner)


def _byte_of(char: str) -> int:
    """The byte that a character of the byte-level alphabet stands for (GPT-2's table, computed anew)."""
    hidden = [b for b in range(256) if not (0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or 0xAE <= b <= 0xFF)]
    return ord(char) if ord(char) < 256 else hidden[ord(char) - 256]


def toy_model(max_model_len_tokens: int = 512, pool_tokens: int = 4096) -> ServedModel:
    return ServedModel(
        name="toy",
        fingerprint="toy-1",
        vocab_size=258,
        limits=LengthLimits(max_model_len_tokens, pool_tokens),
        longest_token_bytes=len("<|im_start|>"),
        tokenizer=toy_tokenizer(),
        chat=ChatTemplate(CHATML, "", "<|im_end|>"),
        created=1,
    )


def toy_settings(**overrides: object) -> Settings:
    return load_settings(**{"heartbeat_s": 0.05, "max_attempts": 1, **overrides})


def ids(text: str) -> list[int]:
    """What the toy tokenizer makes of text without special tokens: its bytes."""
    return list(text.encode())


@dataclass
class HeardBells:
    """Bells that only remember; the scripted worker asks the ledger by itself."""

    rung: list[Bell] = field(default_factory=list)
    broker_fault: str = ""

    def fault(self) -> str:
        return self.broker_fault

    def ring(self, bell: Bell) -> None:
        self.rung.append(bell)

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class Send:
    """Emit these tokens; with ``finish`` they are the last."""

    tokens: Sequence[int]
    finish: FinishReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True)
class Wait:
    """Hold until the event is set."""

    until: threading.Event


@dataclass(frozen=True)
class Fail:
    reason: str = "engine_error"
    detail: str = "scripted"


Step = Send | Wait | Fail
Script = Callable[[Work], Iterator[Step] | Sequence[Step]]


def say(text: str, finish: FinishReason = "stop", *, eos: bool = True) -> list[Step]:
    """One token per event, then EOS."""
    tokens = [*ids(text), *([IM_END] if eos else [])]
    return [*(Send([t]) for t in tokens[:-1]), Send(tokens[-1:], finish)]


def toy_logprobs(work: Work, token: int, index: int) -> str:
    """What a toy model of 258 tokens may say of the ``index``-th one: itself first, then the letters."""
    others = ((token, -0.5), *((97 + i, -1.5 - i) for i in range(26)))
    return TokenLogprobs(-0.5 - index / 8, others[: work.sampling.logprobs or 0]).pack()


class ScriptedWorker:
    """A prefill and a decode node without an engine: what they emit is a script. Each request has a thread."""

    def __init__(
        self,
        ledger: Ledger,
        script: Script,
        roles: Sequence[Literal["prefill", "decode"]] = ("prefill", "decode"),
        num_blocks: int = 256,
    ) -> None:
        self.script = script
        self.emitted: list[EmitStatus] = []
        self._ledger = ledger
        self._roles = roles
        self._ids = {role: f"{role}-{uuid.uuid4().hex}" for role in ("prefill", "decode")}
        self._leases: dict[str, str] = {}
        self._reserving = threading.Lock()
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._work, daemon=True)]
        for role in roles:
            node = NodeInfo(
                incarnation=self._ids[role],
                role=role,
                name=f"{role}1",
                pid=1,
                host="test",
                address="tcp://127.0.0.1:1" if role == "prefill" else "",
                model="toy-1",
                layout="toy",
                num_blocks=num_blocks,
                block_size_tokens=16,
            )
            ledger.execute(Register(node, 60_000))
        self._threads[0].start()

    def stop(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(5)

    def _work(self) -> None:
        while not self._stopped.wait(0.005):
            for role in self._roles:
                self._ledger.execute(Heartbeat(self._ids[role], Gauges(blocks={"free": 200, "cached": 3})))
            if "prefill" not in self._roles:
                continue
            claim = Claim("", self._ids["prefill"], uuid.uuid4().hex, 256, 16)
            answer = self._ledger.execute(claim)
            if answer.status is ClaimStatus.CLAIMED:
                assert answer.work is not None
                thread = threading.Thread(target=self._serve, args=(answer.work,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, work: Work) -> None:
        owner, index = self._ids["prefill"], len(work.output_ids)
        lease = ""
        for step in self.script(work):
            match step:
                case Wait(until):
                    while not (until.wait(0.02) or self._stopped.is_set()):
                        pass
                case Fail(reason, detail):
                    kind = FailureKind.FINAL
                    self._ledger.execute(
                        FailAttempt(work.uid, work.attempt, work.fence, owner, lease, kind, reason, detail)
                    )
                    return
                case Send(tokens, finish, cached):
                    first = not lease and finish is None
                    if first:
                        lease = self._reserve(work.uid)
                    if self._emit(work, owner, index, tokens, finish, cached) is not EmitStatus.OK:
                        return
                    if first:
                        owner = self._activate(work, lease, index, tokens[0])
                    index += len(tokens)

    def _emit(
        self, work: Work, owner: str, index: int, tokens: Sequence[int], finish: FinishReason | None, cached: int
    ) -> EmitStatus:
        logprobs = tuple(toy_logprobs(work, token, index + i) for i, token in enumerate(tokens))
        told = () if work.sampling.logprobs is None else logprobs
        command = Emit(
            work.uid, work.attempt, work.fence, owner, index, tuple(tokens), finish, told, cached_tokens=cached
        )
        status = self._ledger.execute(command).status
        self.emitted.append(status)
        return status

    def _reserve(self, uid: str) -> str:
        """The lease for ``uid``, empty if it has ended. The ledger may give an older waiter's first."""
        with self._reserving:  # else one for us could stand in the ledger, and not yet here
            while uid not in self._leases:
                lease = uuid.uuid4().hex
                reserved = self._ledger.execute(ReserveNext(uid, self._ids["decode"], lease, 10_000, 16))
                if reserved.status is not ReserveStatus.RESERVED:
                    return ""
                self._leases[reserved.uid] = lease
            return self._leases[uid]

    def _activate(self, work: Work, lease: str, index: int, token: int) -> str:
        decode = self._ids["decode"]
        answer = self._ledger.execute(Activate(work.uid, work.attempt, work.fence, lease, decode, index, token))
        if answer.status not in (ActivateStatus.ACTIVATED, ActivateStatus.FENCED):
            raise AssertionError(f"not activated: {answer}")
        return decode
