"""The only reader of the environment: one frozen Settings object, ``BATON_<NAME>``; it fails loudly.

Units are in the names: ``_s`` seconds, ``_ms`` milliseconds, ``_bytes``, ``_tokens``.
The settings table in the README is generated from this file (``make docs``).
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from pydantic import Field, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.errors import SettingsError
from app.server_url import check_client_options, check_server_url

YEAR_S = 31_536_000.0
"""A longer time is a mistake, and one that a server cannot count in milliseconds breaks what is told to expire then."""


class Settings(BaseSettings):
    """Everything a person may want to turn. Each description gives the reason for its default."""

    model_config = SettingsConfigDict(env_prefix="BATON_", frozen=True, extra="ignore", env_ignore_empty=True)

    # Where things are
    home: Path = Field(Path("~/.cache/baton"), description="Cache for converted models and the state of `baton up`.")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Ledger server: redis://, rediss:// or unix:///path. Not set: `baton up` starts its own.",
    )
    broker_url: str = Field(
        "", description="Celery's broker, when it is another server than the ledger; empty: the same."
    )
    namespace: str = Field(
        "baton",
        pattern=r"^[a-z0-9_-]{1,32}$",
        description="Prefix of every key, so that Baton can live in a Redis that others use.",
    )
    incarnation: str = Field(
        "", description="Set by a supervisor so that it can report the exit of exactly this process."
    )

    failpoints: str = Field(
        "", description="Folder of orders to stop or cut this process at a step; for chaos tests only. Empty: off."
    )

    # The model
    model: str = Field(
        "smollm2-135m-instruct", description="Name of the default model, a .gguf file, or a Hugging Face folder."
    )
    served_model_name: str = Field("", description="Name the API answers to; empty: the model's own name.")
    device: str = Field("cpu", pattern=r"^(cpu|gpu:\d+)$", description="Where a worker computes: `cpu` or `gpu:0`.")
    kernels: str = Field(
        "auto",
        pattern="^(auto|compiled|paddle)$",
        description="On CPUs: `compiled` kernels or pure `paddle`; `auto`: compiled if there is a C++ compiler.",
    )
    weight_dtype: str = Field(
        "float16",
        pattern="^(float16|float32)$",
        description="What weights are rounded to when loaded; sums are float32. float16 halves memory and decode time.",
    )
    max_model_len_tokens: int = Field(
        0, ge=0, description="Prompt + answer at most; 0: what the model and the pool can hold."
    )
    num_threads: int = Field(
        0,
        ge=0,
        le=256,
        description="Compute threads of a worker; 0: its share of the processors under `baton up`, else 1. More than"
        " there are processors ruin each other.",
    )
    borrow_threads: bool = Field(
        True,
        description="Compute on processors, too, that the machine's other workers leave idle at the moment.",
    )
    cores: str = Field(
        "",
        pattern=r"^(\d+(-\d+)?(,\d+(-\d+)?)*)?$",
        description="Pin a worker to these cores, e.g. `0-3,8`; empty: the system chooses.",
    )

    # KV blocks and batches
    block_size_tokens: int = Field(
        16, ge=1, le=256, description="Tokens per KV block; small wastes little at a sequence's end."
    )
    kv_cache_dtype: str = Field(
        "float32",
        pattern="^(float16|float32)$",
        description="What keys and values are stored in; all nodes must agree. float16: half the memory per token, and"
        " decoding up to 1.3 times as fast with long contexts.",
    )
    num_blocks: int = Field(
        1024, ge=1, description="KV blocks per node: 16,384 tokens, 720 MiB with the default model in fp32."
    )
    max_num_seqs: int = Field(32, ge=1, description="Sequences a node works on at once; more gains little on a CPU.")
    max_num_batched_tokens: int = Field(
        512,
        ge=1,
        description="Tokens per prefill step. Aborts are seen between steps: smaller reacts sooner, larger is faster.",
    )
    prefix_cache: bool = Field(
        True,
        description="Prefill nodes keep the KV of prompts for later ones that begin alike, where no room is needed.",
    )

    # Limits of a request
    max_queued: int = Field(
        1024, ge=1, description="Waiting requests, each answer counted, then 429: more only time out."
    )
    max_choices: int = Field(
        128,
        ge=1,
        description="Answers of one request, `n` for each prompt; all are admitted or none. OpenAI's bound of `n`.",
    )
    max_attempts: int = Field(
        3, ge=1, description="Failures until a request ends with an error; 1: the first failure is the error."
    )
    queue_timeout_s: float = Field(60.0, gt=0, description="Time spent QUEUED, then the request ends EXPIRED.")
    first_token_timeout_s: float = Field(
        300.0,
        gt=0,
        description="From claim to activation; then the lease expires and the attempt fails, or, where no decode node"
        " has taken the request, it ends EXPIRED. FastDeploy's default.",
    )
    grant_timeout_s: float = Field(
        30.0, gt=0, description="How long a computed prefill waits for a decode node before it may be given up."
    )
    record_ttl_s: float = Field(86_400.0, gt=0, description="How long an ended request can be looked up.")
    idempotency_grace_s: float = Field(
        30.0,
        ge=0,
        description="How long a request with an Idempotency-Key goes on unwatched: time enough to connect again.",
    )
    dedup_window_s: float = Field(
        0.0,
        ge=0,
        description="How long the X-Request-Id of a finished request stays refused; 0: its answer is out, it is free.",
    )
    max_body_bytes: int = Field(8 * 1024 * 1024, ge=1024, description="Largest HTTP body.")

    # Who notices what, and when
    heartbeat_s: float = Field(0.5, gt=0, description="Pause between heartbeats; ten fit into node_ttl_s.")
    node_ttl_s: float = Field(
        5.0, gt=0, description="A node silent for so long is dead: long enough for a busy machine."
    )
    link_timeout_s: float = Field(2.0, gt=0, description="Acknowledgement of a message between nodes.")
    pull_min_bytes_per_s: float = Field(
        50e6, gt=0, description="Slowest KV transfer that counts as alive: pull_timeout = link_timeout + bytes / this."
    )
    ledger_timeout_s: float = Field(2.0, gt=0, description="Answer of a ledger call; later its outcome is unknown.")
    check_s: float = Field(
        1.0, gt=0, description="Pause between comparisons of what a node holds with what the ledger gives it."
    )
    scan_s: float = Field(1.0, gt=0, description="Pause between scans for what expired or lost its node.")
    engine_stall_s: float = Field(
        120.0, gt=0, description="A step or pull that takes longer is stuck. FastDeploy's default."
    )
    drain_timeout_s: float = Field(
        30.0,
        gt=0,
        description="What a worker may still finish after SIGTERM or a drain. Not set: 1 s at Ctrl-C of `baton up`.",
    )

    # The HTTP side
    host: str = Field("127.0.0.1", description="Address that web listens on.")
    port: int = Field(8000, ge=0, le=65535, description="Port that web listens on.")
    web_workers: int = Field(1, ge=1, description="gunicorn processes.")
    web_threads: int = Field(256, ge=1, description="Requests that one web process answers at once; a thread each.")
    link_host: str = Field("127.0.0.1", description="Address on which workers answer each other; a free port is taken.")
    flower_host: str = Field("127.0.0.1", description="Address that Flower listens on.")
    flower_port: int = Field(5555, ge=0, le=65535, description="Port that Flower listens on.")

    log_level: str = Field("INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$", description="What is logged.")

    @field_validator("*")
    @classmethod
    def _within_a_year(cls, value: object, info: ValidationInfo) -> object:
        name = info.field_name or ""
        seconds = name.endswith("_s") and not name.endswith("_per_s")
        if seconds and isinstance(value, float) and not value <= YEAR_S:
            raise ValueError(f"must be a number of seconds up to {YEAR_S:.0f} (a year)")
        return value

    @model_validator(mode="after")
    def _finished_ids_are_known(self) -> Settings:
        if self.dedup_window_s > self.record_ttl_s:
            raise ValueError(
                f"BATON_DEDUP_WINDOW_S={self.dedup_window_s:g} must not be longer than BATON_RECORD_TTL_S: without the "
                "record nobody could say that the request has finished"
            )
        return self

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> Settings:
        if self.node_ttl_s < 2 * self.heartbeat_s:
            raise ValueError(f"BATON_NODE_TTL_S={self.node_ttl_s:g} must be at least twice BATON_HEARTBEAT_S")
        return self

    @field_validator("redis_url", "broker_url")
    @classmethod
    def _is_a_server(cls, value: str) -> str:
        return check_server_url(value) if value else value

    @field_validator("redis_url")
    @classmethod
    def _has_options_of_the_client(cls, value: str) -> str:
        return check_client_options(value)

    @field_validator("home")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @property
    def core_numbers(self) -> tuple[int, ...]:
        """``cores``, one by one."""
        numbers: set[int] = set()
        for part in filter(None, self.cores.split(",")):
            first, _, last = part.partition("-")
            numbers.update(range(int(first), int(last or first) + 1))
        return tuple(sorted(numbers))

    @property
    def effective_broker_url(self) -> str:
        """The broker's address in the form that kombu understands."""
        url = self.broker_url or self.redis_url
        return url.replace("unix://", "redis+socket://", 1) if url.startswith("unix://") else url


