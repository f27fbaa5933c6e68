"""Upload and download of artifacts, as generators that yield requests and receive replies. No I/O.

An upload asks which bytes the server has and sends the rest in parts; a download resumes an earlier one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path

from gpool.core.errors import Conflict, GpoolError, InternalFault, Unreachable
from gpool.core.ids import encode
from gpool.core.model import MIB
from gpool.transfer.requests import FilePart, Landing, Reply, Request, error_from

PART_BYTES = 8 * MIB
LEASE_HEADER = "Gpool-Lease"

Steps = Generator[Request, Reply, None]


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """Fence of the artifacts an agent uploads."""

    task: int
    epoch: int

    @property
    def header(self) -> str:
        return f"{encode('task', self.task)}:{self.epoch}"


@dataclass(frozen=True, slots=True)
class Pause:
    seconds: float


PatientSteps = Generator[Request | Pause, Reply | Unreachable | None, None]


def path_of(sha256: str) -> str:
    return f"/v1/artifacts/{sha256}"


def hash_of(file: Path) -> tuple[str, int]:
    """(SHA-256, size) of a file, in constant memory."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest(), opened.tell()


def upload(source: Path | bytes, sha256: str, size: int, lease: LeaseRef | None = None) -> Steps:
    headers = {LEASE_HEADER: lease.header} if lease is not None else {}
    reply = yield Request("HEAD", path_of(sha256), headers)
    if reply.status == 200:
        return
    if reply.status != 404:
        raise error_from(reply)
    offset = _offset(reply)
    while True:
        length = min(PART_BYTES, size - offset)
        ranged = dict(headers)
        if size > PART_BYTES or offset:
            ranged["Content-Range"] = f"bytes {offset}-{offset + length - 1}/{size}"
        ranged["Content-Type"] = "application/octet-stream"
        part = (
            source[offset : offset + length]
            if isinstance(source, bytes)
            else FilePart(source, offset, length)
        )
        reply = yield Request("PUT", path_of(sha256), ranged, part)
        if reply.status in (200, 201, 204):
            return
        if reply.status != 202:
            raise _refusal(reply, sha256)
        reached = _offset(reply)
        if reached <= offset or reached >= size:
            raise InternalFault(f"the server stopped at byte {reached} of {size} of {sha256}")
        offset = reached


def download(sha256: str, landing: Landing, lease: LeaseRef | None = None) -> Steps:
    """Return once the landing holds all of it, verified."""
    if landing.size and landing.sha256 == sha256:
        return
    headers = {"Accept-Encoding": "identity"}  # ranges must count the hashed bytes
    if lease is not None:
        headers[LEASE_HEADER] = lease.header
    had = landing.size
    if had:
        headers["Range"] = f"bytes={had}-"
    reply = yield Request("GET", path_of(sha256), headers, into=landing)
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


def patiently(begin: Callable[[], Steps], pauses: Callable[[], Iterator[float]]) -> PatientSteps:
    """Repeat the steps after `Unreachable`; patience restarts whenever bytes have moved, also by another sender."""
    left = pauses()
    furthest = 0
    while True:
        steps = begin()
        try:
            request = next(steps)
            while True:
                had = request.into.size if request.into is not None else 0
                came = yield request
                assert came is not None
                if isinstance(came, Unreachable):
                    if request.into is not None and request.into.size > had:
                        left = pauses()
                    raise came
                if came.status in (202, 404) and (reached := _offset(came)) > furthest:
                    left, furthest = pauses(), reached
                request = steps.send(came)
        except StopIteration:
            return
        except Unreachable:
            pause = next(left, None)
            if pause is None:
                raise
        yield Pause(pause)


def _refusal(reply: Reply, sha256: str) -> GpoolError:
    """A part at the wrong offset is no refusal: another try or sender was further."""
    error = error_from(reply)
    if type(error) is Conflict:
        return Unreachable(f"another upload of {sha256} is not through yet; trying again")
    return error


def _offset(reply: Reply) -> int:
    text = reply.headers.get("upload-offset", "0")
    return int(text) if text.isdigit() else 0
