"""Real requests through the real pipeline: Flask, Redis, Celery, ZMQ, shared memory, Paddle, the default model."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from openai import OpenAI
from redis import Redis

from app.broker import broker_options
from app.settings import load_settings
from tests.integration.baton import Baton

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]

MODEL = "smollm2-135m-instruct"
REFERENCES = Path(__file__).parents[1] / "references"
GREEDY: list[dict[str, Any]] = json.loads((REFERENCES / "greedy_reference.json").read_text())
LONG: list[dict[str, Any]] = json.loads((REFERENCES / "long_reference.json").read_text())


@pytest.fixture(scope="module")
def client(baton: Baton) -> OpenAI:
    return OpenAI(base_url=f"http://127.0.0.1:{baton.port}/v1", api_key="none", max_retries=0, timeout=240)


def complete(client: OpenAI, case: dict[str, Any], **more: Any) -> list[int]:
    """Output ids of a reference's prompt, not streamed."""
    answer = client.completions.create(
        model=MODEL,
        prompt=case["prompt_ids"],
        max_tokens=max(64, len(case["output_ids"])) if case["finish"] == "stop" else len(case["output_ids"]),
        temperature=0,
        extra_body={"return_token_ids": True, **more},
    )
    assert answer.choices[0].finish_reason == case["finish"]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(case["output_ids"])
    assert answer.choices[0].text == case["text"]
    return list(answer.choices[0].token_ids)  # type: ignore[attr-defined]


def stream(client: OpenAI, case: dict[str, Any]) -> list[int]:
    """Output ids of a reference's prompt, streamed; the text deltas must add up to the reference's text."""
    ids: list[int] = []
    text, finish = "", None
    chunks = client.completions.create(
        model=MODEL,
        prompt=case["prompt_ids"],
        max_tokens=max(64, len(case["output_ids"])) if case["finish"] == "stop" else len(case["output_ids"]),
        temperature=0,
        stream=True,
        extra_body={"return_token_ids": True},
    )
    for chunk in chunks:
        choice = chunk.choices[0]
        ids += getattr(choice, "token_ids", None) or []
        text += choice.text
        finish = choice.finish_reason or finish
    assert (text, finish) == (case["text"], case["finish"])
    return ids


def blocks_in_use(baton: Baton) -> int:
    """Blocks that somebody holds, on all nodes, once no request is in the cluster."""
    nodes = baton.get("/cluster")[1]["nodes"]
    return sum(node["blocks"]["total"] - node["blocks"]["free"] - node["blocks"]["cached"] for node in nodes)


def wait_for_baseline(baton: Baton) -> None:
    baton.wait_for(lambda: blocks_in_use(baton) == 0 and not baton.get("/cluster")[1]["leases"], 10)


@pytest.fixture(scope="module")
def answers(client: OpenAI) -> Iterator[list[tuple[Future[list[int]], Future[list[int]]]]]:
    """Each reference, not streamed and streamed: the first two before all others, then a few at a time, so
    that both decode nodes have work."""
    with ThreadPoolExecutor(4) as pool:
        asked = []
        for number, case in enumerate(GREEDY):
            asked.append((pool.submit(complete, client, case), pool.submit(stream, client, case)))
            if number < 2:
                wait([*asked[-1]])
        yield asked
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("number", range(len(GREEDY)), ids=[case["prompt"][:24] for case in GREEDY])
def test_a_reference_comes_back_token_by_token_streamed_and_not(
    answers: list[tuple[Future[list[int]], Future[list[int]]]], number: int
) -> None:
    plain, streamed = answers[number]
    assert plain.result() == GREEDY[number]["output_ids"]
    assert streamed.result() == GREEDY[number]["output_ids"]


def test_all_references_at_once_come_back_token_by_token(client: OpenAI, baton: Baton) -> None:
    with ThreadPoolExecutor(2 * len(GREEDY)) as pool:
        plain = [pool.submit(complete, client, case) for case in GREEDY]
        streamed = [pool.submit(stream, client, case) for case in GREEDY]
    assert [future.result() for future in plain] == [case["output_ids"] for case in GREEDY]
    assert [future.result() for future in streamed] == [case["output_ids"] for case in GREEDY]
    wait_for_baseline(baton)


