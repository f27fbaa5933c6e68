"""Decoder of function results sent as data (format: decision 0019; `agent/runner/encoding.py` encodes).

The bytes come from a node nobody trusts: decoding imports no module and calls no `__init__`, `__post_init__`,
`__setstate__` or `__reduce__`; it finds classes among the modules imported already.
One file because every tag of the format has its reader here.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import math
import os
import pathlib
import re
import struct
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from gpool.core.errors import TaskFailed
from gpool.core.terminal import plain, printable
from gpool.wire.imported_classes import (
    EXCEPTION_DICT,
    TYPE_DICT,
    BadValue,
    MissingClass,
    imported_class,
    imported_module,
    is_plain_field,
    new_exception,
)

DATA, NOT_DATA = b"\x01", b"\x02"
"""First byte of a value sent as data; of a pickle with the reason why it is none. No pickle starts with either."""

MAX_OBJECTS = 1 << 20
"""Total cost of the objects in one value: 1 each, and more for the following."""

MAX_DEPTH = 100
MAX_VALUE_BYTES = 64 * 1024 * 1024
"""Size of a value from a node that is not the caller's."""

MAX_WIDE_TEXT_BYTES = 16 * 1024 * 1024
MAX_WIDE_VALUE_BYTES = 48 * 1024 * 1024
"""Text that is not ASCII, which may take four times as much memory; a quarter of it in a value past this size."""

SEQUENCE_COST, OBJECT_COST = 2, 8  # of a list or tuple; of a dict, set, dataclass, array, path …
MAX_DIMENSIONS = 32
MAX_JSON_BYTES = 4096
MAX_REASON_BYTES = 64 * 1024
MANY_KEYS = 64
MAX_EQUAL_HASHES = 32
_DIRECT_TEXT_BYTES = 4096

_COUNT, _INT, _FLOAT = struct.Struct("<I"), struct.Struct("<q"), struct.Struct("<d")
_COMPLEX, _DATE = struct.Struct("<dd"), struct.Struct("<HBB")
_DATETIME, _TIME = struct.Struct("<HBBBBBIB"), struct.Struct("<BBBIB")
_TIMEDELTA = struct.Struct("<iII")
_TEXT_AT = 6
_STR_TAG, _INT_TAG, _FLOAT_TAG = b"sif"
_FREQUENT: dict[bytes, tuple[struct.Struct | None, int, object]] = {
    b"i": (_INT, 10, None),
    b"f": (_FLOAT, 10, None),
    b"N": (None, 2, None),
    b"T": (None, 2, True),
    b"F": (None, 2, False),
}
"""Values that need no decoder: form and size of the whole, or the value itself."""

_ARRAY_TYPE = re.compile(r"[<>|](?:[biufcSU][1-9][0-9]{0,8}|[mM]8(?:\[[0-9]{0,9}[A-Za-z]{1,2}\])?)")
TENSOR_TYPES = frozenset(
    {
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    }
)
FACTORIES = (None, int, float, str, bool, bytes, list, tuple, dict, set)


def decode(content: bytes | bytearray, *, filter_errors: bool = True) -> Any:
    """Decode a value whose first byte is `DATA`; `BadValue` says what is wrong with it.

    `filter_errors`: replace control characters in the texts of exceptions, which end in the caller's terminal.
    """
    frequent = _FREQUENT.get(bytes(content[1:2]))
    if frequent is not None:
        form, size, value = frequent
        if len(content) == size:
            return value if form is None else form.unpack_from(content, 2)[0]
    elif content[1:2] in (b"j", b"k"):
        return _small_json(content)
    elif content[1:2] == b"s" and len(content) < _DIRECT_TEXT_BYTES:
        text = bytes(content[_TEXT_AT:])
        if _COUNT.pack(len(text)) == content[2:_TEXT_AT] and text.isascii():
            return text.decode("ascii")
    decoder = Decoder(content, filter_errors)
    try:
        value = decoder.value(0)
    except BadValue:
        raise
    except (IndexError, struct.error) as exc:
        raise BadValue("it ends too early") from exc
    except RecursionError as exc:
        raise BadValue("it is nested too deeply for this program's recursion limit") from exc
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as exc:
        raise BadValue(f"it holds an impossible value ({printable(str(exc))})") from exc
    if decoder.at != len(content):
        raise BadValue(f"{len(content) - decoder.at} bytes follow its end")
    return value


