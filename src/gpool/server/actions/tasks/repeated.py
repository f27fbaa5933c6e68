"""Requests that are equal or differ only in their calls: the parsed document and its spec, by their bytes.

A client that calls one function many times sends the same bytes up to `"calls":[`; one that runs a command many times
sends the same bytes. Parsing and checking them is a fifth of a small call's cost on the server. Holds no secrets.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from gpool.core.model import KIB, TaskSpec
from gpool.wire.documents import TaskRequest

MOST_KNOWN = 1000
MAX_HEAD_BYTES = 2 * KIB
MAX_BODY_BYTES = 64 * KIB
"""Larger bodies have limits on their members, which the parser applies."""
_CALLS = b'"calls":['
_decode = msgspec.json.Decoder(list[str]).decode


@dataclass(frozen=True, slots=True)
class WantedTasks:
    """A request; `spec`: of a known one; `head`: see `head_of`."""

    request: TaskRequest
    spec: TaskSpec | None = None
    head: bytes = b""


class RepeatedRequests:
    def __init__(self) -> None:
        self._known: dict[bytes, tuple[TaskRequest, TaskSpec]] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._known)

    def find(self, raw: bytes) -> WantedTasks | None:
        """The request in `raw`, if one with the same head was kept; its calls are base64 text, not yet checked."""
        head = _head(raw)
        known = self._known.get(head)
        if known is None:
            return None
        request, spec = known
        if len(head) == len(raw):
            return WantedTasks(request, spec, head)
        calls = _calls(raw, head)
        if calls is None:
            return None
        return WantedTasks(request.model_copy(update={"calls": calls}), spec, head)

    def keep(self, wanted: WantedTasks, spec: TaskSpec) -> None:
        """Keep a request that was parsed and whose spec is valid."""
        request, head = wanted.request, wanted.head
        is_whole = not head.endswith((b"{", b","))
        if not head or is_whole != (request.calls is None):
            return
        if request.secrets or request.by is not None:
            return
        while len(self._known) >= MOST_KNOWN:
            del self._known[next(iter(self._known))]
        self._known[head] = (
            request if is_whole else request.model_copy(update={"calls": None}),
            spec,
        )


def head_of(raw: bytes) -> bytes:
    """Bytes before the calls of a document that ends with a list of text as its calls, all bytes of one without calls;
    empty: it is another one, or too large.

    If the document is valid JSON, `head + "calls":[...]}` has the same other members for every list: the head ends with
    a comma or brace, and not within a string, because the quote behind it would end that string before `calls`.
    """
    head = _head(raw)
    return head if len(head) == len(raw) or _calls(raw, head) is not None else b""


def _calls(raw: bytes, head: bytes) -> list[str] | None:
    try:
        return _decode(memoryview(raw)[len(head) + len(_CALLS) - 1 : -1])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _head(raw: bytes) -> bytes:
    at = raw.find(_CALLS, 0, MAX_HEAD_BYTES)
    if at < 0 and len(raw) <= MAX_HEAD_BYTES:
        return raw
    if at < 1 or raw[at - 1] not in b"{," or len(raw) > MAX_BODY_BYTES or raw[-2:] != b"]}":
        return b""
    return raw[:at]