@pytest.mark.parametrize("case", LONG, ids=[f"{len(case['prompt_ids'])} tokens" for case in LONG])
def test_a_long_prompt_is_exact_over_many_chunks_and_blocks(client: OpenAI, case: dict[str, Any]) -> None:
    assert complete(client, case) == case["output_ids"]


def test_heartbeats_wait_for_no_step_however_large_it_is(client: OpenAI, baton: Baton) -> None:
    """Of each of these prompts 512 tokens go through both prefill nodes in one step."""
    case = LONG[0]
    with ThreadPoolExecutor(4) as pool, baton.heartbeats_watched() as ages:
        answers = list(pool.map(lambda n: complete(client, case, cache_salt=f"heartbeats-{n}"), range(4)))
    assert answers == [case["output_ids"]] * 4
    logs = "".join(baton.log(name).read_text() for name in ("prefill1", "prefill2"))
    steps = re.findall(r" tokens=600 engine_ms=(\d+)", logs)
    print(f"steps for 600 tokens took up to {max(map(int, steps))} ms, the oldest heartbeat was {max(ages):.2f} s")
    assert max(ages) < load_settings().node_ttl_s / 2


@pytest.mark.parametrize("case", [c for c in GREEDY if c["kind"] == "chat"], ids=lambda case: case["prompt"][:20])
def test_a_chat_goes_through_the_template_and_streams_the_references_text(client: OpenAI, case: dict[str, Any]) -> None:
    chunks = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": case["prompt"]}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, usage = "", None
    for chunk in chunks:
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == case["text"]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(case["prompt_ids"]), len(case["output_ids"]))


def test_forty_requests_at_once_are_all_exact_and_use_both_decode_nodes(client: OpenAI, baton: Baton) -> None:
    cases = [GREEDY[number % len(GREEDY)] for number in range(40)]
    seen: set[str] = set()
    done = threading.Event()

    def look() -> None:
        while not done.is_set():
            seen.update(lease["node"].split("@")[0] for lease in baton.get("/cluster")[1]["leases"])
            done.wait(0.2)

    watcher = threading.Thread(target=look)
    watcher.start()
    with ThreadPoolExecutor(len(cases)) as pool:
        answers = list(pool.map(lambda case: complete(client, case), cases))
    done.set()
    watcher.join()
    assert answers == [case["output_ids"] for case in cases]
    assert seen == {"decode1", "decode2"}
    wait_for_baseline(baton)


def test_sampling_with_a_seed_repeats_and_another_seed_differs(client: OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=24, temperature=1.0, top_p=0.95, seed=seed
        )
        return answer.choices[0].text

    with ThreadPoolExecutor(4) as pool:  # together and alone: the batch must not matter
        together = list(pool.map(sample, [7, 8, 7, 9]))
    assert together[0] == together[2] == sample(7)
    assert len(set(together)) == 3


def test_fifty_equal_ids_at_once_give_one_answer_and_49_conflicts(baton: Baton) -> None:
    case = GREEDY[6]
    body = {"model": MODEL, "prompt": case["prompt_ids"], "max_tokens": 64, "temperature": 0}
    log = baton.log("web")
    before = log.read_text().count("request_id=fifty")

    def send(_: int) -> tuple[int, dict[str, str], Any]:
        return baton.post("/v1/completions", body, {"X-Request-Id": "fifty"})

    with ThreadPoolExecutor(50) as pool:
        answers = list(pool.map(send, range(50)))
    statuses = sorted(status for status, _, _ in answers)
    assert statuses == [200] + [409] * 49
    good = next(answer for status, _, answer in answers if status == 200)
    assert good["choices"][0]["text"] == case["text"]
    for status, headers, answer in answers:
        if status == 409:
            assert headers["x-should-retry"] == "false"
            assert set(answer["error"]) == {"message", "type", "param", "code"}
            assert "fifty" in answer["error"]["message"]
    assert before == 0
    refused = [line for line in log.read_text().splitlines() if "request_id=fifty" in line and "duplicate" in line]
    assert len(refused) == 49


