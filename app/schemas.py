"""What crosses a process boundary, as frozen pydantic models."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from app.logprobs import MAX_LOGPROBS
from app.versions import LOGPROBS, SPOKEN

FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode", "control", "web"]


class Frozen(BaseModel):
    """Base of everything here: immutable, and strict about names it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]


class SamplingParams(Frozen):
    """How tokens are drawn and when an answer ends.

    A draw is a pure function of (``seed``, index in the answer, logits), so that a resumed attempt
    draws the same tokens. In this order: ``logit_bias``, penalties (they count the output ids of every attempt), what
    ``min_tokens`` bans; ``temperature`` (0 is greedy), ``min_p``, ``top_k`` (0 means "all"), ``top_p``.
    ``logprobs`` are those of the model's own distribution, before all of it.
    """

    temperature: float = Field(1.0, ge=0, le=2, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1, allow_inf_nan=False)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1, allow_inf_nan=False)
    """What is less likely than this share of the likeliest token is not drawn."""
    logit_bias: tuple[tuple[Annotated[int, Field(ge=0)], Bias], ...] = ()
    """Token id and what is added to its logit; no id twice."""
    presence_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(0.0, ge=-2, le=2, allow_inf_nan=False)
    repetition_penalty: float = Field(1.0, gt=0, allow_inf_nan=False)
    seed: int = Field(ge=-(2**63), lt=2**63)
    max_tokens: int = Field(ge=1)
    min_tokens: int = Field(0, ge=0)
    """Up to this length no EOS and no stop token is drawn, and no stop string counts."""
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    """How many of the likeliest tokens are named with each token, beside the token itself; None: no logprobs."""

    @property
    def has_penalties(self) -> bool:
        """Whether any of the three penalties changes anything."""
        return (self.presence_penalty, self.frequency_penalty, self.repetition_penalty) != (0, 0, 1)

    @property
    def needs_version(self) -> int:
        """The oldest version whose nodes can compute it (``app.versions``): those before do not know these options."""
        new = (self.min_p, self.logit_bias, self.min_tokens, self.stop_token_ids, self.logprobs)
        return SPOKEN.oldest if new == (0, (), 0, (), None) else LOGPROBS


class Shown(Frozen):
    """What nodes of other versions read too: they pass over names that they do not know."""

    model_config = ConfigDict(extra="ignore")


class NodeInfo(Shown):
    """One running worker process, or one gunicorn worker of web, as it registers in the ledger."""

    incarnation: str
    role: Role
    name: str
    pid: int
    host: str
    address: str = ""
    """ZMQ endpoint on which this node answers calls; empty for web and control."""
    model: str = ""
    """Fingerprint of weights, config and tokenizer; empty for control. Nodes that read or make tokens must agree."""
    layout: str = ""
    """Fingerprint of model and KV layout. Nodes that hold KV must agree on it."""
    num_blocks: int = 0
    block_size_tokens: int = 0
    newest: int = SPOKEN.newest
    """The newest version of ledger data and messages that it reads."""


class Health(StrEnum):
    """What a node says of its own state."""

    HEALTHY = "healthy"
    DRAINING = "draining"
    DRAINED = "drained"  # it was asked to drain, and holds nothing any more: it can be stopped without any loss
    UNHEALTHY = "unhealthy"  # a part of it is dead or stuck: it is about to end


class Gauges(Shown):
    """What a node says of itself with each heartbeat."""

    health: str = Health.HEALTHY
    blocks: dict[str, int] = {}
    running: int = 0
    waiting: int = 0
    refused: dict[str, int] = {}
    """Messages of peers that were refused, by reason."""
    prefix_cache: dict[str, int] = {}
    """Of a prefill node: what its cache has done since it started, as ``CacheCounts`` names it."""


class KVLocation(Frozen):
    """Where a node's KV pool lies, so that a peer can pull from it. ``layout`` fingerprints model and block format."""

    transport: Literal["shm"] = "shm"
    pid: int = Field(ge=1)
    fd: int = Field(ge=0)
    incarnation: str = Field(min_length=1)
    num_blocks: int = Field(ge=1)
    block_bytes: int = Field(ge=1)
    layout: str = Field(min_length=1)
