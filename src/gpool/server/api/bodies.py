"""Bounded parsing of JSON request bodies into the documents of `wire`.

pydantic builds the whole document and one error per unknown field before it refuses a body. So a larger body is
scanned first, at the speed of a copy: it has no unknown fields, and bounded numbers of members and of keys.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_origin

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
    """The body, without repeated fields; `Invalid` at the first unknown field. Malformed JSON is left to pydantic."""
    members = raw.count(b",")
    if members > MAX_MEMBERS:
        raise TooLarge(f"the body has {members} members; at most {MAX_MEMBERS} are accepted")
    fields = _form_of(model).fields(raw, ())
    if fields is None:
        return raw
    kept = sum(len(name) + len(memoryview(value)) for name, value in fields.items())
    if len(raw) - kept <= UNUSED_BYTES:
        return raw
    return b"{" + b",".join(_member(*each) for each in fields.items()) + b"}"


def _member(name: str, value: msgspec.Raw) -> bytes:
    return msgspec.json.encode(name) + b":" + bytes(value)


@dataclass(frozen=True, slots=True)
class _Nested:
    """Field with documents inside (`form`), or a mapping with at most `most` keys."""

    form: _DocumentForm | None
    is_list: bool
    most: int | None


@dataclass(frozen=True, slots=True)
class _DocumentForm:
    decoder: msgspec.json.Decoder[Any]
    names: tuple[str, ...]
    nested: Mapping[str, _Nested]
    plain: frozenset[str]  # neither lists nor objects

    def fields(self, raw: bytes, place: tuple[str, ...]) -> dict[str, msgspec.Raw] | None:
        """Values by field name, the last one of repeated names; None: not a JSON object."""
        try:
            found = self.decoder.decode(raw)
        except msgspec.ValidationError as error:
            unknown = _UNKNOWN.search(str(error))
            if unknown is not None:
                raise invalid([_fault("extra_forbidden", *place, unknown[1])]) from None
            return None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return None
        values = {
            name: value
            for name, value in zip(self.names, msgspec.structs.astuple(found), strict=True)
            if len(memoryview(value))
        }
        for name, value in values.items():
            if name in self.nested:
                _check(self.nested[name], bytes(value), (*place, name))
            elif name in self.plain and bytes(memoryview(value)[:1]) in (b"{", b"["):
                values[name] = _EMPTY_OBJECT  # pydantic refuses it as it does the large one
        return values


def _check(nested: _Nested, raw: bytes, place: tuple[str, ...]) -> None:
    if nested.form is None:
        assert nested.most is not None
        # At least two of the four quotes of a member follow no backslash, whatever its texts are.
        if raw.count(b'"') - raw.count(b'\\"') > 4 * nested.most:
            raise invalid(
                [_fault("too_long", *place, max_length=nested.most, actual_length="more")]
            )
        return
    if not nested.is_list:
        nested.form.fields(raw, place)
        return
    if b"{" not in raw:
        return
    items = _decoded(_ARRAY, raw) or ()
    if nested.most is not None and len(items) > nested.most:
        raise invalid(
            [_fault("too_long", *place, max_length=nested.most, actual_length=len(items))]
        )
    for number, item in enumerate(items):
        if bytes(memoryview(item)[:1]) == b"{":
            nested.form.fields(bytes(item), (*place, str(number)))


_EMPTY_OBJECT = msgspec.Raw(b"{}")
_ARRAY = msgspec.json.Decoder(list[msgspec.Raw])


def _decoded(decoder: msgspec.json.Decoder[Any], raw: bytes) -> Any:
    try:
        return decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None  # pydantic names the fault


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
    plain = frozenset(name for name, field in members if _is_plain(field.annotation))
    return _DocumentForm(msgspec.json.Decoder(struct), names, nested, plain)


def _is_plain(annotation: Any) -> bool:
    inside = list(_types_in(annotation))
    has_documents = any(isinstance(each, type) and issubclass(each, BaseModel) for each in inside)
    return not has_documents and not {list, dict, tuple, frozenset, set, Any} & set(inside)


def _nested_in(field: FieldInfo) -> _Nested | None:
    inside = list(_types_in(field.annotation))
    most = next((each.max_length for each in field.metadata if isinstance(each, MaxLen)), None)
    for each in inside:
        if isinstance(each, type) and issubclass(each, BaseModel):
            return _Nested(_form_of(each), list in inside, most)
    return _Nested(None, False, most) if dict in inside and most is not None else None


def _types_in(annotation: Any) -> Iterator[Any]:
    yield get_origin(annotation) or annotation
    for each in get_args(annotation):
        yield from _types_in(each)
