"""Encoder of function results as data (format: decision 0019). Stdlib only; loaded by `serve.py`, inside the sandbox.

numpy and torch are used only if the function has imported them. `wire.values` decodes; it must agree on every tag.
One file because the runner loads it by its path, beside `serve.py`.
"""

from __future__ import annotations

import collections
import ctypes
import datetime
import enum
import struct
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

# As in wire/values.py; tests/wire/test_values.py compares the two.
DATA, NOT_DATA = b"\x01", b"\x02"
MAX_OBJECTS = 1 << 20
MAX_DEPTH = 100
MAX_WIDE_TEXT_BYTES = 16 * 1024 * 1024
MAX_WIDE_VALUE_BYTES = 48 * 1024 * 1024
SEQUENCE_COST, OBJECT_COST = 2, 8
MAX_DIMENSIONS = 32
MAX_JSON_BYTES = 4096

MAX_LENGTH = 0xFFFFFFFF
MAX_TEXT_BYTES = 64 * 1024  # of an exception's message, and of the reason for a pickle
INT64 = 1 << 63
COUNT = struct.Struct("<I")
TAGGED_COUNT = struct.Struct("<cI")
TAGGED_INT = struct.Struct("<cq")
TAGGED_FLOAT = struct.Struct("<cd")
COMPLEX = struct.Struct("<cdd")
DATE = struct.Struct("<cHBB")
DATETIME = struct.Struct("<cHBBBBBIB")
TIME = struct.Struct("<cBBBIB")
TIMEDELTA = struct.Struct("<ciII")
ARRAY_KINDS = "biufcmMSU"
TENSOR_TYPES = frozenset(
    {
        *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128"),
    }
)
FACTORIES = (None, int, float, str, bool, bytes, list, tuple, dict, set)
"""Factories a defaultdict may have, by position."""


to_json: Any = None
try:
    import _json  # the C part of json, without the import of json: a sandbox may live for one call

    to_json = _json.make_encoder(
        None, repr, _json.encode_basestring, None, ":", ",", False, False, False
    )
    if "".join(to_json({"é": [1, None]}, 0)) != '{"é":[1,null]}':
        to_json = None
except (
    ImportError,
    AttributeError,
    TypeError,
):  # another Python: everything has a form without JSON
    to_json = None


class Untransferable(Exception):
    """The value cannot be sent as data; the text names its type or the exceeded limit."""


def encode(value: object, pickled: Callable[[object], bytes]) -> bytes:
    """Encode as data; a value that cannot be is pickled, and marked with the reason."""
    if type(value) in SMALL_KINDS and (small := small_json(value)):
        return small
    try:
        return Encoder().encoded(value)
    except Untransferable as refused:
        reason = str(refused)
    except RecursionError:
        reason = "a value nested too deeply"
    text = reason.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    return b"".join((NOT_DATA, COUNT.pack(len(text)), text, pickled(value)))


def small_json(value: Any) -> bytes:
    """Encode a small dict, list or tuple of plain values as JSON, which is decoded in C; empty if the value is another.

    Exact types only: JSON would turn a tuple inside, a key that is no text or a subclass into something else.
    """
    is_tuple = type(value) is tuple
    try:
        if to_json is None or json_room(value, MAX_JSON_BYTES) < 0:
            return b""
        text = "".join(to_json(list(value) if is_tuple else value, 0))
        sent = text.encode()
    except (ValueError, RecursionError):  # a NaN, an infinity, a lone surrogate
        return b""
    if len(sent) > MAX_JSON_BYTES or text.count("[") + text.count("{") > MAX_DEPTH:
        return b""
    return DATA + (b"k" if is_tuple else b"j") + sent