@cache
def get_settings() -> Settings:
    """This process's settings.

    Raises:
        SettingsError: one line per wrong setting, with its environment name.
    """
    return load_settings()


def load_settings(**overrides: object) -> Settings:
    """Settings from the environment with ``overrides`` (command line options) on top. Raises SettingsError."""
    known = {name.upper() for name in Settings.model_fields}
    for name in sorted(name.removeprefix("BATON_") for name in os.environ if name.startswith("BATON_")):
        if name not in known:
            close = closest(name, known)
            raise SettingsError(f"BATON_{name} is no setting" + (f": did you mean BATON_{close}?" if close else ""))
    try:
        return Settings(**overrides)  # type: ignore[arg-type]
    except ValidationError as error:
        raise SettingsError("; ".join(_line(each) for each in error.errors())) from None


def closest(name: str, known: Iterable[str]) -> str:
    """The one of ``known`` that somebody who wrote ``name`` may have meant; empty if none is close."""
    return next(iter(difflib.get_close_matches(name, known, 1, cutoff=0.75)), "")


_SAY = {
    "namespace": "say 1 to 32 of a-z, 0-9, _ and -",
    "device": "say cpu or gpu:0",
    "kernels": "say auto, compiled or paddle",
    "weight_dtype": "say float16 or float32",
    "cores": "say numbers and ranges of cores, e.g. 0-3,8",
    "kv_cache_dtype": "say float16 or float32",
    "prefix_cache": "say true or false",
    "borrow_threads": "say true or false",
    "log_level": "say DEBUG, INFO, WARNING or ERROR",
}
"""In place of a regular expression, or of pydantic's words."""
_BOUNDS = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt:g}",
    "less_than_equal": "must be at most {le}",
}


def _line(error: ErrorDetails) -> str:
    name = "_".join(str(part) for part in error["loc"])
    return f"BATON_{name.upper()}: {_wording(name, error)}" if name else error["msg"].removeprefix("Value error, ")


def _wording(name: str, error: ErrorDetails) -> str:
    """What is wrong, in words that need no knowledge of pydantic."""
    kind = error["type"]
    if name in _SAY:
        return f"{_SAY[name]}, not {error['input']!r}"
    if kind in _BOUNDS:
        return _BOUNDS[kind].format(**error["ctx"])
    if kind.startswith("int_"):
        return f"must be a whole number, not {error['input']!r}"
    if kind.startswith("float_"):
        return f"must be a number, not {error['input']!r}"
    return error["msg"].removeprefix("Value error, ")
