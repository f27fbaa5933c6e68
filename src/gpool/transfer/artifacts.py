"""Artifacts up and down, written once: generators that yield requests and are given replies. They touch no network.

An upload first asks what the server has, then sends the rest in parts; a download goes on where an earlier one stopped.
Both can be started anew after any failure: that is how they are retried.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from gpool.core.errors import InternalFault, Unprocessable, Unreachable
from gpool.core.ids import encode
from gpool.core.model import MIB
from gpool.transfer.requests import FilePart, Reply, Request, error_from

PART_BYTES = 8 * MIB
LEASE_HEADER = "Gpool-Lease"

Steps = Generator[Request, Reply, None]


@dataclass(frozen=True, slots=True)
class LeaseRef:
    """Under which lease an agent uploads: the fence of its artifacts."""

    task: int
    epoch: int

    @property
    def header(self) -> str:
        return f"{encode('task', self.task)}:{self.epoch}"


def path_of(sha256: str) -> str:
    return f"/v1/artifacts/{sha256}"


def hash_of(file: Path) -> tuple[str, int]:
    """(SHA-256, size) of a file, with flat memory."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest(), opened.tell()


def upload(file: Path, sha256: str, size: int, lease: LeaseRef | None = None) -> Steps:
    """Send a file that hashes to `sha256`; nothing is sent that the server has."""
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
        part = FilePart(file, offset, length)
        reply = yield Request("PUT", path_of(sha256), ranged, part)
        if reply.status in (200, 201, 204):
            return
        if reply.status != 202:
            raise error_from(reply)
        reached = _offset(reply)
        if reached <= offset or reached >= size:
            raise InternalFault(f"the server stopped at byte {reached} of {size} of {sha256}")
        offset = reached


def download(sha256: str, target: Path, lease: LeaseRef | None = None) -> Steps:
    """Fetch an artifact to `target`: whole and verified, or not there at all."""
    part = target.with_name(target.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}  # ranges count the bytes that are hashed
    if lease is not None:
        headers[LEASE_HEADER] = lease.header
    if have:
        headers["Range"] = f"bytes={have}-"
    reply = yield Request("GET", path_of(sha256), headers, into=part)
    if reply.status not in (200, 206):
        if reply.status == 416:  # we have all of it, or too much
            if _settles(part, sha256, target):
                return
            raise Unreachable(f"the fetched part of {sha256} was of no use; trying again")
        raise error_from(reply)
    if not part.exists():
        part.touch()  # an empty artifact
    if not _settles(part, sha256, target):
        raise Unprocessable(f"what the server sent for {sha256} does not match its hash")


def _settles(part: Path, sha256: str, target: Path) -> bool:
    """Whether the part is the whole and now stands at its place; a wrong one is removed."""
    if hash_of(part)[0] == sha256:
        os.replace(part, target)
        return True
    part.unlink()
    return False


def _offset(reply: Reply) -> int:
    text = reply.headers.get("upload-offset", "0")
    return int(text) if text.isdigit() else 0