def _small_json(content: bytes | bytearray) -> Any:
    """Decode a small plain dict or list (`j`) or tuple (`k`), sent as JSON.

    No more levels than opening brackets; the objects of so few bytes are far below `MAX_OBJECTS`.
    """
    if len(content) > 2 + MAX_JSON_BYTES:
        raise BadValue(f"it has {len(content) - 2:,} bytes of JSON; {MAX_JSON_BYTES:,} are allowed")
    if content.count(b"[") + content.count(b"{") > MAX_DEPTH:
        raise BadValue(f"it has JSON of more than {MAX_DEPTH} brackets")
    try:
        found = _from_json(content[2:])
    except (ValueError, RecursionError) as exc:
        raise BadValue(f"it holds JSON that is wrong ({printable(str(exc))})") from exc
    if type(found) is list:
        return tuple(found) if content[1] == ord("k") else found
    if type(found) is not dict or content[1] == ord("k"):
        raise BadValue(f"it has a {type(found).__name__} as JSON where a container must be")
    return found


_from_json = msgspec.json.Decoder().decode


def reason_for_pickle(content: bytes | bytearray) -> tuple[str, memoryview]:
    """Split content that starts with `NOT_DATA` into the reason and the pickle."""
    if len(content) < 1 + _COUNT.size:
        raise BadValue("it ends too early")
    (length,) = _COUNT.unpack_from(content, 1)
    start = 1 + _COUNT.size
    if length > min(MAX_REASON_BYTES, len(content) - start):
        raise BadValue("it ends too early")
    text = bytes(content[start : start + length]).decode("utf-8", "replace")
    return text, memoryview(content)[start + length :]


