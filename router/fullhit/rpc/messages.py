"""Protobuf messages from and to the values of the decision service. No decisions here.

The JSON door shows the same facts; a test asks both and compares.
"""

from __future__ import annotations

from typing import Any

import msgspec

from fullhit.core.decision import Decision
from fullhit.core.types import Reason
from fullhit.decision import DecisionError, SelectCall, Selected, WorkerRow, WorkersChange
from fullhit.rpc.plane import LineWorker
from fullhit.rpc.v1 import router_pb2 as pb
from fullhit_publisher.identity import worker_id_for

__all__ = [
    "change_message",
    "explain_reply",
    "line_worker",
    "select_call",
    "select_reply",
    "worker_message",
]

_REASONS = {str(reason): pb.Reason.Value(f"REASON_{reason.name}") for reason in Reason}
_MAX_CANDIDATES = 16
_MAX_OPTIONS = 4_096
"""Real ones are some ten bytes: ``fps``, ``detail`` and the like. The medium has a field of its own."""

_decode_options = msgspec.json.Decoder(dict[str, Any]).decode


def select_call(request: pb.SelectRequest, max_items: int) -> SelectCall:
    """What the caller asks. Raises `DecisionError` for too many items, and for options that are no JSON object."""
    body = request.WhichOneof("body")
    if len(request.items) > max_items:
        raise DecisionError("invalid_request", f"more than {max_items} keys and items")
    return SelectCall(
        pool=request.pool,
        keys=request.keys,
        items=[_item(place, item) for place, item in enumerate(request.items)] if request.items else (),
        modality=request.modality or "IMAGE",
        sglang_encode=request.sglang_encode if body == "sglang_encode" else None,
        openai_chat=request.openai_chat if body == "openai_chat" else None,
        session=request.session,
        exclude=request.exclude,
        request_id=request.request_id,
        lease_seconds=request.lease_seconds,
        dry_run=request.dry_run,
    )


def _item(place: int, item: pb.MediaItem) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if item.options_json:
        if len(item.options_json) > _MAX_OPTIONS:
            raise DecisionError("invalid_request", f"items[{place}].options_json: over {_MAX_OPTIONS} bytes")
        try:
            fields = _decode_options(item.options_json)
        except (msgspec.DecodeError, RecursionError) as error:
            raise DecisionError("invalid_request", f"items[{place}].options_json: {error}") from None
    for name in ("url", "content_hash", "uuid"):
        value = getattr(item, name)
        if value:
            fields[name] = value
    return fields


def select_reply(selected: Selected, candidates: int) -> pb.SelectReply:
    """The answer, with at most so many candidates."""
    decision, lease = selected.decision, selected.lease
    worker, request = decision.worker, decision.request
    reply = pb.SelectReply(
        worker=pb.WorkerRef(worker_id=worker_id_for(worker.id), id=worker.id, url=worker.url, device=worker.device),
        reason=_REASONS[decision.reason],
        decision_id=decision.id,
        pool=decision.pool,
        keys=len(request.keys),
        unkeyed=request.unkeyed,
        request_id=request.request_id,
        repeated_call=selected.repeated,
    )
    if lease is not None:
        reply.lease_id = lease.id
        reply.lease_seconds = selected.seconds
    if candidates:
        reply.candidates.extend(_candidates(decision, min(candidates, _MAX_CANDIDATES)))
    return reply


def _candidates(decision: Decision, most: int) -> list[pb.Candidate]:
    return [_candidate(row) for row in decision.record()["candidates"][:most]]


def _candidate(row: dict[str, Any]) -> pb.Candidate:
    return pb.Candidate(
        id=row["worker"],
        device_class=row["class"],
        inflight=row["inflight"],
        keys_held=row["keys_held"],
        doubtful=row["doubtful"],
        predicted=row["predicted"],
        chosen=row["chosen"],
    )


def explain_reply(record: dict[str, Any]) -> pb.ExplainReply:
    """A decision record."""
    return pb.ExplainReply(
        decision_id=record["id"],
        pool=record["pool"],
        request_id=record["request_id"],
        worker=record["worker"],
        reason=_REASONS[record["reason"]],
        policy=record["policy"],
        why=record["why"],
        keys=record["inputs"]["keys"],
        candidates=[_candidate(row) for row in record["candidates"]],
        record_json=msgspec.json.encode(record, enc_hook=str).decode(),
    )


def worker_message(row: WorkerRow) -> pb.Worker:
    """One worker."""
    return pb.Worker(
        worker_id=row.worker_id,
        url=row.url,
        pool=row.pool,
        device=row.device,
        device_class=row.device_class,
        weight=row.weight,
        max_inflight=row.max_inflight,
        state=row.state,
        source=row.source,
        labels=dict(row.labels),
        draining=row.draining,
        usable=row.usable,
        doubtful=row.doubtful,
        publishing=row.publishing,
        keys=row.keys,
        inflight_requests=row.inflight,
        encoding_requests=row.encoding,
        id=row.id,
    )


def change_message(change: WorkersChange, *, initial: bool = False) -> pb.WorkersChange:
    """News for a watcher."""
    return pb.WorkersChange(
        initial=initial,
        changed=[worker_message(row) for row in change.changed],
        gone=[pb.WorkerGone(worker_id=row.worker_id, id=row.id, pool=row.pool) for row in change.gone],
    )


def line_worker(hello: pb.Hello) -> LineWorker:
    """Who opens a stream of events."""
    return LineWorker(
        url=hello.url,
        pool=hello.pool,
        device=hello.device or None,
        weight=hello.weight if hello.HasField("weight") else None,
        max_inflight=hello.max_inflight if hello.HasField("max_inflight") else None,
        labels=dict(hello.labels),
    )
