"""Steps of artifact transfers: through the server, or by presigned URLs past it. Sends nothing.

An upload asks which bytes the server has and sends the rest in parts; a download resumes an earlier one. Both fall back
to the server when the object store cannot be reached.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gpool.core.errors import Conflict, GpoolError, InternalFault, Unreachable
from gpool.transfer.requests import (
    DIRECT_HEADER,
    LEASE_HEADER,
    PART_BYTES,
    Landing,
    LeaseRef,
    Reply,
    Request,
    Steps,
    error_from,
    part_of,
    path_of,
    upload_offset,
)

SIGNED_AT_ONCE = 8
"""Parts for which URLs are requested together."""


@dataclass(frozen=True, slots=True)
class PartDigests:
    """JSON request for signed URLs of parts, or to complete an upload; parts are read and hashed when it is sent."""

    source: Path | bytes
    size: int
    part_bytes: int
    numbers: tuple[int, ...]
    known: dict[int, str]  # digests by number, kept for the requests that follow
    completes: bool = False

    def read(self) -> bytes:
        parts = [{"number": number, "sha256": self._digest(number)} for number in self.numbers]
        if self.completes:
            return json.dumps({"part_sha256s": [part["sha256"] for part in parts]}).encode()
        return json.dumps({"size_bytes": self.size, "parts": parts}).encode()

    def _digest(self, number: int) -> str:
        found = self.known.get(number)
        if found is None:
            part = part_of(self.source, (number - 1) * self.part_bytes, self.part_bytes)
            content = part if isinstance(part, bytes) else part.read()
            found = self.known[number] = hashlib.sha256(content).hexdigest()
        return found


def upload(source: Path | bytes, sha256: str, size: int, lease: LeaseRef | None = None) -> Steps:
    headers = {LEASE_HEADER: lease.header} if lease is not None else {}
    reply = yield Request("HEAD", path_of(sha256), headers)
    if reply.status == 200:
        return
    if reply.status != 404:
        raise error_from(reply)
    offset = upload_offset(reply)
    least = reply.headers.get(DIRECT_HEADER.lower(), "")
    is_direct = not offset and least.isdigit() and size >= int(least) > 0
    if is_direct and (yield from _upload_direct(source, sha256, size, headers)):
        return
    while True:
        length = min(PART_BYTES, size - offset)
        ranged = dict(headers)
        if size > PART_BYTES or offset:
            ranged["Content-Range"] = f"bytes {offset}-{offset + length - 1}/{size}"
        ranged["Content-Type"] = "application/octet-stream"
        part = part_of(source, offset, length)
        reply = yield Request("PUT", path_of(sha256), ranged, part)
        if reply.status in (200, 201, 204):
            return
        if reply.status != 202:
            raise _refusal(reply, sha256)
        reached = upload_offset(reply)
        if reached <= offset or reached >= size:
            raise InternalFault(f"the server stopped at byte {reached} of {size} of {sha256}")
        offset = reached


def _upload_direct(
    source: Path | bytes, sha256: str, size: int, headers: Mapping[str, str]
) -> Generator[Request, Reply, bool]:
    """Send the parts to the object store; False: send them through the server instead.

    A store that takes no part at all is not reachable from here, or clocks differ. One that has taken some is tried
    again after a pause, which continues with the missing parts.
    """
    signing, posted = f"{path_of(sha256)}/parts", {**headers, "Content-Type": "application/json"}
    reply = yield Request("POST", signing, posted, PartDigests(source, size, size, (), {}))
    if reply.status != 200:
        raise _refusal(reply, sha256)
    begun = reply.json()
    length = int(begun["part_bytes"])
    if not length:
        return False
    stored = set(begun["stored"])
    whole = tuple(range(1, -(-size // length) + 1))
    missing = [number for number in whole if number not in stored]
    has_sent, known = False, dict[int, str]()
    while missing:
        numbers, missing = tuple(missing[:SIGNED_AT_ONCE]), missing[SIGNED_AT_ONCE:]
        wanted = PartDigests(source, size, length, numbers, known)
        reply = yield Request("POST", signing, posted, wanted)
        if reply.status != 200:
            raise _refusal(reply, sha256)
        for signed in reply.json()["parts"]:
            first = (int(signed["number"]) - 1) * length
            part = part_of(source, first, min(length, size - first))
            put = Request("PUT", str(signed["url"]), signed["headers"], part, to_store=True)
            try:
                status = (yield put).status
            except Unreachable:
                status = 0
            if status != 200:
                if has_sent:
                    raise Unreachable(f"the object store stopped taking parts of {sha256}")
                return False
            has_sent = True
    digests = PartDigests(source, size, length, whole, known, completes=True)
    while True:
        reply = yield Request("POST", f"{path_of(sha256)}/complete", posted, digests)
        if reply.status in (200, 201):
            return True
        if reply.status != 202:
            raise _refusal(reply, sha256)


def download(sha256: str, landing: Landing, lease: LeaseRef | None = None) -> Steps:
    """Return once the landing holds all of it, verified."""
    if landing.size and landing.sha256 == sha256:
        return
    headers = {"Accept-Encoding": "identity"}  # ranges must count the hashed bytes
    had = landing.size
    if had:
        headers["Range"] = f"bytes={had}-"
    leased = {LEASE_HEADER: lease.header} if lease is not None else {}
    asked = {**headers, **leased, DIRECT_HEADER: "1"}
    reply = yield Request("GET", path_of(sha256), asked, into=landing)
    if reply.status == 307:
        url = reply.headers.get("location", "")
        try:
            reply = yield Request("GET", url, headers, into=landing, to_store=True)
        except Unreachable:
            if landing.size > had:
                raise
            reply = Reply(0, {})
        if reply.status not in (200, 206, 416):
            reply = yield Request("GET", path_of(sha256), {**headers, **leased}, into=landing)
    if reply.status == 416:  # the file is longer than the artifact
        landing.begin_again()
        raise Unreachable(f"the fetched part of {sha256} was corrupt; trying again")
    if reply.status not in (200, 206):
        raise error_from(reply)
    if landing.sha256 != sha256:
        landing.begin_again()
        if had and reply.status == 206:  # bytes of an earlier try may be corrupt
            raise Unreachable(f"the fetched part of {sha256} was corrupt; trying again")
        raise InternalFault(f"what the server sent for {sha256} does not match its hash")


def _refusal(reply: Reply, sha256: str) -> GpoolError:
    """A part at the wrong offset is no refusal: another try or sender was further."""
    error = error_from(reply)
    if type(error) is Conflict:
        return Unreachable(f"another upload of {sha256} is not through yet; trying again")
    return error