class Decoder:
    """Position and remaining limits of one value. Each limit is checked before memory is allocated for it."""

    __slots__ = (
        "at",
        "classes",
        "data",
        "end",
        "filters_errors",
        "in_error",
        "left",
        "view",
        "wide_left",
    )

    def __init__(self, data: bytes | bytearray, filters_errors: bool) -> None:
        self.filters_errors, self.in_error = filters_errors, False
        self.data, self.view = data, memoryview(data)
        self.at, self.end = 1, len(data)
        self.left = MAX_OBJECTS
        is_large = self.end > MAX_WIDE_VALUE_BYTES
        self.wide_left = MAX_WIDE_TEXT_BYTES // 4 if is_large else MAX_WIDE_TEXT_BYTES
        self.classes: list[tuple[type | None, str, tuple[str, ...]]] = []

    def value(self, depth: int) -> Any:
        tag = self.data[self.at]
        self.at += 1
        reader = READERS.get(tag)
        if reader is None:
            raise BadValue(f"it holds the unknown tag {tag}")
        return reader(self, depth)

    def spend(self, cost: int, depth: int = 0) -> None:
        self.left -= cost
        if self.left < 0:
            raise BadValue(f"it has more than {MAX_OBJECTS:,} objects")
        if depth > MAX_DEPTH:
            raise BadValue(f"it is nested more than {MAX_DEPTH} levels deep")

    def count(self) -> int:
        (count,) = _COUNT.unpack_from(self.data, self.at)
        self.at += _COUNT.size
        return int(count)

    def items(self, cost: int, depth: int, per_item: int = 1) -> range:
        """Read the number of items, which have at least one byte each."""
        count = self.count() * per_item
        if count > self.end - self.at:
            raise BadValue(f"it promises {count:,} items in {self.end - self.at:,} bytes")
        self.spend(cost + count, depth)
        return range(count)

    def buffer(self) -> memoryview:
        length = self.count()
        start, self.at = self.at, self.at + length
        if self.at > self.end:
            raise BadValue(f"it promises {length:,} bytes and has {self.end - start:,}")
        return self.view[start : self.at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        start, self.at = self.at, self.at + form.size
        return form.unpack_from(self.data, start)

    def text(self) -> str:
        data = self.buffer()
        if self.in_error:
            return self.error_text(data)
        if len(data) < _DIRECT_TEXT_BYTES:
            short = bytes(data)
            if short.isascii():
                return short.decode("ascii")
        else:
            try:
                return str(data, "ascii")
            except UnicodeDecodeError:
                pass
        self.spend_wide(len(data))
        return str(data, "utf-8", "surrogatepass")

    def error_text(self, data: memoryview) -> str:
        """Replace control characters. It counts three times as wide text: a wide copy is made beside the first."""
        self.spend_wide(3 * len(data))
        return plain(str(data, "utf-8", "surrogatepass"))

    def spend_wide(self, size_bytes: int) -> None:
        self.wide_left -= size_bytes
        if self.wide_left < 0:
            raise BadValue("it has too much text that is not ASCII or in exceptions for its size")

    def tagged(self, kind: type, depth: int) -> Any:
        """Read a value that must have this type."""
        found = self.value(depth)
        if type(found) is not kind:
            raise BadValue(f"it has a {type(found).__name__} where a {kind.__name__} must be")
        return found

    def sequence(self, cost: int, depth: int) -> list[Any]:
        return self.values(len(self.items(cost, depth)), depth + 1)

    def values(self, count: int, depth: int) -> list[Any]:
        """Read so many values; the frequent ones without a call each."""
        data, end, at, found = self.data, self.end, self.at, list[Any]()
        add = found.append
        for _ in range(count):
            tag = data[at]
            if tag == _STR_TAG and not self.in_error:
                start = at + 5
                at = start + _COUNT.unpack_from(data, at + 1)[0]
                short = data[start:at] if at - start < _DIRECT_TEXT_BYTES else b"\xff"
                if at <= end and short.isascii():
                    add(short.decode("ascii"))
                else:
                    self.at = start - 4
                    add(self.text())
            elif tag == _INT_TAG:
                add(_INT.unpack_from(data, at + 1)[0])
                at += 9
            elif tag == _FLOAT_TAG:
                add(_FLOAT.unpack_from(data, at + 1)[0])
                at += 9
            else:
                self.at = at
                add(self.value(depth))
                at = self.at
        self.at = at
        return found

    def keyed(self, depth: int) -> dict[Any, Any]:
        found = self.values(len(self.items(OBJECT_COST, depth, 2)), depth + 1)
        keys = found[::2]
        refuse_collisions(keys)
        return dict(zip(keys, found[1::2], strict=True))

    def class_(self) -> tuple[type | None, str, tuple[str, ...]]:
        """The class (None: not imported here), its name, the names of its fields."""
        number = self.count()
        if number < len(self.classes):
            return self.classes[number]
        if number > len(self.classes):
            raise BadValue("it uses a class before it is defined")
        module, name = self.tagged(str, 0), self.tagged(str, 0)
        fields = self.tagged(tuple, 0)
        if not all(type(field) is str for field in fields):
            raise BadValue("it names a field by something that is no text")
        found = imported_class(module, name), f"{module}.{name}", fields
        self.classes.append(found)
        return found

    def known_class(self) -> tuple[type, tuple[str, ...]]:
        cls, name, fields = self.class_()
        if cls is None:
            module = name.rpartition(".")[0]
            raise MissingClass(
                f"it has a {printable(name)}, and this program has not imported that class; "
                f"import {printable(module)} before you read the value"
            )
        return cls, fields


def refuse_collisions(keys: list[Any]) -> None:
    """Refuse keys chosen to have equal hashes: a table of them takes quadratic time."""
    if len(keys) < MANY_KEYS or set(map(type, keys)) == {str}:
        return
    if max(collections.Counter(map(hash, keys)).values()) > MAX_EQUAL_HASHES:
        raise BadValue("it has too many keys with equal hashes")


# ---- readers, one for each tag


def _packed(decoder: Decoder, depth: int, code: str) -> list[Any]:
    count = decoder.count()
    start, end = decoder.at, decoder.at + 8 * count
    if end > decoder.end:
        raise BadValue(f"it promises {count:,} numbers in {decoder.end - start:,} bytes")
    decoder.spend(SEQUENCE_COST + count, depth)
    decoder.at = end
    return list(struct.unpack_from(f"<{count}{code}", decoder.data, start))


def _set(decoder: Decoder, depth: int) -> set[Any]:
    members = decoder.sequence(OBJECT_COST, depth)
    refuse_collisions(members)
    return set(members)


def _counter(decoder: Decoder, depth: int) -> collections.Counter[Any]:
    counter: collections.Counter[Any] = collections.Counter()
    dict.update(counter, decoder.keyed(depth))
    return counter


def _deque(decoder: Decoder, depth: int) -> collections.deque[Any]:
    items = decoder.sequence(OBJECT_COST, depth)
    most = decoder.value(depth)
    if most is not None and type(most) is not int:
        raise BadValue("it has a deque whose length is no number")
    return collections.deque(items, most)


def _defaultdict(decoder: Decoder, depth: int) -> dict[Any, Any]:
    (number,) = decoder.unpack(_BYTE)
    if decoder.unpack(_BYTE)[0] != ord("d"):
        raise BadValue("it has a defaultdict without entries")
    return collections.defaultdict(FACTORIES[number], decoder.keyed(depth))


_BYTE = struct.Struct("<B")


def _range(decoder: Decoder, depth: int) -> range:
    decoder.spend(OBJECT_COST + 3, depth)
    return range(*(decoder.tagged(int, depth + 1) for _ in range(3)))


def _zone(decoder: Decoder, depth: int) -> datetime.tzinfo | None:
    zone = decoder.value(depth)
    if zone is not None and type(zone) is not datetime.timezone:
        raise BadValue(f"it has a time zone that is a {type(zone).__name__}")
    return zone


def _timezone(decoder: Decoder, depth: int) -> datetime.timezone:
    decoder.spend(OBJECT_COST, depth)
    offset, name = decoder.tagged(datetime.timedelta, depth), decoder.value(depth)
    if name is None:
        return datetime.timezone(offset)
    return datetime.timezone(offset, name)


def _datetime(decoder: Decoder, depth: int) -> datetime.datetime:
    *clock, fold = decoder.unpack(_DATETIME)
    local = datetime.datetime(*clock)  # noqa: DTZ001 - the zone follows
    return local.replace(tzinfo=_zone(decoder, depth), fold=fold)


def _time(decoder: Decoder, depth: int) -> datetime.time:
    *clock, fold = decoder.unpack(_TIME)
    return datetime.time(*clock).replace(tzinfo=_zone(decoder, depth), fold=fold)


def _decimal(decoder: Decoder, _: int) -> decimal.Decimal:
    decoder.spend(OBJECT_COST)
    return decimal.Decimal(decoder.text())


def _uuid(decoder: Decoder, _: int) -> uuid.UUID:
    decoder.spend(OBJECT_COST)
    start, decoder.at = decoder.at, decoder.at + 16
    data = decoder.data[start : decoder.at]
    if len(data) != 16:
        raise BadValue("it ends too early")
    found = object.__new__(uuid.UUID)
    object.__setattr__(found, "int", int.from_bytes(data, "big"))
    object.__setattr__(found, "is_safe", uuid.SafeUUID.unknown)
    return found


def _path(decoder: Decoder, _: int) -> pathlib.PurePath:
    text = _path_text(decoder)
    return pathlib.Path(text) if os.name == "posix" else pathlib.PurePosixPath(text)


def _path_text(decoder: Decoder) -> str:
    text = decoder.text()
    decoder.spend(OBJECT_COST + text.count("/"))
    return text


def _member(decoder: Decoder, depth: int) -> enum.Enum:
    decoder.spend(OBJECT_COST, depth)
    cls, _ = decoder.known_class()
    name = decoder.tagged(str, depth)
    if not isinstance(cls, enum.EnumMeta):
        raise BadValue(f"it says that {cls.__qualname__} is an enumeration")
    member = TYPE_DICT(cls)["_member_map_"].get(name)
    if not isinstance(member, enum.Enum):
        raise BadValue(f"it has a member {printable(name)!r}, which {cls.__qualname__} has not")
    return member


def _named_tuple(decoder: Decoder, depth: int) -> Any:
    decoder.spend(OBJECT_COST, depth)
    cls, _ = decoder.known_class()
    values = decoder.tagged(tuple, depth)
    fields = TYPE_DICT(cls).get("_fields")
    if cls.__bases__ != (tuple,) or type(fields) is not tuple or len(fields) != len(values):
        raise BadValue(f"it says that {cls.__qualname__} is a named tuple of {len(values)} fields")
    return tuple.__new__(cls, values)


def _dataclass(decoder: Decoder, depth: int) -> Any:
    decoder.spend(OBJECT_COST, depth)
    cls, names = decoder.known_class()
    values = decoder.tagged(tuple, depth)
    if type(TYPE_DICT(cls).get("__dataclass_fields__")) is not dict or hasattr(cls, "__del__"):
        raise BadValue(f"it says that {cls.__qualname__} is a dataclass without __del__")
    expected = {field.name for field in dataclasses.fields(cls)}
    if set(names) != expected or len(names) != len(expected) or len(values) != len(names):
        here, there = ", ".join(sorted(expected)), ", ".join(names)
        raise BadValue(
            f"it has a {cls.__qualname__} with the fields ({printable(there)}); here they are ({here})"
        )
    found: Any = object.__new__(cls)
    for name, value in zip(names, values, strict=True):
        if not is_plain_field(cls, name):
            raise BadValue(f"it sets {cls.__qualname__}.{name}, which runs code when it is set")
        object.__setattr__(found, name, value)
    return found


def _exception(decoder: Decoder, depth: int) -> Exception:
    """Rebuild an exception; a class that is not imported here, or is no `Exception`, becomes `TaskFailed`."""
    decoder.spend(OBJECT_COST, depth)
    cls, name, _ = decoder.class_()
    return _rebuilt(decoder, depth, cls, name.rpartition(".")[2])


def _unknown_exception(decoder: Decoder, depth: int) -> Exception:
    decoder.spend(OBJECT_COST, depth)
    return _rebuilt(decoder, depth, None, decoder.text())


def _rebuilt(decoder: Decoder, depth: int, cls: type | None, name: str) -> Exception:
    is_nested, decoder.in_error = decoder.in_error, decoder.filters_errors
    message = decoder.tagged(str, depth)
    arguments, attributes = decoder.value(depth + 1), decoder.tagged(dict, depth + 1)
    decoder.in_error = is_nested
    if arguments is None:
        arguments = (message,)
    if type(arguments) is not tuple or any(type(key) is not str for key in attributes):
        raise BadValue("it has an exception without arguments")
    exception = None
    if cls is not None and issubclass(cls, Exception) and not hasattr(cls, "__del__"):
        exception = new_exception(cls, arguments)
    if exception is None:
        short = printable(name)
        return TaskFailed(f"{short}: {message}" if message else short)
    EXCEPTION_DICT(exception).update(attributes)
    return exception


def _shape(decoder: Decoder) -> tuple[bool, tuple[int, ...]]:
    flag, dimensions = decoder.unpack(_TWO_BYTES)
    if dimensions > MAX_DIMENSIONS:
        raise BadValue(f"it has an array of {dimensions} dimensions; {MAX_DIMENSIONS} are possible")
    return bool(flag), decoder.unpack(struct.Struct(f"<{dimensions}Q"))


_TWO_BYTES = struct.Struct("<BB")


def _bytes_of(decoder: Decoder, shape: tuple[int, ...], item_bytes: int) -> memoryview:
    if decoder.unpack(_BYTE)[0] != ord("y"):
        raise BadValue("it has an array without bytes")
    data = decoder.buffer()
    if math.prod(shape) * item_bytes != len(data):
        raise BadValue(f"it has an array of shape {shape} in {len(data):,} bytes")
    return data


def _array(decoder: Decoder, depth: int, *, is_scalar: bool = False) -> Any:
    decoder.spend(OBJECT_COST, depth)
    numpy = imported_module("numpy", "numpy array or number")
    kind = decoder.text()
    if not _ARRAY_TYPE.fullmatch(kind):
        raise BadValue(f"it has an array of type {printable(kind)!r}")
    item = numpy.dtype(kind)
    by_columns, shape = _shape(decoder)
    data = _bytes_of(decoder, shape, item.itemsize)
    order = "F" if by_columns else "C"
    found = numpy.frombuffer(data, item) if data else numpy.empty(0, item)
    if is_scalar:
        return found[0] if shape == () else found.reshape(())
    return found.reshape(shape, order=order).copy(order)


def _tensor(decoder: Decoder, depth: int) -> Any:
    decoder.spend(OBJECT_COST, depth)
    torch = imported_module("torch", "torch tensor")
    kind = decoder.text()
    if kind not in TENSOR_TYPES or not hasattr(torch, kind):
        raise BadValue(f"it has a tensor of type {printable(kind)!r}")
    item = getattr(torch, kind)
    is_parameter, shape = _shape(decoder)
    data = _bytes_of(decoder, shape, item.itemsize)
    flat = torch.frombuffer(bytearray(data), dtype=item) if data else torch.empty(0, dtype=item)
    found = flat.reshape(shape)
    if is_parameter:
        grows = item.is_floating_point or item.is_complex
        return torch.nn.Parameter(found, requires_grad=grows)
    return found


Reader = Callable[[Decoder, int], Any]
READERS: dict[int, Reader] = {
    ord(tag): reader
    for tag, reader in {
        "N": lambda _decoder, _: None,
        "T": lambda _decoder, _: True,
        "F": lambda _decoder, _: False,
        "i": lambda decoder, _: decoder.unpack(_INT)[0],
        "I": lambda decoder, _: int.from_bytes(decoder.buffer(), "little", signed=True),
        "f": lambda decoder, _: decoder.unpack(_FLOAT)[0],
        "c": lambda decoder, _: complex(*decoder.unpack(_COMPLEX)),
        "s": lambda decoder, _: decoder.text(),
        "y": lambda decoder, _: bytes(decoder.buffer()),
        "Y": lambda decoder, _: bytearray(decoder.buffer()),
        "l": lambda decoder, depth: decoder.sequence(SEQUENCE_COST, depth),
        "L": lambda decoder, depth: _packed(decoder, depth, "d"),
        "Q": lambda decoder, depth: _packed(decoder, depth, "q"),
        "t": lambda decoder, depth: tuple(decoder.sequence(SEQUENCE_COST, depth)),
        "e": _set,
        "z": lambda decoder, depth: frozenset(_set(decoder, depth)),
        "d": lambda decoder, depth: decoder.keyed(depth),
        "O": lambda decoder, depth: collections.OrderedDict(decoder.keyed(depth)),
        "C": _counter,
        "D": _deque,
        "G": _defaultdict,
        "r": _range,
        "A": lambda decoder, _: datetime.date(*decoder.unpack(_DATE)),
        "B": _datetime,
        "J": _time,
        "K": lambda decoder, _: datetime.timedelta(*decoder.unpack(_TIMEDELTA)),
        "Z": _timezone,
        "M": _decimal,
        "U": _uuid,
        "P": _path,
        "p": lambda decoder, _: pathlib.PurePosixPath(_path_text(decoder)),
        "E": _member,
        "V": _named_tuple,
        "R": _dataclass,
        "X": _exception,
        "x": _unknown_exception,
        "a": _array,
        "n": lambda decoder, depth: _array(decoder, depth, is_scalar=True),
        "w": _tensor,
    }.items()
}
