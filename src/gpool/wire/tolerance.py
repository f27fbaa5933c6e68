"""Frames of another release: unknown kinds are left out, unknown words of known kinds replaced or left out.

A frame that this release knows whole is decoded as before; the rest of this module runs only if that fails. Fields
that this release does not know are at the end of a frame and are ignored by the decoder itself.

Rules, by example with a newer agent and this server:

    a frame kind that is not known here       left out, e.g. a new kind of report or message
    `tiers`, `networks` of an offer           unknown words are left out: nothing is placed there
    a runtime of an unknown tier              left out
    why an attempt ended, why to stop, …      `FALLBACKS`: the known word with the most careful effect
    any other unknown word                    the frame is malformed, e.g. a tier in a task's spec: a task never runs
                                              under other conditions than it asked for

So a server may send new words of a spec only to nodes whose offer has them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from gpool.core.model import EndReason, Fault, Health, RuntimeOffer, Sharing
from gpool.wire import frames
from gpool.wire.frames import FromAgent, FromServer, ReportItem, StopReason

FALLBACKS: Mapping[type[StrEnum], StrEnum] = {
    EndReason: EndReason.SANDBOX_FAILED,
    Fault: Fault.UNCLEAR,
    Health: Health.QUARANTINED,
    Sharing: Sharing.EXCLUSIVE,
    StopReason: StopReason.CANCELLED,
}
"""The most careful known word: a GPU of unknown health takes no task, one of unknown sharing has one user at a time."""

DROPPABLE: tuple[Any, ...] = (ReportItem, RuntimeOffer)
"""Elements of a list that is still valid without them."""


class _UnknownWord(Exception):
    pass


def read_from_agent(data: bytes) -> FromAgent | None:
    """None: a kind of frame that this release does not know. `Malformed` as `decode_any_from_agent`."""
    try:
        return frames.decode_any_from_agent(data)
    except msgspec.ValidationError as error:
        known = _known(data, FromAgent, error)
        return None if known is None else frames.decode_any_from_agent(known)


def read_from_server(data: bytes) -> FromServer | None:
    try:
        return frames.decode_any_from_server(data)
    except msgspec.ValidationError as error:
        known = _known(data, FromServer, error)
        return None if known is None else frames.decode_any_from_server(known)


def _known(data: bytes, kinds: Any, error: msgspec.ValidationError) -> bytes | None:
    """The part of a frame that this release knows; None: nothing. Raises `error` if it cannot be repaired."""
    try:
        raw = msgspec.msgpack.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, TypeError, RecursionError):
        raise error from None  # untyped decoding fails in more ways than the typed one
    tag = raw[0] if isinstance(raw, list) and raw else None
    if isinstance(tag, str) and tag not in _by_tag(kinds):
        return None
    try:
        return msgspec.msgpack.encode(_cleaned(raw, kinds))
    except _UnknownWord:
        raise error from None


def _cleaned(value: Any, kind: Any) -> Any:
    origin = get_origin(kind)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return _word(value, kind)
    if origin is UnionType:
        return _of_union(value, kind)
    if origin in (tuple, frozenset) and isinstance(value, list):
        return _elements(value, kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, list):
        return _struct(value, kind)
    if isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        hints = _hints(kind)
        return {
            name: _cleaned(each, hints[name]) if name in hints else each
            for name, each in value.items()
        }
    return value


def _word(value: Any, kind: type[StrEnum]) -> Any:
    if not isinstance(value, str) or value in {each.value for each in kind}:
        return value
    if kind not in FALLBACKS:
        raise _UnknownWord
    return FALLBACKS[kind].value


def _of_union(value: Any, kind: Any) -> Any:
    if value is None:
        return None
    tagged = _by_tag(kind)
    if not tagged:
        [other] = [each for each in get_args(kind) if each is not NoneType]
        return _cleaned(value, other)
    if not isinstance(value, list) or not value or value[0] not in tagged:
        raise _UnknownWord
    return _struct(value, tagged[value[0]])


def _elements(value: Sequence[Any], kind: Any) -> list[Any]:
    inner = get_args(kind)
    if get_origin(kind) is tuple and inner[-1] is not Ellipsis:
        return [
            _cleaned(each, inner[number]) if number < len(inner) else each
            for number, each in enumerate(value)
        ]
    may_drop = get_origin(kind) is frozenset or inner[0] in DROPPABLE
    found = []
    for each in value:
        try:
            found.append(_cleaned(each, inner[0]))
        except _UnknownWord:
            if not may_drop:
                raise
    return found


def _struct(value: Sequence[Any], kind: type[msgspec.Struct]) -> list[Any]:
    hints = list(_hints(kind).values())
    head = 0 if kind.__struct_config__.tag is None else 1
    return [
        *value[:head],
        *(
            _cleaned(each, hints[number]) if number < len(hints) else each
            for number, each in enumerate(value[head:])
        ),
    ]


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    return get_type_hints(kind)


@cache
def _by_tag(kinds: Any) -> Mapping[str, type[msgspec.Struct]]:
    """Kinds of frames in a union by their tag; empty for another union."""
    return {
        each.__struct_config__.tag: each
        for each in get_args(kinds)
        if isinstance(each, type)
        and issubclass(each, msgspec.Struct)
        and isinstance(each.__struct_config__.tag, str)
    }
