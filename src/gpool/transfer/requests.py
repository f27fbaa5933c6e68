"""Requests and replies as values, retries, and problem documents as errors. Sends nothing."""

from __future__ import annotations

import hashlib
import ipaddress
import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, BinaryIO, Protocol
from urllib.parse import urlsplit

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
from gpool.core.ids import encode
from gpool.core.model import MIB
from gpool.core.terminal import plain

JITTER = 0.5
"""Part of a pause that the server asks for by which it may be longer."""

AWAY = frozenset({502, 503, 504})
"""Statuses of a stopping server, or of a proxy whose server is down."""

_DEFAULT_PORTS = {"http": 80, "https": 443}

_BY_STATUS: Mapping[int, type[GpoolError]] = {
    400: Invalid,
    401: NotSignedIn,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    422: Unprocessable,
    429: TooMany,
    **dict.fromkeys(AWAY, Unreachable),
}


@dataclass(frozen=True, slots=True)
class Address:
    """`fingerprint`: of the server's certificate, from the join link or profile.

    `plain`: the user permits keys over unencrypted HTTP; without it only loopback is unencrypted.
    """

    url: str
    fingerprint: str | None = None
    plain: bool = False

    def refuse_if_open(self) -> None:
        """Raise `Invalid` if the traffic could be read in transit."""
        parts = urlsplit(self.url)
        if parts.scheme == "https" or self.plain or is_loopback(parts.hostname or ""):
            return
        raise Invalid(
            f"{self.url} is not encrypted, and your key could be read on its way there; use https://, with the "
            "fingerprint of its certificate where no authority vouches for it (GPOOL_PLAIN_HTTP=1 sends it all the same)"
        )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def origin_of(url: str) -> str:
    """`SCHEME://HOST[:PORT]` in one spelling: lower case, no default port, IPv6 in brackets, no path.

    Server and client both bind sign-in messages to it. `Invalid` if `url` is not an HTTP address.
    """
    try:
        parts = urlsplit(url)
        scheme, host, port = parts.scheme, parts.hostname or "", parts.port
        if ":" in host:
            host = f"[{ipaddress.ip_address(host).compressed}]"
    except ValueError:  # of its port or its brackets
        scheme, host, port = "", "", None
    if scheme not in _DEFAULT_PORTS or not host:
        raise Invalid(f"{url[:200]!r} is not the address of a server; write https://HOST:PORT")
    return f"{scheme}://{host}" + ("" if port in (None, _DEFAULT_PORTS[scheme]) else f":{port}")


