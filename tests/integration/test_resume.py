"""Workers that are killed in the middle of answers: each stream goes on with the tokens of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.integration.baton import START_S, Baton

pytestmark = [pytest.mark.chaos, pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"
REFERENCES = Path(__file__).parents[1] / "references"
GREEDY: list[dict[str, Any]] = json.loads((REFERENCES / "greedy_reference.json").read_text())
LONG: list[dict[str, Any]] = json.loads((REFERENCES / "long_reference.json").read_text())
PENALTIES = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
SAMPLED = {"temperature": 0.9, "top_p": 0.95, "top_k": 50, "seed": 11, "ignore_eos": True}
OPTIONS = {
    "min_p": 0.01,
    "logit_bias": {"260": 2.5, "28": -100},
    "min_tokens": 20,
    "stop_token_ids": [28],
    "logprobs": 3,
}


@dataclass
class Stream:
    """What one streamed answer has said so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    done: int = 0
    errors: list[Any] = field(default_factory=list)
    started: threading.Event = field(default_factory=threading.Event)
    """Set at the tenth token."""

    def read(self, baton: Baton, request_id: str, body: Mapping[str, Any]) -> Stream:
        """Send the request and follow it to the end of the connection."""
        streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
        for line in baton.lines("/v1/completions", streamed, {"X-Request-Id": request_id}):
            if line == b"data: [DONE]\n":
                self.done += 1
            elif line.startswith(b"data: "):
                self._take(json.loads(line[6:]))
        return self

    def _take(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.errors.append(chunk)
            return
        self.usage = chunk["usage"] or self.usage
        for choice in chunk["choices"]:
            self.token_ids += choice.get("token_ids") or []
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish
        if len(self.token_ids) >= 10:
            self.started.set()


@dataclass(frozen=True)
class Expected:
    """The answer of an undisturbed run."""

    token_ids: list[int]
    text: str
    finish: str
    logprobs: tuple[float, ...] = ()


def body(case: dict[str, Any], **options: Any) -> dict[str, Any]:
    base = {"model": MODEL, "prompt": case["prompt_ids"], "max_tokens": len(case["output_ids"]), "temperature": 0}
    return {**base, "return_token_ids": True, **options}


def undisturbed(baton: Baton, request: dict[str, Any]) -> Expected:
    status, _, answer = baton.post("/v1/completions", request)
    assert status == 200, answer
    choice = answer["choices"][0]
    logprobs = tuple((choice["logprobs"] or {}).get("token_logprobs", ()))
    return Expected(choice["token_ids"], choice["text"], choice["finish_reason"], logprobs)


def referenced(case: dict[str, Any]) -> Expected:
    return Expected(case["output_ids"], case["text"], case["finish"])


def node_of(baton: Baton, request_id: str, role: str) -> str:
    return str(baton.get(f"/v1/requests/{request_id}")[1]["nodes"][role]).split("@")[0]


def kill(baton: Baton, names: set[str]) -> None:
    nodes = baton.nodes()
    for name in names:
        os.kill(nodes[name]["pid"], signal.SIGKILL)


def assert_as_undisturbed(
    baton: Baton, request_id: str, stream: Stream, prompt: list[int], expected: Expected, attempt: int = 2
) -> None:
    assert stream.errors == []
    assert (stream.token_ids, stream.text, stream.finish) == (expected.token_ids, expected.text, expected.finish)
    assert stream.logprobs == pytest.approx(expected.logprobs, abs=1e-3)  # other nodes round the same logits otherwise
    assert stream.done == 1
    lengths = len(prompt), len(expected.token_ids)
    assert stream.usage is not None
    cached = stream.usage["prompt_tokens_details"]["cached_tokens"]
    assert cached in range(0, lengths[0], 16)
    assert stream.usage == {
        "prompt_tokens_details": {"cached_tokens": cached},
        "prompt_tokens": lengths[0],
        "completion_tokens": lengths[1],
        "total_tokens": sum(lengths),
    }
    record = baton.get(f"/v1/requests/{request_id}")[1]
    assert (record["state"], record["attempt"], record["finish_reason"]) == ("FINISHED", attempt, expected.finish)


def wait_until_all_are_back(baton: Baton, before: dict[str, Any]) -> None:
    """Every killed worker serves again, and no block is in use."""
    baton.wait_for(lambda: baton.nodes().keys() == before.keys(), START_S)
    baton.wait_for(lambda: all(map(is_empty, kv_nodes(baton))), 10)
    assert baton.get("/cluster")[1]["leases"] == []


def is_empty(node: dict[str, Any]) -> bool:
    """Nobody holds any of its blocks."""
    blocks = node["blocks"]
    return bool(blocks["free"] + blocks["cached"] == blocks["total"])


def kv_nodes(baton: Baton) -> list[dict[str, Any]]:
    return [node for node in baton.nodes().values() if node["role"] in ("prefill", "decode")]


def test_answers_whose_decode_workers_are_killed_go_on_token_by_token(baton: Baton) -> None:
    before = baton.nodes()
    cut = GREEDY[4]
    stop = cut["text"][12:150]  # from the fourth token or so to far behind the kill: it straddles both attempts
    requests = {
        "greedy": body(GREEDY[6]),
        "penalised": body(GREEDY[3], **PENALTIES),
        "sampled": body(GREEDY[2], **SAMPLED, **PENALTIES),
        "with-all-options": body(GREEDY[2], **SAMPLED, **PENALTIES, **OPTIONS),
        "stopped": body(cut, stop=["not there", stop]),
    }
    with ThreadPoolExecutor(len(requests)) as pool:
        expected = dict(zip(requests, pool.map(lambda one: undisturbed(baton, one), requests.values()), strict=True))
        assert expected["greedy"] == referenced(GREEDY[6])
        assert expected["penalised"].token_ids != GREEDY[3]["output_ids"]
        assert expected["with-all-options"].token_ids != expected["sampled"].token_ids
        assert len(expected["with-all-options"].logprobs) == len(expected["with-all-options"].token_ids)
        num_tokens = len(expected["stopped"].token_ids)
        assert expected["stopped"] == Expected(cut["output_ids"][:num_tokens], cut["text"][:12], "stop")
        assert 20 < num_tokens < 64

        streams = {key: Stream() for key in requests}
        read = [pool.submit(streams[key].read, baton, f"decode-{key}", requests[key]) for key in requests]
        assert all(stream.started.wait(60) for stream in streams.values())
        killed = {node_of(baton, f"decode-{key}", "decode") for key in requests}
        kill(baton, killed)
        assert not any(future.done() for future in read), "killed too late to show anything"
        for future in read:
            future.result(timeout=120)
    for key, request in requests.items():
        assert_as_undisturbed(baton, f"decode-{key}", streams[key], request["prompt"], expected[key])
    wait_until_all_are_back(baton, before)


def test_an_answer_that_loses_its_prefill_worker_and_later_its_decode_worker_is_exact(baton: Baton) -> None:
    before = baton.nodes()
    request = body(LONG[0], **SAMPLED, **PENALTIES, max_tokens=32, logprobs=5)
    expected = undisturbed(baton, request)
    assert len(expected.logprobs) == 32
    request["cache_salt"] = "twice"  # it takes its time to compute it once more
    stream = Stream()

    def prefilling() -> bool:
        status, record = baton.get("/v1/requests/twice")
        return status == 200 and record["state"] == "PREFILLING" and "first_token" not in record["timeline"]

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(stream.read, baton, "twice", request)
        baton.wait_for(prefilling, 30)
        kill(baton, {node_of(baton, "twice", "prefill")})
        assert stream.token_ids == [], "killed too late to show anything"
        assert stream.started.wait(60)
        kill(baton, {node_of(baton, "twice", "decode")})
        assert not reading.done(), "killed too late to show anything"
        reading.result(timeout=120)
    assert_as_undisturbed(baton, "twice", stream, request["prompt"], expected, attempt=3)
    wait_until_all_are_back(baton, before)
