"""Commands to JSON and JSON to answers, for the scripts. What is opaque to the scripts travels as a string.

cjson writes an empty list as ``{}`` and has no integers above 2^53: prompts, outputs, sampling parameters, node infos
and gauges are JSON strings inside the JSON; every other list is read with ``or ()``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from app.protocol.commands import (
    Abort,
    AbortAnswer,
    AbortStatus,
    Activate,
    ActivateAnswer,
    ActivateStatus,
    Admit,
    AdmitAnswer,
    AdmitStatus,
    Answer,
    Attach,
    AttachAnswer,
    AttachStatus,
    Bell,
    Claim,
    ClaimAnswer,
    ClaimStatus,
    Cluster,
    ClusterAnswer,
    ClusterLease,
    ClusterNode,
    Command,
    Deregister,
    Detach,
    Drain,
    Emit,
    EmitAnswer,
    EmitStatus,
    Event,
    FailAnswer,
    FailAttempt,
    FailStatus,
    Heartbeat,
    HeldClaim,
    HeldLease,
    Holdings,
    HoldingsAnswer,
    NodeAnswer,
    NodeStatus,
    ReadStatus,
    Register,
    ReportExit,
    ReserveAnswer,
    ReserveNext,
    ReserveStatus,
    Scan,
    ScanAnswer,
    Sibling,
    Snapshot,
    SnapshotAnswer,
    Stamp,
    StampAnswer,
    StampStatus,
    Work,
)
from app.schemas import FinishReason, Gauges, NodeInfo, SamplingParams

Raw = Mapping[str, Any]


def _admit(command: Admit) -> dict[str, Any]:
    fields = _sequence(command, None) | {
        "client_id": command.client_id,
        "web": command.watcher.web,
        "connection": command.watcher.connection,
        "logprobs": command.sampling.logprobs is not None,
        "limits": asdict(command.limits),
        "key": command.key.scoped if command.key else "",
        "body": command.key.body if command.key else "",
        "salt": command.salt,
    }
    if command.more:  # prompts are large, and those of `n` sequences the same
        prompts = (command.prompt_ids, *(each.prompt_ids for each in command.more))
        fields["more"] = [_sequence(each, before) for before, each in zip(prompts, command.more, strict=False)]
    return fields


def _sequence(each: Admit | Sibling, prompt_before: tuple[int, ...] | None) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "uid": each.uid,
        "sampling": each.sampling.model_dump_json(exclude_defaults=True),
        "max_tokens": each.sampling.max_tokens,
    }
    if each.prompt_ids != prompt_before:
        fields["prompt"] = json.dumps(each.prompt_ids, separators=(",", ":"))
        fields["prompt_tokens"] = len(each.prompt_ids)
    return fields


def _watcher(command: Attach | Detach) -> dict[str, Any]:
    return {"uid": command.uid, "web": command.watcher.web, "connection": command.watcher.connection}


def _emission(command: Emit) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "uid": command.uid,
        "attempt": command.attempt,
        "fence": command.fence,
        "incarnation": command.incarnation,
        "index": command.index,
        "tokens": command.tokens,
        "finish_reason": command.finish_reason or "",
        "blocks": command.blocks,
        "cached_tokens": command.cached_tokens,
    }
    if command.logprobs:
        fields["logprobs"] = command.logprobs
    return fields


def _register(command: Register) -> dict[str, Any]:
    node = command.node
    return {
        "incarnation": node.incarnation,
        "role": node.role,
        "name": node.name,
        "address": node.address,
        "model": node.model,
        "layout": node.layout,
        "num_blocks": node.num_blocks,
        "room_tokens": node.num_blocks * node.block_size_tokens,
        "newest": node.newest,
        "info": node.model_dump_json(),
        "node_ttl_ms": command.node_ttl_ms,
    }


def _heartbeat(command: Heartbeat) -> dict[str, Any]:
    return {"incarnation": command.incarnation, "gauges": command.gauges.model_dump_json()}


_ENCODERS: Mapping[type, Callable[[Any], dict[str, Any]]] = {
    Admit: _admit,
    Attach: _watcher,
    Detach: _watcher,
    Register: _register,
    Heartbeat: _heartbeat,
}


def encode(command: Command) -> str:
    """The command as the JSON that its script reads."""
    encoder = _ENCODERS.get(type(command), asdict)
    return json.dumps(encoder(command), separators=(",", ":"))


def encode_emits(commands: Sequence[Emit]) -> str:
    """Any number of emissions as the JSON that their script reads; it takes them one after another."""
    return json.dumps({"emissions": [_emission(command) for command in commands]}, separators=(",", ":"))


def _ids(text: str) -> tuple[int, ...]:
    return tuple(json.loads(text))


def _logprobs(text: str) -> tuple[str, ...]:
    return tuple(text.split("|")) if text else ()


def _reason(text: str) -> FinishReason | None:
    return cast(FinishReason, text) if text else None


def _work(raw: Raw | None) -> Work | None:
    if not raw:
        return None
    return Work(
        uid=raw["uid"],
        client_id=raw["client_id"],
        attempt=raw["attempt"],
        fence=raw["fence"],
        prompt_ids=_ids(raw["prompt"]),
        output_ids=_ids(raw["output"]),
        sampling=SamplingParams.model_validate_json(raw["sampling"]),
        salt=raw["salt"],
    )


def _admit_answer(raw: Raw) -> AdmitAnswer:
    return AdmitAnswer(**{**raw, "status": AdmitStatus(raw["status"])})


def _abort_answer(raw: Raw) -> AbortAnswer:
    return AbortAnswer(AbortStatus(raw["status"]), raw["time_ms"], raw.get("state", ""))


def _attach_answer(raw: Raw) -> AttachAnswer:
    record = raw.get("record")
    read = _snapshot_answer({**record, "time_ms": raw["time_ms"]}) if record else None
    return AttachAnswer(AttachStatus(raw["status"]), raw["time_ms"], read)


def _snapshot_answer(raw: Raw) -> SnapshotAnswer:
    fields = dict(raw)
    fields["status"] = ReadStatus(raw["status"])
    if "output" in fields:
        fields["output_ids"] = _ids(fields.pop("output"))
        fields["logprobs"] = _logprobs(raw.get("logprobs", ""))
        fields["finish_reason"] = _reason(raw["finish_reason"])
    return SnapshotAnswer(**fields)


def _claim_answer(raw: Raw) -> ClaimAnswer:
    return ClaimAnswer(
        ClaimStatus(raw["status"]), raw["time_ms"], _work(raw.get("work")), raw.get("queue_empty", False)
    )


def _stamp_answer(raw: Raw) -> StampAnswer:
    return StampAnswer(StampStatus(raw["status"]), raw["time_ms"])


def _fail_answer(raw: Raw) -> FailAnswer:
    return FailAnswer(FailStatus(raw["status"]), raw["time_ms"], raw.get("attempt", 0))


def _reserve_answer(raw: Raw) -> ReserveAnswer:
    return ReserveAnswer(**{**raw, "status": ReserveStatus(raw["status"])})


def _activate_answer(raw: Raw) -> ActivateAnswer:
    return ActivateAnswer(ActivateStatus(raw["status"]), raw["time_ms"], _work(raw.get("work")))


def _emit_answer(raw: Raw, time_ms: int) -> EmitAnswer:
    return EmitAnswer(EmitStatus(raw["status"]), time_ms, raw["length"])


def _node_answer(raw: Raw) -> NodeAnswer:
    return NodeAnswer(NodeStatus(raw["status"]), raw["time_ms"], raw.get("detail", ""), version=raw.get("version", 0))


def _scan_answer(raw: Raw) -> ScanAnswer:
    return ScanAnswer(
        ran=raw["ran"],
        time_ms=raw["time_ms"],
        bells=tuple(Bell(**bell) for bell in raw.get("bells") or ()),
        expired=tuple(raw.get("expired") or ()),
        recovered=tuple(raw.get("recovered") or ()),
        dead=tuple(raw.get("dead") or ()),
        more=raw.get("more", False),
    )


def _holdings_answer(raw: Raw) -> HoldingsAnswer:
    return HoldingsAnswer(
        status=ReadStatus(raw["status"]),
        time_ms=raw["time_ms"],
        claims=tuple(HeldClaim(**claim) for claim in raw.get("claims") or ()),
        leases=tuple(HeldLease(**lease) for lease in raw.get("leases") or ()),
        queued=raw.get("queued", 0),
        waiting_for_grant=raw.get("waiting_for_grant", 0),
    )


def _cluster_node(raw: Raw) -> ClusterNode:
    return ClusterNode(
        node=NodeInfo.model_validate_json(raw["info"]),
        gauges=Gauges.model_validate_json(raw["gauges"]),
        state=raw["state"],
        heartbeat_age_ms=raw["age"],
    )


def _cluster_lease(raw: Raw) -> ClusterLease:
    fields = dict(raw)
    return ClusterLease(age_ms=fields.pop("age"), **fields)


def _cluster_answer(raw: Raw) -> ClusterAnswer:
    return ClusterAnswer(
        time_ms=raw["time_ms"],
        nodes=tuple(_cluster_node(node) for node in raw["nodes"] or ()),
        leases=tuple(_cluster_lease(lease) for lease in raw["leases"] or ()),
        queued=raw["queued"],
        waiting_for_grant=raw["waiting"],
        version=raw["version"],
    )


_DECODERS: Mapping[type, Callable[[Raw], Answer]] = {
    Admit: _admit_answer,
    Abort: _abort_answer,
    Attach: _attach_answer,
    Detach: _abort_answer,
    Snapshot: _snapshot_answer,
    Claim: _claim_answer,
    Stamp: _stamp_answer,
    FailAttempt: _fail_answer,
    ReserveNext: _reserve_answer,
    Activate: _activate_answer,
    Register: _node_answer,
    Heartbeat: _node_answer,
    Drain: _node_answer,
    Deregister: _node_answer,
    ReportExit: _scan_answer,
    Scan: _scan_answer,
    Holdings: _holdings_answer,
    Cluster: _cluster_answer,
}


def decode(command: Command, text: bytes | str) -> Answer:
    """The script's JSON answer to ``command``."""
    return _DECODERS[type(command)](json.loads(text))


def decode_emits(text: bytes | str) -> list[EmitAnswer | str]:
    """What became of each emission: an answer, or what the server said against it."""
    raw = json.loads(text)
    return [_emit_answer(each, raw["time_ms"]) if "error" not in each else each["error"] for each in raw["answers"]]


def decode_event(text: bytes | str) -> Event:
    """An entry of a web process's stream."""
    raw = json.loads(text)
    tokens = raw["tokens"]
    return Event(
        uid=raw["uid"],
        index=raw["index"],
        tokens=tuple(int(token) for token in tokens.split(",")) if tokens else (),
        state=raw.get("state", ""),
        finish_reason=_reason(raw.get("finish_reason", "")),
        error_code=raw.get("error_code", ""),
        error_detail=raw.get("error_detail", ""),
        logprobs=_logprobs(raw.get("logprobs", "")),
        cached_tokens=raw.get("cached_tokens", 0),
    )