def json_room(value: Any, room: int) -> int:
    """Estimate the characters left of `room`; negative: not a small plain value, a cycle, or numbers better packed."""
    items = value
    if type(value) is dict:
        for key in value:
            if type(key) is not str:
                return -1
            room -= len(key)
        items = value.values()
    elif len(value) > 16 and type(value[0]) in (int, float):
        return -1
    room -= 4 * (len(value) + 1)
    if room < 0:
        return -1
    for item in items:
        kind = type(item)
        if kind is str:
            room -= len(item)
        elif kind is int:
            if not -INT64 <= item < INT64:
                return -1
        elif kind is dict or kind is list:
            room = json_room(item, room - MAX_JSON_BYTES // MAX_DEPTH)
            if room < 0:
                return -1
        elif kind is not float and item is not None and kind is not bool:
            return -1
    return room


SMALL_KINDS = frozenset({dict, list, tuple})


def encode_exception(failure: BaseException) -> bytes:
    """Encode type, message, arguments and attributes; those that cannot be sent as data are left out."""
    encoder = Encoder()
    encoder.write_exception(failure, 0)
    return b"".join(encoder.parts)


class Encoder:
    def __init__(self) -> None:
        self.parts: list[Any] = [DATA]  # bytes and contiguous memoryviews
        self.left = MAX_OBJECTS
        self.wide_left = MAX_WIDE_TEXT_BYTES
        self.classes: dict[type, int] = {}
        self.in_error = False

    def encoded(self, value: object) -> bytes:
        self.write(value, 0)
        used = MAX_WIDE_TEXT_BYTES - self.wide_left
        if used > MAX_WIDE_TEXT_BYTES // 4 and sum(map(len, self.parts)) > MAX_WIDE_VALUE_BYTES:
            raise Untransferable(f"{used >> 20} MiB of text that is not ASCII in a large value")
        return b"".join(self.parts)

    def write(self, value: Any, depth: int) -> None:
        writer = WRITERS.get(type(value))
        if writer is not None:
            writer(self, value, depth)
        else:
            self.write_object(value, depth)

    def spend(self, cost: int, depth: int = 0) -> None:
        self.left -= cost
        if self.left < 0:
            raise Untransferable(f"a value of more than {MAX_OBJECTS:,} objects")
        if depth > MAX_DEPTH:
            raise Untransferable(f"a value nested more than {MAX_DEPTH} levels deep, or in itself")

    def write_count(self, tag: bytes, count: int) -> None:
        if count > MAX_LENGTH:
            raise Untransferable(f"a value of {count:,} bytes; one may have {MAX_LENGTH:,}")
        self.parts.append(TAGGED_COUNT.pack(tag, count))

    def write_bytes(self, tag: bytes, data: Any) -> None:
        self.write_count(tag, len(data))
        self.parts.append(data)

    def write_text(self, text: str, tag: bytes = b"s") -> None:
        data = text.encode("utf-8", "surrogatepass")
        if self.in_error or not text.isascii():
            self.wide_left -= 3 * len(data) if self.in_error else len(data)
            if self.wide_left < 0:
                raise Untransferable(
                    f"more than {MAX_WIDE_TEXT_BYTES >> 20} MiB of text that is not ASCII or in exceptions"
                )
        self.write_bytes(tag, data)

    def write_items(self, tag: bytes, items: Any, cost: int, depth: int) -> None:
        self.spend(cost + len(items), depth)
        self.write_count(tag, len(items))
        self.write_each(items, depth + 1)

    def write_each(self, items: Iterable[Any], depth: int) -> None:
        writers, add = WRITERS, self.parts.append
        for item in items:
            kind = type(item)
            if kind is float:
                add(TAGGED_FLOAT.pack(b"f", item))
            elif kind is int and -INT64 <= item < INT64:
                add(TAGGED_INT.pack(b"i", item))
            elif kind is str and not self.in_error and item.isascii():
                add(TAGGED_COUNT.pack(b"s", len(item)))
                add(item.encode("ascii"))
            else:
                writer = writers.get(kind)
                if writer is not None:
                    writer(self, item, depth)
                else:
                    self.write_object(item, depth)

    def write_pairs(self, tag: bytes, pairs: Any, depth: int) -> None:
        self.spend(OBJECT_COST + 2 * len(pairs), depth)
        self.write_count(tag, len(pairs))
        self.write_each(chain.from_iterable(pairs.items()), depth + 1)

    def write_class(self, tag: bytes, cls: type, names: Iterable[str] = ()) -> None:
        """Write the class by number; at its first occurrence also its module, name and fields."""
        module, name = cls.__module__, cls.__qualname__
        if not isinstance(module, str) or "<locals>" in name:
            raise Untransferable(f"{described(cls)}, a class defined inside a function")
        known = self.classes.get(cls)
        if known is not None:
            self.parts.append(TAGGED_COUNT.pack(tag, known))
            return
        self.parts.append(TAGGED_COUNT.pack(tag, len(self.classes)))
        self.classes[cls] = len(self.classes)
        self.write_text(module)
        self.write_text(name)
        self.write_items(b"t", tuple(names), SEQUENCE_COST, 0)

    def write_object(self, value: Any, depth: int) -> None:
        cls = type(value)
        self.spend(OBJECT_COST, depth)
        if isinstance(value, enum.Enum):
            if cls.__dict__.get("_member_map_", {}).get(value.name) is not value:
                raise Untransferable(f"{described(cls)} that is no single member")
            self.write_class(b"E", cls)
            self.write_text(value.name)
        elif isinstance(value, Exception):
            self.write_exception(value, depth)
        elif cls.__bases__ == (tuple,) and isinstance(cls.__dict__.get("_fields"), tuple):
            self.write_class(b"V", cls, cls.__dict__["_fields"])
            self.write_items(b"t", tuple(value), SEQUENCE_COST, depth)
        elif "__dataclass_fields__" in cls.__dict__:
            self.write_dataclass(value, depth)
        elif not self.write_array(value, cls) and not self.write_library(value, cls):
            raise Untransferable(described(cls))

    def write_dataclass(self, value: Any, depth: int) -> None:
        cls: Any = type(value)
        dataclasses: Any = sys.modules["dataclasses"]
        names = [field.name for field in dataclasses.fields(value)]
        if (
            cls.__reduce_ex__ is not object.__reduce_ex__
            or cls.__reduce__ is not object.__reduce__
            or cls.__getstate__
            not in (object.__getstate__, getattr(dataclasses, "_dataclass_getstate", None))
            or getattr(cls, "__setstate__", None)
            not in (None, getattr(dataclasses, "_dataclass_setstate", None))
        ):
            raise Untransferable(f"{described(cls)}, a dataclass with its own way of pickling")
        other = set(getattr(value, "__dict__", ())).difference(names)
        if other:
            text = ", ".join(sorted(map(str, other))[:3])
            raise Untransferable(f"{described(cls)} with attributes that are no fields ({text})")
        try:
            found = [object.__getattribute__(value, name) for name in names]
        except AttributeError as missing:
            raise Untransferable(f"{described(cls)} with a field that is not set") from missing
        self.write_class(b"R", cls, names)
        self.write_items(b"t", found, SEQUENCE_COST, depth)

    def write_exception(self, failure: BaseException, depth: int) -> None:
        """Class, message, arguments (None if they are not data), attributes that are data."""
        is_nested, self.in_error = self.in_error, True
        try:
            message = str(failure)[:MAX_TEXT_BYTES]
        except Exception:  # noqa: BLE001 - `__str__` is user code
            message = ""
        cls = type(failure)
        if not self.attempt(lambda: self.write_class(b"X", cls)):
            self.write_text(cls.__qualname__, b"x")  # a class that nobody can look up
        self.write_text(message)
        arguments = tuple(failure.args)
        if isinstance(failure, OSError) and len(arguments) == 2 and failure.filename is not None:
            arguments += (failure.filename,)
        if not self.attempt(lambda: self.write(arguments, depth + 1)):
            self.parts.append(b"N")
        attributes = {
            name: attribute
            for name, attribute in vars(failure).items()
            if type(name) is str and self.is_data(attribute, depth + 2)
        }
        if not self.attempt(lambda: self.write_pairs(b"d", attributes, depth + 1)):
            self.parts.append(TAGGED_COUNT.pack(b"d", 0))
        self.in_error = is_nested

    def is_data(self, value: object, depth: int) -> bool:
        trial = Encoder()
        return trial.attempt(lambda: trial.write(value, depth))

    def attempt(self, write: Callable[[], None]) -> bool:
        """Undo everything written if the value cannot be sent as data."""
        kept = len(self.parts), self.left, self.wide_left, dict(self.classes)
        try:
            write()
        except (Untransferable, RecursionError):
            length, self.left, self.wide_left, self.classes = kept
            del self.parts[length:]
            return False
        return True

    def write_array(self, value: Any, cls: type) -> bool:
        numpy: Any = sys.modules.get("numpy")
        if numpy is None:
            return False
        if cls is not numpy.ndarray and not isinstance(value, numpy.generic):
            return False
        array = numpy.asarray(value)
        kind = array.dtype
        if kind.kind not in ARRAY_KINDS or not kind.itemsize or array.ndim > MAX_DIMENSIONS:
            raise Untransferable(f"a numpy array of type {kind}")
        by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
        self.write_text(kind.str, b"a" if cls is numpy.ndarray else b"n")
        self.write_shape(array.shape, by_columns)
        flat = numpy.ascontiguousarray(array.reshape(-1, order="A"))
        self.write_bytes(b"y", flat.view("u1").data)
        return True

    def write_shape(self, shape: Iterable[int], flag: bool) -> None:
        sizes = tuple(shape)
        self.parts.append(struct.pack(f"<BB{len(sizes)}Q", flag, len(sizes), *sizes))

    def write_library(self, value: Any, cls: type) -> bool:
        """Tensors; types of the library that are imported only by programs that use them."""
        torch: Any = sys.modules.get("torch")
        is_parameter = torch is not None and cls is getattr(torch.nn, "Parameter", None)
        if is_parameter or (torch is not None and cls is torch.Tensor):
            self.write_tensor(torch, value, is_parameter)
            return True
        name = (
            cls.__module__.partition(".")[0],
            cls.__qualname__,
        )  # pathlib has submodules in 3.13
        if name == ("decimal", "Decimal"):
            self.write_text(str(value), b"M")
        elif name == ("uuid", "UUID"):
            self.parts += (b"U", value.bytes)
        elif name[0] == "pathlib" and name[1] in ("PosixPath", "PurePosixPath"):
            self.spend(str(value).count("/"))
            self.write_text(str(value), b"P" if name[1] == "PosixPath" else b"p")
        else:
            return False
        return True

    def write_tensor(self, torch: Any, value: Any, is_parameter: bool) -> None:
        kind = str(value.dtype).removeprefix("torch.")
        dense = value.layout is torch.strided and value.device.type != "meta"
        if not dense or kind not in TENSOR_TYPES or value.dim() > MAX_DIMENSIONS:
            raise Untransferable(f"a torch tensor of type {kind}, {value.layout}, {value.device}")
        plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
        size_bytes = plain.numel() * plain.element_size()
        self.write_text(kind, b"w")
        self.write_shape(plain.shape, is_parameter)
        self.write_bytes(
            b"y", ctypes.string_at(plain.data_ptr(), size_bytes) if size_bytes else b""
        )


def described(cls: type) -> str:
    name = f"{cls.__module__}.{cls.__qualname__}".removeprefix("builtins.")
    return f"a value of type {name}"


def write_int(encoder: Encoder, value: int, _: int) -> None:
    if -INT64 <= value < INT64:
        encoder.parts.append(TAGGED_INT.pack(b"i", value))
    else:
        data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
        encoder.write_bytes(b"I", data)


def write_list(encoder: Encoder, value: list[Any], depth: int) -> None:
    """A list of floats or of small integers is one buffer."""
    if len(value) > 8:
        kinds = set(map(type, value))
        code = {float: "d", int: "q"}.get(kinds.pop()) if len(kinds) == 1 else None
        if code is not None:
            encoder.spend(SEQUENCE_COST + len(value), depth)
            try:
                packed = struct.pack(f"<{len(value)}{code}", *value)
            except struct.error:  # an integer of more than 64 bits
                encoder.left += SEQUENCE_COST + len(value)
            else:
                encoder.write_count(b"L" if code == "d" else b"Q", len(value))
                encoder.parts.append(packed)
                return
    encoder.write_items(b"l", value, SEQUENCE_COST, depth)


def write_deque(encoder: Encoder, value: collections.deque[Any], depth: int) -> None:
    encoder.write_items(b"D", value, OBJECT_COST, depth)
    encoder.write(value.maxlen, depth)


def write_defaultdict(
    encoder: Encoder, value: collections.defaultdict[Any, Any], depth: int
) -> None:
    if value.default_factory not in FACTORIES:
        raise Untransferable(f"{described(type(value))} whose factory is no builtin type")
    encoder.parts.append(b"G%c" % FACTORIES.index(value.default_factory))
    encoder.write_pairs(b"d", value, depth)


def write_range(encoder: Encoder, value: range, depth: int) -> None:
    encoder.spend(OBJECT_COST + 3, depth)
    encoder.parts.append(b"r")
    encoder.write_each((value.start, value.stop, value.step), depth + 1)


def write_zone(encoder: Encoder, zone: datetime.tzinfo | None, depth: int) -> None:
    if zone is None:
        encoder.parts.append(b"N")
        return
    if type(zone) is not datetime.timezone:
        raise Untransferable(f"a time with {described(type(zone))}; use datetime.timezone")
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    encoder.spend(OBJECT_COST, depth)
    encoder.parts.append(b"Z")
    write_timedelta(encoder, offset, depth)
    encoder.write(name[0] if name else None, depth)


def write_date(encoder: Encoder, value: datetime.date, _: int) -> None:
    encoder.parts.append(DATE.pack(b"A", value.year, value.month, value.day))


def write_datetime(encoder: Encoder, value: datetime.datetime, depth: int) -> None:
    day = value.year, value.month, value.day
    clock = value.hour, value.minute, value.second, value.microsecond, value.fold
    encoder.parts.append(DATETIME.pack(b"B", *day, *clock))
    write_zone(encoder, value.tzinfo, depth)


def write_time(encoder: Encoder, value: datetime.time, depth: int) -> None:
    clock = value.hour, value.minute, value.second, value.microsecond, value.fold
    encoder.parts.append(TIME.pack(b"J", *clock))
    write_zone(encoder, value.tzinfo, depth)


def write_timedelta(encoder: Encoder, value: datetime.timedelta, _: int) -> None:
    encoder.parts.append(TIMEDELTA.pack(b"K", value.days, value.seconds, value.microseconds))


Writer = Callable[[Encoder, Any, int], None]
WRITERS: dict[type, Writer] = {
    type(None): lambda encoder, _value, _: encoder.parts.append(b"N"),
    bool: lambda encoder, value, _: encoder.parts.append(b"T" if value else b"F"),
    int: write_int,
    float: lambda encoder, value, _: encoder.parts.append(TAGGED_FLOAT.pack(b"f", value)),
    complex: lambda encoder, value, _: encoder.parts.append(
        COMPLEX.pack(b"c", value.real, value.imag)
    ),
    str: lambda encoder, value, _: encoder.write_text(value),
    bytes: lambda encoder, value, _: encoder.write_bytes(b"y", value),
    bytearray: lambda encoder, value, _: encoder.write_bytes(b"Y", value),
    list: write_list,
    tuple: lambda encoder, value, depth: encoder.write_items(b"t", value, SEQUENCE_COST, depth),
    set: lambda encoder, value, depth: encoder.write_items(b"e", value, OBJECT_COST, depth),
    frozenset: lambda encoder, value, depth: encoder.write_items(b"z", value, OBJECT_COST, depth),
    dict: lambda encoder, value, depth: encoder.write_pairs(b"d", value, depth),
    collections.OrderedDict: lambda encoder, value, depth: encoder.write_pairs(b"O", value, depth),
    collections.Counter: lambda encoder, value, depth: encoder.write_pairs(b"C", value, depth),
    collections.deque: write_deque,
    collections.defaultdict: write_defaultdict,
    range: write_range,
    datetime.date: write_date,
    datetime.datetime: write_datetime,
    datetime.time: write_time,
    datetime.timedelta: write_timedelta,
}