def test_an_aborted_id_with_another_prompt_never_gets_a_token_of_the_first(baton: Baton, client: OpenAI) -> None:
    first, second = GREEDY[2], GREEDY[9]
    for _ in range(3):
        started = threading.Event()

        def run(started: threading.Event = started) -> None:
            body = {"model": MODEL, "prompt": first["prompt_ids"], "max_tokens": 64, "temperature": 0, "stream": True}
            for _line in baton.lines("/v1/completions", body, {"X-Request-Id": "again"}):
                started.set()

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(60)
        assert baton.post("/v1/requests/again/cancel", {})[0] == 200
        body = {
            "model": MODEL,
            "prompt": second["prompt_ids"],
            "max_tokens": 64,
            "temperature": 0,
            "return_token_ids": True,
        }
        status, _, answer = baton.post("/v1/completions", body, {"X-Request-Id": "again"})
        assert status == 200
        assert answer["choices"][0]["token_ids"] == second["output_ids"]
        thread.join(30)
    wait_for_baseline(baton)


def test_a_client_that_goes_away_frees_its_blocks(baton: Baton) -> None:
    body = {"model": MODEL, "prompt": "Tell me everything.", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    lines = baton.lines("/v1/completions", body)
    next(lines)
    assert baton.get("/cluster")[1]["leases"]
    lines.close()
    wait_for_baseline(baton)


def test_the_record_tells_the_phases_in_order(baton: Baton) -> None:
    body = {"model": MODEL, "prompt": "Hello", "max_tokens": 5, "temperature": 0}
    status, headers, answer = baton.post("/v1/completions", body, {"X-Request-Id": "phases"})
    assert (status, headers["x-request-id"]) == (200, "phases")
    record = baton.get("/v1/requests/phases")[1]
    assert baton.get(f"/v1/requests/{answer['id']}")[1] == record, "the answer's own id names it, too"
    assert (record["state"], record["attempt"]) == ("FINISHED", 1)
    phases = ["queued", "claimed", "granted", "first_token", "committed", "activated", "finished"]
    times = [record["timeline"][phase] for phase in phases]
    assert times[0] <= times[1] <= times[2]
    assert times[3] <= times[4] + 0.1 <= times[5] + 0.2 <= times[6] + 0.3
    assert record["nodes"]["prefill"].startswith("prefill")
    assert record["nodes"]["decode"].startswith("decode")


def test_limits_at_the_seam_between_prefill_and_decode(client: OpenAI, baton: Baton) -> None:
    """A prompt that fills its blocks exactly; answers that end with prefill's own token, in each of three ways."""
    case = GREEDY[6]
    cut = 48 - len(case["prompt_ids"])  # three full blocks of 16
    prompt, rest = case["prompt_ids"] + case["output_ids"][:cut], case["output_ids"][cut:]

    def ask(**more: Any) -> tuple[list[int], str, str]:
        body = {"model": MODEL, "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}
        status, _, answer = baton.post("/v1/completions", body)
        assert status == 200, answer
        choice = answer["choices"][0]
        return choice["token_ids"], choice["text"], choice["finish_reason"]

    ids, text, finish = ask(max_tokens=16)
    assert (ids, finish) == (rest[:16], "length")
    ids, first, finish = ask(max_tokens=1)
    assert (ids, finish) == (rest[:1], "length")
    assert text.startswith(first)
    assert ask(max_tokens=16, stop=[first]) == (rest[:1], "", "stop")
    ended = GREEDY[7]  # the token before EOS is the last of the prompt
    prompt = ended["prompt_ids"] + ended["output_ids"][:-1]
    assert ask(max_tokens=16) == (ended["output_ids"][-1:], "", "stop")
    wait_for_baseline(baton)


def test_stop_strings_cut_the_text_where_it_says(client: OpenAI) -> None:
    case = GREEDY[4]  # " Apollo 8, and it was a groundbreaking feat. …"
    answer = client.completions.create(
        model=MODEL, prompt=case["prompt_ids"], max_tokens=64, temperature=0, stop=["groundbreaking feat"]
    )
    assert answer.choices[0].text == case["text"].split("groundbreaking feat")[0]
    assert answer.choices[0].finish_reason == "stop"


def test_flower_shows_every_worker_by_name_and_the_tasks_of_requests_without_their_prompts(
    baton: Baton, client: OpenAI
) -> None:
    secret = "xylophone quixotic zeppelin"
    client.completions.create(model=MODEL, prompt=secret, max_tokens=4, temperature=0)

    def tasks() -> dict[str, dict[str, Any]]:
        return baton.flower("/api/tasks?limit=1000")

    def shown() -> bool:
        names = {(task["name"], (task.get("worker") or "").split("@")[0]) for task in tasks().values()}
        roles = {("prefill.bell", "prefill"), ("decode.bell", "decode")}
        return roles <= {(name, worker.rstrip("12")) for name, worker in names}

    baton.wait_for(shown, 20)
    workers = {name.split("@")[0] for name in baton.flower("/api/workers?refresh=1")}
    assert {"prefill1", "prefill2", "decode1", "decode2", "control1"} <= workers
    everything = json.dumps(tasks())
    assert not any(word in everything for word in secret.split())
    succeeded = [task for task in tasks().values() if task["name"] == "decode.bell" and task["state"] == "SUCCESS"]
    assert any("finished" in str(task["result"]) for task in succeeded)


def test_an_idle_cluster_is_at_baseline_for_a_while(baton: Baton) -> None:
    wait_for_baseline(baton)
    start = time.monotonic()
    baton.wait_for(lambda: time.monotonic() - start > 2, 5)
    assert blocks_in_use(baton) == 0


def test_doubled_and_malformed_bells_harm_nobody(baton: Baton, client: OpenAI) -> None:
    """The broker may deliver one message twice under one task id, and anybody may put rubbish into its queues."""
    settings = load_settings(redis_url=baton.find(r"Redis +(\S+)"))
    before = {name: node["incarnation"] for name, node in baton.nodes().items()}
    rubbish: list[Any] = [("no-such-uid", 1), (), ("uid",), ("uid", "one"), ("uid", None), (["uid"], {}), ("", 0)]
    with Celery("stranger", broker=settings.effective_broker_url, set_as_current=False) as stranger:
        stranger.conf.broker_transport_options = broker_options(settings)
        for queue in ("prefill", "decode"):
            for number, arguments in enumerate(rubbish):
                for _ in range(2):
                    stranger.send_task(f"{queue}.bell", arguments, task_id=f"{queue}-{number}", queue=queue)
    case = GREEDY[1]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: complete(client, case), range(4)))
    assert answers == [case["output_ids"]] * 4
    assert {name: node["incarnation"] for name, node in baton.nodes().items()} == before
    wait_for_baseline(baton)


def test_a_ledger_that_refuses_writes_for_a_while_ends_no_worker_and_no_answer(baton: Baton) -> None:
    """What a failover or a full disk looks like: every write is answered with an error, the workers' BRPOP too."""
    case = GREEDY[3]
    before = {name: node["pid"] for name, node in baton.nodes().items()}
    redis = Redis.from_url(baton.find(r"Redis +(\S+)"))
    body = {"model": MODEL, "prompt": case["prompt_ids"], "max_tokens": 64, "temperature": 0, "stream": True}
    text = ""
    refusing = False
    try:
        for line in baton.lines("/v1/completions", body):
            if line.startswith(b"data: {"):
                choice = json.loads(line[6:])["choices"][0]
                text += choice["text"]
                if len(text) > 20 and not refusing:
                    refusing = True
                    redis.config_set("min-replicas-to-write", 1)
                    threading.Timer(2.0, lambda: redis.config_set("min-replicas-to-write", 0)).start()
    finally:
        redis.config_set("min-replicas-to-write", 0)
        redis.close()
    assert refusing
    assert text == case["text"]
    baton.wait_for(lambda: {name: node["pid"] for name, node in baton.nodes().items()} == before, 15)
    wait_for_baseline(baton)