class LazyBody(Protocol):
    """Body that is read when it is sent, which may block."""

    def read(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class FilePart:
    file: Path
    offset: int
    length: int

    def read(self) -> bytes:
        with self.file.open("rb") as file:
            file.seek(self.offset)
            return file.read(self.length)


def part_of(source: Path | bytes, offset: int, length: int) -> bytes | FilePart:
    if isinstance(source, bytes):
        return source[offset : offset + length]
    return FilePart(source, offset, length)


@dataclass(frozen=True, slots=True)
class Request:
    """`to_store`: `path` is a whole URL of the object store; it is sent without credentials, and may be refused."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes | LazyBody = b""
    into: Landing | None = None  # receives the body of a 206, or (restarted) of a 200
    to_store: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """`headers` have lower-case names; `body` is empty if it went into a landing."""

    status: int
    headers: Mapping[str, str]
    body: bytes = b""

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError as exc:
            raise InternalFault(f"the server answered something that is not JSON: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Patience:
    """Retry policy: total time, and pauses that double with jitter up to a maximum."""

    total_s: float = 60.0
    first_s: float = 0.05
    longest_s: float = 2.0

    def pauses(self, random: Random) -> Iterator[float]:
        ends, pause = time.monotonic() + self.total_s, self.first_s
        while (left := ends - time.monotonic()) > 0:
            yield min(pause * random.uniform(0.5, 1.0), left)
            pause = min(pause * 2, self.longest_s)


class AskedPauses:
    """Pauses that the server asks for (`Retry-After`): longer than asked, so that clients refused together do not come
    back together, and all of them within `total_s`.
    """

    def __init__(self, total_s: float, random: Random) -> None:
        self._left_s, self._random = total_s, random

    def after(self, error: GpoolError) -> float | None:
        """Seconds until the request may be repeated; None if the error names no time, or one beyond the total."""
        asked_s = error.members.get("retry_after")
        if not isinstance(asked_s, int) or not 0 < asked_s <= self._left_s:
            return None
        pause_s = asked_s * self._random.uniform(1.0, 1.0 + JITTER)
        self._left_s -= pause_s
        return pause_s


def error_from(reply: Reply) -> GpoolError:
    try:
        document = json.loads(reply.body) if reply.body else {}
    except ValueError:
        document = {}
    if not isinstance(document, dict):
        document = {}
    by_status = _BY_STATUS.get(reply.status, InternalFault)
    kind = BY_CODE.get(str(document.get("code")), by_status)
    if by_status is Unreachable and kind is not Unreachable:  # the text is a proxy's
        away = f"the answer was {reply.status}: the server is away, or starting"
        return Unreachable(away, **_asked(reply))
    # the text may hold names that other accounts chose, and ends in the caller's terminal
    detail = plain(str(document.get("detail") or f"the server answered {reply.status}"))
    if issubclass(kind, BadGpuSpec):
        position = document.get("position", 0)
        return kind(
            detail,
            text=str(document.get("text", "")),
            position=position if isinstance(position, int) else 0,
        )
    error = kind(detail)
    members = {k: v for k, v in document.items() if k not in ("detail", "code", "title")}
    error.members = {**_asked(reply), **members}
    return error


def _asked(reply: Reply) -> dict[str, object]:
    """Whole seconds of `Retry-After`, which a proxy or a refused connection sends without a document."""
    text = reply.headers.get("retry-after", "")
    return {"retry_after": int(text)} if text.isdecimal() and len(text) < 10 else {}


class Landing:
    """Writes to an open, seekable file; bytes of an earlier try are hashed first. `told` receives the size."""

    def __init__(self, file: BinaryIO, told: Callable[[int], None] = lambda _: None) -> None:
        self._file, self._told = file, told
        self._digest = hashlib.sha256()
        self.size = 0
        while piece := file.read(MIB):
            self._digest.update(piece)
            self.size += len(piece)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def write(self, piece: bytes) -> None:
        self._file.write(piece)
        self._digest.update(piece)
        self.size += len(piece)
        self._told(self.size)

    def begin_again(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._digest, self.size = hashlib.sha256(), 0


PART_BYTES = 8 * MIB
LEASE_HEADER = "Gpool-Lease"
DIRECT_HEADER = "Gpool-Direct"
"""In a 404 on HEAD: uploads of at least so many bytes may go to the object store. In a GET: follow a 307 there."""

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


def patiently(
    begin: Callable[[], Steps], pauses: Callable[[], Iterator[float]], asked: AskedPauses
) -> PatientSteps:
    """Repeat the steps after `Unreachable`, and after a refusal that names a time.

    Patience restarts whenever bytes have moved, also by another sender; `asked` does not.
    """
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
                    request = steps.throw(came)
                    continue
                if request.to_store and came.status == 200:
                    left = pauses()
                if came.status in (202, 404) and (reached := upload_offset(came)) > furthest:
                    left, furthest = pauses(), reached
                request = steps.send(came)
        except StopIteration:
            return
        except Unreachable as error:
            pause = next(left, None)
            if pause is None:
                raise
            pause = max(pause, asked.after(error) or 0.0)
        except TooMany as error:
            pause = asked.after(error)
            if pause is None:
                raise
        yield Pause(pause)


def upload_offset(reply: Reply) -> int:
    text = reply.headers.get("upload-offset", "0")
    return int(text) if text.isdigit() else 0


WILDCARDS = frozenset({"0.0.0.0", "::", ""})
"""Listening addresses that mean every address of the machine."""


def require_reachable_origin(name: str, url: str) -> None:
    """`ValueError` unless the setting is an origin with a host that others can dial."""
    try:
        parts, _ = urlsplit(url), origin_of(url)
    except (Invalid, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error
    if parts.path.strip("/") or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(f"{name}={url} must be SCHEME://HOST[:PORT] alone")
    if parts.hostname in WILDCARDS:
        raise ValueError(f"{name}={url} names no machine; write the address that clients dial")
