"""Bounded parsing of JSON request bodies into the documents of `wire`.

pydantic builds the whole document and one error per unknown field before it refuses a body. So a larger body is
scanned first, at the speed of a copy: it has no unknown fields, and bounded numbers of members and of keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import msgspec
from annotated_types import MaxLen
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from gpool.core.errors import TooLarge
from gpool.server.api.problems import invalid

M = TypeVar("M", bound=BaseModel)

MAX_MEMBERS = 200_000
"""Commas in a body, in texts too: more than 10,000 inputs with all fields and a command full of commas have."""
UNSCANNED_BYTES = 2048
"""Smaller bodies go to pydantic at once: a few hundred unknown fields cost a millisecond."""
UNUSED_BYTES = 4096
"""Bytes outside of the values that are kept: names, blanks; beyond, the document is written anew."""

_UNKNOWN = re.compile(r"unknown field `(.*)`", re.DOTALL)


def parsed(model: type[M], raw: bytes) -> M:
    """Document in `raw`; `Invalid` names the first faults, `TooLarge` a body with too many members."""
    if len(raw) > UNSCANNED_BYTES:
        raw = scanned(model, raw)
    try:
        return model.model_validate_json(raw or b"{}")
    except ValidationError as error:
        raise invalid(error.errors(include_url=False)) from None


def scanned(model: type[BaseModel], raw: bytes) -> bytes:
    """The body, without repeated fields; `Invalid` at the first unknown field and for anything that is not JSON.

    pydantic would accept NaN and Infinity: a body with one of them must not reach it unscanned.
    """
    members = raw.count(b",")
    if members > MAX_MEMBERS:
        raise TooLarge(f"the body has {members} members; at most {MAX_MEMBERS} are accepted")
    fields = _form_of(model).fields(raw, ())
    if fields is None:
        return b"[]"  # pydantic refuses it as it does the large one
    kept = sum(len(name) + len(memoryview(value)) for name, value in fields.items())
    if len(raw) - kept <= UNUSED_BYTES:
        return raw
    return b"{" + b",".join(_member(*each) for each in fields.items()) + b"}"


def _member(name: str, value: msgspec.Raw) -> bytes:
    return msgspec.json.encode(name) + b":" + bytes(value)


@dataclass(frozen=True, slots=True)
class _Nested:
    """Field with documents inside (`form`), or a list or mapping with at most `most` members."""

    form: _DocumentForm | None
    most: int | None


@dataclass(frozen=True, slots=True)
class _DocumentForm:
    decoder: msgspec.json.Decoder[Any]
    names: tuple[str, ...]
    nested: Mapping[str, _Nested]
    openers: Mapping[str, bytes]  # by name: '[' if the field is a list, '{' if it is an object

    def fields(self, raw: bytes, place: tuple[str, ...]) -> dict[str, msgspec.Raw] | None:
        """Values by field name, the last one of repeated names; None: JSON, but not an object."""
        try:
            found = _decoded(self.decoder, raw, place)
        except msgspec.ValidationError as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is not None:
                raise invalid([_fault("extra_forbidden", *place, unknown[1])]) from None
            return None
        values = {
            name: value
            for name, value in zip(self.names, msgspec.structs.astuple(found), strict=True)
            if len(memoryview(value))
        }
        for name, value in values.items():
            first = bytes(memoryview(value)[:1])
            if first in _EMPTY and first not in self.openers[name]:
                values[name] = _EMPTY[first]  # pydantic refuses it as it does the large one
            elif name in self.nested:
                _check(self.nested[name], bytes(value), (*place, name))
        return values


def _check(nested: _Nested, raw: bytes, place: tuple[str, ...]) -> None:
    if raw[:1] == b"{":
        if nested.form is not None:
            nested.form.fields(raw, place)
        # At least two of the four quotes of a member follow no backslash, whatever its texts are.
        elif raw.count(b'"') - raw.count(b'\\"') > 4 * (nested.most or MAX_MEMBERS):
            raise invalid(
                [_fault("too_long", *place, max_length=nested.most, actual_length="more")]
            )
    elif raw[:1] == b"[":
        items = _decoded(_ARRAY, raw, place)
        if nested.most is not None and len(items) > nested.most:
            raise invalid(
                [_fault("too_long", *place, max_length=nested.most, actual_length=len(items))]
            )
        if nested.form is not None and b"{" in raw:
            for number, item in enumerate(items):
                if bytes(memoryview(item)[:1]) == b"{":
                    nested.form.fields(bytes(item), (*place, str(number)))


_EMPTY = {b"{": msgspec.Raw(b"{}"), b"[": msgspec.Raw(b"[]")}
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])


def _decoded(decoder: msgspec.json.Decoder[Any], raw: bytes, place: tuple[str, ...]) -> Any:
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise invalid([_fault("json_invalid", *place, error=str(error)[:100])]) from None


def _fault(kind: str, *place: str, **limits: object) -> dict[str, Any]:
    return {"type": kind, "loc": place, "ctx": limits}


@lru_cache(maxsize=256)
def _form_of(model: type[BaseModel]) -> _DocumentForm:
    members = [(field.alias or name, field) for name, field in model.model_fields.items()]
    struct = msgspec.defstruct(
        f"{model.__name__}Fields",
        [
            (f"f{number}", msgspec.Raw, msgspec.field(default=msgspec.Raw(), name=name))
            for number, (name, _) in enumerate(members)
        ],
        forbid_unknown_fields=model.model_config.get("extra") == "forbid",
    )
    nested = {name: found for name, field in members if (found := _nested_in(field)) is not None}
    names = tuple(name for name, _ in members)
    openers = {name: _openers_of(field.annotation) for name, field in members}
    return _DocumentForm(msgspec.json.Decoder(struct), names, nested, openers)


def _openers_of(annotation: Any) -> bytes:
    """First bytes of the lists and objects that a value of this type may be."""
    origin = get_origin(annotation)
    if origin in (Annotated, Union, UnionType):
        inside = get_args(annotation)[:1] if origin is Annotated else get_args(annotation)
        return b"".join(map(_openers_of, inside))
    kind = origin or annotation
    if kind in (list, tuple, set, frozenset):
        return b"["
    if kind is dict or (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return b"{"
    return b"[{" if kind in (Any, object) else b""


def _nested_in(field: FieldInfo) -> _Nested | None:
    inside = list(_types_in(field.annotation))
    limits = [*field.metadata, *_metadata_in(field.annotation)]
    most = next((each.max_length for each in limits if isinstance(each, MaxLen)), None)
    for each in inside:
        if isinstance(each, type) and issubclass(each, BaseModel):
            return _Nested(_form_of(each), most)
    return _Nested(None, most) if most is not None and {list, dict} & set(inside) else None


def _metadata_in(annotation: Any) -> Iterator[Any]:
    """Limits of the alternatives of a union; those of a list's items are not the list's."""
    for each in get_args(annotation) if get_origin(annotation) in (Union, UnionType) else ():
        for limit in getattr(each, "__metadata__", ()):
            yield from limit.metadata if isinstance(limit, FieldInfo) else (limit,)


def _types_in(annotation: Any) -> Iterator[Any]:
    yield get_origin(annotation) or annotation
    for each in get_args(annotation):
        yield from _types_in(each)
