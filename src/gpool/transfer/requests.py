"""Requests and replies as plain values, problem documents as errors. Sends nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from gpool.core.errors import (
    BY_CODE,
    BadGpuSpec,
    Conflict,
    Forbidden,
    GpoolError,
    InternalFault,
    Invalid,
    NotFound,
    NotSignedIn,
    TooLarge,
    TooMany,
    Unprocessable,
    Unreachable,
)

_BY_STATUS: Mapping[int, type[GpoolError]] = {
    400: Invalid,
    401: NotSignedIn,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: Unprocessable,
    429: TooMany,
    502: Unreachable,
    503: Unreachable,
    504: Unreachable,
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is. `fingerprint` is that of its certificate, from the join link."""

    url: str
    fingerprint: str | None = None


@dataclass(frozen=True, slots=True)
class FilePart:
    """A stretch of a file to be sent as a body."""

    file: Path
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | FilePart = b""
    into: Path | None = None  # append the body of a 206 to this file; a 200 replaces it


@dataclass(frozen=True, slots=True)
class Reply:
    """`headers` have lower-case names; `body` is empty when it went into a file."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait between tries: doubling, with jitter, never past the cap."""

    first: float = 0.1
    cap: float = 5.0
    tries: int = 7

    def delays(self, random: Random) -> Iterator[float]:
        for turn in range(self.tries - 1):
            yield min(self.cap, self.first * 2**turn) * random.uniform(0.5, 1.0)


def error_from(reply: Reply) -> GpoolError:
    """The error the server meant: by its code, else by its status."""
    try:
        document = json.loads(reply.body) if reply.body else {}
    except ValueError:
        document = {}
    if not isinstance(document, dict):
        document = {}
    detail = str(document.get("detail") or f"the server answered {reply.status}")
    kind = BY_CODE.get(str(document.get("code")))
    if kind is None:
        kind = _BY_STATUS.get(reply.status, InternalFault)
    if issubclass(kind, BadGpuSpec):
        position = document.get("position", 0)
        return kind(
            detail,
            text=str(document.get("text", "")),
            position=position if isinstance(position, int) else 0,
        )
    error = kind(detail)
    error.members = {k: v for k, v in document.items() if k not in ("detail", "code", "title")}
    return error
