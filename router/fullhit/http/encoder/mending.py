"""Changing a call on its way: pictures that cannot be read, and failures of which nobody has heard yet.

Everywhere else a body goes through byte for byte. What may be done when, and why, says `remedy`; how, `rewrite` and
`substitute`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from .calls import Call
from .media import BadBody, parse_encode
from .remedy import MAX_RESENDS, brief, is_media_fault, suspects
from .replies import Refusal, message_in
from .rewrite import CannotRewrite, renamed
from .shared import Shared
from .substitute import substitute_items
from .upstream import Answer, Failure

__all__ = ["Mender"]


class Mender:
    """Used by `EncodeRoute`; changes ``body``, ``info`` and the id of the `Call` it is given."""

    def __init__(self, shared: Shared) -> None:
        self._settings = shared.settings
        self._telemetry = shared.telemetry
        self._table = shared.table
        self._peers = shared.peers
        self._seldom = shared.seldom
        self._loop = asyncio.get_running_loop()

    # --- bad pictures

    def mind_pictures(self, call: Call) -> None:
        """Refuse the call or replace the pictures, whichever the caller's backend survives."""
        info = call.info
        backend = self._peers.backend(call.peer, info)
        action = self._settings.bad_image
        if action == "auto":
            action = "substitute" if backend == "zmq_to_scheduler" else "reject"
        call.pictures = tuple(f"item {bad.index} of {info.items}: {bad.problem}" for bad in info.bad)
        body: bytes | None = None
        if action == "substitute":
            try:
                body = substitute_items(call.body, {bad.index for bad in info.bad}, info.items)
                call.info = parse_encode(body)
                call.body = body
                call.replaced = frozenset(bad.index for bad in info.bad)
            except (CannotRewrite, BadBody):
                body = None
        self._report_pictures(call, "rejected" if body is None else "substituted", backend, call.pictures)
        if body is None:
            raise Refusal(400, f"image cannot be decoded: {'; '.join(call.pictures)}"[:1_000], "bad_image")

    def _report_pictures(self, call: Call, done: str, backend: str, pictures: Sequence[str]) -> None:
        for _ in pictures:
            self._telemetry.count("bad_images", action=done)
        if self._seldom.due(f"bad_image {call.peer}", 1.0):
            self._telemetry.event(
                "bad_image",
                level="warning",
                action=done,
                req_id=call.part.req_id,
                request_id=call.request_id.decode(),
                peer=call.peer,
                backend=backend,
                pictures=list(pictures),
            )

    # --- failures that nobody has heard of

    def is_unheard(self, call: Call, attempt: int) -> bool:
        """Whether what the encoder of ``attempt`` has done cannot have reached the language server."""
        part, info = call.part, call.info
        if info.embedding_port is not None or not self._table.unheard(part, attempt):
            return False
        return bool(part.registrations) or self._peers.backend(call.peer, info) == "zmq_to_scheduler"

    def remedy(self, call: Call, attempt: int, answer: Answer) -> Failure | None:
        """Prepare the call for another try after an error nobody has heard of. None: pass the error on."""
        status = answer.status
        if status not in (400, 500, 504) or not self.is_unheard(call, attempt):
            return None
        message = message_in(answer.body)
        if is_media_fault(status, message, call.info) and (status == 400 or call.lost):
            if self._replace_refused(call, message):
                return Failure("bad_media", None, "yes", status, brief(message), blame=False)
            return None
        if status == 400 or (status == 504 and not call.part.registrations):
            return None
        if call.lost + 1 >= self._settings.max_lost or self._loop.time() >= call.deadline or not self.rename(call):
            return None
        call.lost += 1
        return Failure("refused", "5xx", "yes", status, brief(message) or f"status {status}")

    def _replace_refused(self, call: Call, message: str) -> bool:
        """Replace the pictures which the encoder could not read; False when there is no way."""
        if self._settings.bad_image not in ("auto", "substitute") or call.resends >= MAX_RESENDS:
            return False
        places = suspects(call.body, message, call.replaced, again=call.resends > 0)
        if not places:
            return False
        try:
            body = substitute_items(call.body, places, call.info.items)
            info = replace(parse_encode(body), req_id=call.part.req_id)
        except (CannotRewrite, BadBody):
            return False
        if not self.rename(call, body):
            return False
        call.info = info
        call.resends += 1
        call.replaced |= frozenset(places)
        said = f"refused by {call.part.worker}: {brief(message)}"
        pictures = tuple(f"item {place} of {info.items}: {said}" for place in places)
        call.pictures += pictures
        self._report_pictures(call, "substituted_after_refusal", "zmq_to_scheduler", pictures)
        return True

    def rename(self, call: Call, body: bytes | None = None) -> bool:
        """Give the part a fresh id, in ``body`` or else the body of the call; False when it cannot have one."""
        fresh = self._table.fresh_id(call.part)
        if not fresh:
            return False
        try:
            call.body = renamed(call.body if body is None else body, fresh)
        except CannotRewrite:
            return False
        call.part.alias_id = call.wire_id = fresh
        return True

    def dress(self, call: Call) -> None:
        """Write the id of the part into a body that has another one."""
        try:
            call.body = renamed(call.body, call.part.wire_id)
        except CannotRewrite:
            call.part.alias_id = ""
        call.wire_id = call.part.wire_id
