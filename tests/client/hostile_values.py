"""Hostile results: bytes a node may send in the place of a value. Run as a script, it gives them to the SDK.

`python -m tests.client.hostile_values FOLDER` prints one line of JSON for each: its name, the error, the audit events
and the peak of memory while it was read. The pickles create FOLDER when they are loaded.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import os
import pickle
import random
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy  # noqa: F401 - else no array would be decoded

from gpool.agent.runner import encoding
from gpool.client.values import Raised, Result, outcome
from gpool.core.errors import GpoolError
from gpool.core.ids import encode
from gpool.wire.values import DATA, MAX_DEPTH, MAX_OBJECTS, MAX_VALUE_BYTES, NOT_DATA, READERS

PROTOCOLS = range(pickle.HIGHEST_PROTOCOL + 1)
RAN: list[str] = []
"""Code of this program that a payload made run."""


class Gadget:
    def __init__(self, function: Callable[..., object], *args: object) -> None:
        self._reduced = function, args

    def __reduce__(self) -> Any:
        return self._reduced


def gadgets(folder: str) -> dict[str, Gadget]:
    code = f"__import__('os').makedirs({folder!r}, exist_ok=True)"
    return {
        "call": Gadget(os.makedirs, folder, 0o777, True),
        "eval": Gadget(eval, code),
        "exec": Gadget(exec, code),
        "partial": Gadget(functools.partial(os.makedirs, folder, 0o777, True)),
        "attribute": Gadget(operator.methodcaller("mkdir", 0o777, True, True), Path(folder)),
        "map": Gadget(list, Gadget(map, os.makedirs, [f"{folder}/inside"])),
    }


@dataclass
class Planted:
    """Everything that an unpickler would call runs code."""

    word: str

    def __post_init__(self) -> None:
        RAN.append("__post_init__")

    def __setstate__(self, state: object) -> None:
        RAN.append("__setstate__")

    def __setattr__(self, name: str, value: object) -> None:
        RAN.append("__setattr__")
        object.__setattr__(self, name, value)


@dataclass
class Closing:
    word: str

    def __del__(self) -> None:
        RAN.append("__del__")


class Watched:
    def __get__(self, instance: object, owner: object = None) -> str:
        return "default"

    def __set__(self, instance: object, value: object) -> None:
        RAN.append("__set__")


@dataclass
class Watching:
    word: str = Watched()  # type: ignore[assignment]


class PlantedError(Exception):
    def __init__(self, word: str) -> None:
        RAN.append("__init__")
        super().__init__(word)

    def __setstate__(self, state: object) -> None:
        RAN.append("__setstate__")


class Lazy(type(sys)):  # type: ignore[misc]
    def __getattr__(self, name: str) -> object:
        RAN.append("__getattr__")
        raise AttributeError(name)


LAZY = Lazy("lazy_module_of_the_caller")


def count(tag: str, number: int, body: bytes = b"") -> bytes:
    return tag.encode() + struct.pack("<I", number) + body


def text(word: str, tag: str = "s") -> bytes:
    return count(tag, len(word.encode()), word.encode())


def named(
    tag: str, module: str, name: str, fields: tuple[str, ...] = (), body: bytes = b""
) -> bytes:
    members = count("t", len(fields), b"".join(text(field) for field in fields))
    return DATA + count(tag, 0, text(module) + text(name) + members + body)


def failure(module: str, name: str, arguments: bytes = b"N", attributes: bytes = b"") -> bytes:
    return named("X", module, name, (), text("no") + arguments + (attributes or count("d", 0)))


def array(kind: str, shape: tuple[int, ...], data: bytes, tag: str = "a") -> bytes:
    sizes = struct.pack(f"<BB{len(shape)}Q", 0, len(shape), *shape)
    return DATA + text(kind, tag) + sizes + count("y", len(data), data)


def payloads(folder: str) -> Iterator[tuple[str, bytes]]:
    yield from pickles(folder)
    yield from lengths()
    yield from nesting()
    yield from bombs()
    yield from wrong_types()
    yield from cuts()
    yield from small_json()
    yield from noise()


def pickles(folder: str) -> Iterator[tuple[str, bytes]]:
    for name, gadget in gadgets(folder).items():
        for protocol in PROTOCOLS:
            pickled = pickle.dumps(gadget, protocol)
            yield f"pickle {name} {protocol}", pickled
            yield f"pickle {name} {protocol} as data", DATA + pickled
            yield f"pickle {name} {protocol} marked", NOT_DATA + count("", 3, b"odd" + pickled)
    yield "pickle marked without a reason", NOT_DATA + pickle.dumps(gadgets(folder)["call"])
    yield "pickle with a huge reason", NOT_DATA + count("", 0xFFFFFFFF, b"x")
    yield "pickle in bytes in a list", DATA + count("l", 1, text("call")) + pickle.dumps(1)


def lengths() -> Iterator[tuple[str, bytes]]:
    for tag in "IsyYltezdODCLQMPpwanGVREX":
        for number in (0xFFFFFFFF, 0x7FFFFFFF, 1 << 24):
            yield f"length {tag} {number}", DATA + count(tag, number, b"N" * 16)
    for shape in ((1 << 62,), (1 << 40, 1 << 40), (0, 1 << 63), (1 << 32,) * 31, (3, 3)):
        yield f"array {shape}", array("<f8", shape, bytes(64))
        yield f"tensor {shape}", array("float64", shape, bytes(64), "w")


def nesting() -> Iterator[tuple[str, bytes]]:
    for tag in "ltezdODC":
        for depth in (MAX_DEPTH + 2, 10_000, 1_000_000):
            step = count(tag, 1, b"i" + bytes(8)) if tag in "dOC" else count(tag, 1)
            yield f"nested {tag} {depth}", DATA + step * depth + b"N"


def bombs() -> Iterator[tuple[str, bytes]]:
    many = MAX_OBJECTS
    yield "many None", DATA + count("l", many, b"N" * many)
    yield "many small lists", DATA + count("l", many // 2, count("l", 0) * (many // 2))
    yield "many sets", DATA + count("l", many // 5, count("e", 0) * (many // 5))
    yield "many dicts", DATA + count("t", many // 5, count("d", 0) * (many // 5))
    yield "many exceptions", DATA + count("l", many // 5, text("E", "x") * (many // 5))
    yield "a path of many parts", DATA + text("a/" * (many + 1), "P")
    smile = "\U0001f600".encode()
    yield "wide text", DATA + count("s", 4 + (17 << 20), smile + b"a" * (17 << 20))
    words = text("\u4e00" + "a" * (1 << 20))
    yield "many wide texts", DATA + count("l", 20, words * 20)
    size = 5 << 20
    yield "wide text in a large value", beside(count("s", size, wide_ascii(size)), 50 << 20)
    yield "an exception of too much text", DATA + commanding(6 << 20)
    yield "floats", DATA + count("L", many + 1, bytes(8 * (many + 1)))
    prime = (1 << 61) - 1
    keys = b"".join(count("I", 16, (prime * n).to_bytes(16, "little")) for n in range(1, 50_000))
    yield "colliding set", DATA + count("e", 49_999, keys)
    pairs = b"".join(
        count("I", 16, (prime * n).to_bytes(16, "little")) + b"N" for n in range(1, 50_000)
    )
    yield "colliding dict", DATA + count("d", 49_999, pairs)


def largest() -> Iterator[tuple[str, bytes]]:
    """Values just within the limits: they arrive, and take the most memory that a value can take."""
    few = MAX_OBJECTS // 10
    yield "wide texts", DATA + count("l", 1_000_000, text("\U0001f600") * 1_000_000)
    yield "integers", DATA + count("l", 1_000_000, (b"i" + b"\x7f" * 8) * 1_000_000)
    yield "sets", DATA + count("l", few, count("e", 1, b"N") * few)
    yield "dicts", DATA + count("l", few * 9 // 10, count("d", 1, b"NN") * (few * 9 // 10))
    yield "deques", DATA + count("l", few, (count("D", 0) + b"N") * few)
    yield "paths", DATA + count("l", few, text("aa", "P") * few)
    smile = "\U0001f600".encode()
    size = (16 << 20) - 4
    yield "wide text", DATA + count("s", 4 + size, smile + b"a" * size)
    size = MAX_VALUE_BYTES - 6
    yield "bytes", DATA + count("y", size, bytes(size))
    yield "text", DATA + count("s", size, b"a" * size)
    yield "array", array("|u1", (size - 32,), bytes(size - 32))
    error = text("E", "x") + text("no") + b"N" + count("d", 1, text("a") + b"N")
    yield "exceptions", DATA + count("l", few // 4, error * (few // 4))
    for whole, wide in ((48 << 20, 16 << 20), (MAX_VALUE_BYTES, 4 << 20)):
        yield (
            f"{wide} bytes of wide text in {whole}",
            beside(count("s", wide, wide_ascii(wide)), whole),
        )
        yield f"control characters in {whole}", beside(commanding(wide // 3 - 64), whole)


def wide_ascii(size: int, letter: bytes = b"a") -> bytes:
    return "\U0001f600".encode() + letter * (size - 4)


def commanding(size: int) -> bytes:
    arguments = count("t", 1, count("s", size, wide_ascii(size, b"\x1b")))
    return failure("builtins", "ValueError", arguments)[1:]


def beside(value: bytes, whole: int) -> bytes:
    """A list of the value and bytes, together of this size. The caller keeps no copy, which would count as memory."""
    rest = whole - len(value) - 16
    return DATA + count("l", 2, value + count("y", rest, bytes(rest)))


def wrong_types() -> Iterator[tuple[str, bytes]]:
    here = __name__
    sized = count("t", 1, text("word"))
    yield "nothing", DATA
    yield "a list as key", DATA + count("d", 1, count("l", 0) + b"N")
    yield "a dict in a set", DATA + count("e", 1, count("d", 0))
    yield "trailing bytes", DATA + b"NN"
    yield "a class used before it is defined", DATA + count("R", 1)
    yield "a class without a name", DATA + count("R", 0, b"NN")
    for module, name in (
        ("os", "system"),
        ("os", "makedirs"),
        ("builtins", "eval"),
        ("builtins", "object"),
        ("builtins", "type"),
        ("subprocess", "Popen"),
        ("pathlib", "Path"),
        ("not_imported_anywhere", "Class"),
        ("antigravity", "Class"),
        ("", ""),
        (here, "gadgets"),
        (here, "Gadget"),
        (here, "Planted.__init__"),
        (here, "..".join("ab")),
        (LAZY.__name__, "Class"),
        ("\x1b[2J", "\x1b[2J"),
    ):
        for tag in "REV":
            yield f"class {tag} {module!r}.{name}", named(tag, module, name, ("word",), sized)
    yield "other fields", named("R", here, "Planted", ("other",), sized)
    yield "fewer fields", named("R", here, "Planted", (), count("t", 0))
    yield "more fields", named("R", here, "Planted", ("word", "word"), count("t", 2, text("a") * 2))
    yield "special field", named("R", here, "Planted", ("__class__",), sized)
    yield "closing", named("R", here, "Closing", ("word",), sized)
    yield "descriptor", named("R", here, "Watching", ("word",), sized)
    yield "no field names", named("R", here, "Planted", ("word",), b"N")
    for kind in ("|O8", "O", "object", "<f8,<f8", "V8", "<f3", "<i99", "|S0", "(2,)f8", "\0", ""):
        yield f"array of {kind!r}", array(kind, (1,), bytes(8))
        yield f"tensor of {kind!r}", array(kind, (1,), bytes(8), "w")
    yield "tensor of an attribute of torch", array("load", (1,), bytes(8), "w")
    yield "array of 255 dimensions", DATA + text("<f8", "a") + b"\0\xff" + bytes(8 * 255)
    yield "month 13", DATA + b"A" + struct.pack("<HBB", 2026, 13, 1)
    yield "year 0", DATA + b"B" + struct.pack("<HBBBBBIB", 0, 1, 1, 0, 0, 0, 0, 0) + b"N"
    yield "hour 99", DATA + b"J" + struct.pack("<BBBIB", 99, 0, 0, 0, 0) + b"N"
    yield "a zone of text", DATA + b"J" + struct.pack("<BBBIB", 9, 0, 0, 0, 0) + text("UTC")
    yield "decimal of words", DATA + text("one", "M")
    key = count("X", 0, text("builtins") + text("KeyError") + count("t", 0) + text("\x1b[2J"))
    yield "a set with an unhashable member", DATA + count("e", 2, key + b"N" + count("d", 0) * 2)
    yield "range without steps", DATA + b"r" + (b"i" + bytes(8)) * 3
    yield "range of text", DATA + b"r" + text("a") * 3
    yield "deque of length text", DATA + count("D", 0) + text("a")
    yield "a factory out of reach", DATA + b"G\xff" + count("d", 0)
    yield "a broken text", DATA + count("s", 2, b"\xff\xfe")
    yield "an exception without arguments", DATA + count("X", 0)
    yield "an exception of odd arguments", failure("builtins", "ValueError", b"T")
    odd = count("d", 1, b"TN")
    yield "an exception of odd attributes", failure("builtins", "ValueError", b"N", odd)


def small_json() -> Iterator[tuple[str, bytes]]:
    """Bytes in the place of a small plain value."""
    for tag in (b"j", b"k"):
        for depth in (MAX_DEPTH + 1, 1000, 2000, 100_000):
            yield f"nested JSON {tag!r} {depth}", DATA + tag + b"[" * depth + b"]" * depth
            yield f"open JSON {tag!r} {depth}", DATA + tag + b'{"a":' * depth
        many = b"[" + b"0," * 3000 + b"0]"
        for body in (
            b"",
            b"7",
            b'"text"',
            b"null",
            b"[1",
            b"[1]]",
            b"[1e999]",
            b"[NaN]",
            b"[\xff]",
        ):
            yield f"JSON {tag!r} {body!r}", DATA + tag + body
        yield f"long JSON {tag!r}", DATA + tag + many
        yield f"long JSON number {tag!r}", DATA + tag + b"[" + b"9" * 4090 + b"e9]"
        yield f"JSON in a list {tag!r}", DATA + count("l", 1, tag + b"[1]")
        yield f"JSON with a lone surrogate {tag!r}", DATA + tag + b'["\\ud800"]'
    yield "JSON of a dict as a tuple", DATA + b'k{"a":1}'


def cuts() -> Iterator[tuple[str, bytes]]:
    value = {"a": [1, 2.5, "text", b"bytes", None, {3}, (4, 2**70)], "b": [1.5] * 20, "c": 1j}
    whole = encoding.encode(value, pickle.dumps)
    for at in range(1, len(whole), max(1, len(whole) // 60)):
        yield f"cut at {at}", whole[:at]


def noise() -> Iterator[tuple[str, bytes]]:
    chance = random.Random(7)
    for tag in sorted(set(range(256)) - set(READERS)):
        yield f"tag {tag}", DATA + bytes([tag]) + bytes(16)
    for seed in range(60):
        yield f"noise {seed}", DATA + chance.randbytes(64)
        body = bytes(chance.choice([*READERS, 0, 1, 2]) for _ in range(64))
        yield f"noise of tags {seed}", DATA + body


def harmless_exceptions() -> Iterator[tuple[str, bytes]]:
    """Classes a node may name for an exception: none may be anything but an `Exception` this program has imported."""
    for module, name in (
        ("builtins", "SystemExit"),
        ("builtins", "KeyboardInterrupt"),
        ("builtins", "GeneratorExit"),
        ("builtins", "BaseException"),
        ("builtins", "eval"),
        ("os", "system"),
        ("subprocess", "Popen"),
        ("not_imported_anywhere", "Error"),
        (__name__, "PlantedError"),
        (LAZY.__name__, "Error"),
    ):
        yield f"exception {module}.{name}", failure(module, name, count("t", 1, text("word")))


# ---- the child process

FORBIDDEN_EVENTS = (
    "import",
    "exec",
    "compile",
    "open",
    "pickle.",
    "os.",
    "subprocess.",
    "marshal.",
)


def read(content: bytes, reason: str, *, own_node: bool, requested: bool) -> object:
    """Give the bytes to the SDK as the result of a task, inline or, if they are many, as an artifact."""
    is_inline = len(content) <= 64 * 1024
    result = Result(
        id=encode("task", 1),
        position=0,
        sequence=1,
        status="succeeded" if reason == "returned" else "failed",
        reason=reason,
        value=content if is_inline else b"",
        value_sha256="" if is_inline else hashlib.sha256(content).hexdigest(),
        error_text="Traceback …\nValueError: no",
        node=encode("node", 1),
        own_node=own_node,
    )

    def fetch(sha256: str, most_bytes: int | None = None) -> bytes:
        assert most_bytes is None or len(content) <= most_bytes
        return content

    try:
        found = outcome(result, fetch, pickle_requested=requested)
    except GpoolError as error:
        return error
    return found.exception if isinstance(found, Raised) else found


class Listener:
    """Collects audit events while it is on."""

    def __init__(self) -> None:
        self.is_on = False
        self.events: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, _: object) -> None:
        if self.is_on and event.startswith(FORBIDDEN_EVENTS):
            self.events.append(event)

    def report(self, kind: str, name: str, content: bytes, reason: str) -> None:
        self.events.clear()
        RAN.clear()
        Path("/proc/self/clear_refs").write_text("5")  # begins a new peak
        self.is_on = True
        found = read(content, reason, own_node=False, requested=False)
        self.is_on = False
        is_error = isinstance(found, BaseException)
        line = {
            "kind": kind,
            "name": name,
            "error": type(found).__name__ if is_error else "",
            "detail": str(found) if is_error else "",
            "events": self.events,
            "ran": RAN,
            "peak_bytes": peak_bytes(),
        }
        sys.stdout.write(json.dumps(line) + "\n")


def peak_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def main(folder: str) -> None:
    sys.modules[LAZY.__name__] = LAZY
    listener = Listener()
    for name, content in payloads(folder):
        listener.report("value", name, content, "returned")
        listener.report("exception", name, content, "raised")
    for name, content in harmless_exceptions():
        listener.report("class", name, content, "raised")
    for name, content in largest():
        listener.report("largest", name, content, "returned")


if __name__ == "__main__":
    main(sys.argv[1])
