"""Comparison of answers: by canonical digest, by tolerance, or by the verdicts of a consumer's comparator. Pure.

Answers are plain data: None, bool, int, float, str, bytes, lists, tuples, and dicts with text keys.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gpool.core.errors import Invalid

Same = Callable[[int, int], bool]
"""Whether the answers with these two indices agree; symmetric. An answer agrees with itself."""

MAX_DEPTH = 100
_DOUBLE = struct.Struct(">d")


def canonical_digest(answer: object) -> bytes:
    """SHA-256 of the canonical form: type tag, length, content; dict entries ordered by key.

    Every NaN has one form and -0.0 that of 0.0, since their bits differ between devices. 1, 1.0 and True differ; a list
    equals a tuple. Raise `Invalid` for other types and beyond `MAX_DEPTH` levels.
    """
    hashed = hashlib.sha256()
    _feed(hashed.update, answer, MAX_DEPTH)
    return hashed.digest()


def _feed(write: Callable[[bytes], None], answer: object, depth: int) -> None:
    if depth == 0:
        raise Invalid(f"an answer to be compared has more than {MAX_DEPTH} levels")
    match answer:
        case None:
            write(b"N")
        case bool():
            write(b"T" if answer else b"F")
        case int():
            _write_bytes(
                write, b"i", f"{answer:x}".encode()
            )  # decimal is slow and limited in length
        case float():
            write(b"f" + _DOUBLE.pack(math.nan if math.isnan(answer) else answer + 0.0))
        case str():
            _write_bytes(write, b"s", answer.encode("utf-8", "surrogatepass"))
        case bytes() | bytearray():
            _write_bytes(write, b"b", bytes(answer))
        case list() | tuple():
            write(b"l" + len(answer).to_bytes(8))
            for part in answer:
                _feed(write, part, depth - 1)
        case dict():
            write(b"d" + len(answer).to_bytes(8))
            for key in _text_keys(answer):
                _write_bytes(write, b"s", key.encode("utf-8", "surrogatepass"))
                _feed(write, answer[key], depth - 1)
        case _:
            raise Invalid(
                f"an answer of type {type(answer).__name__} has no canonical form; return numbers, text, bytes, lists "
                "or dicts, or give a comparator"
            )


def _write_bytes(write: Callable[[bytes], None], tag: bytes, content: bytes) -> None:
    write(tag + len(content).to_bytes(8))
    write(content)


def _text_keys(answer: dict[object, object]) -> list[str]:
    keys = [key for key in answer if isinstance(key, str)]
    if len(keys) != len(answer):
        raise Invalid("an answer to be compared has a dict with keys that are not text")
    return sorted(keys)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest difference of two numbers that agree: `absolute`, or `relative` to the larger magnitude."""

    relative: float = 0.0
    absolute: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.relative < 1 and 0 <= self.absolute < math.inf):
            raise Invalid(
                f"a tolerance needs 0 <= relative < 1 and a finite absolute >= 0, not {self.relative}, {self.absolute}"
            )

    def agree(self, one: object, other: object, depth: int = MAX_DEPTH) -> bool:
        """Compare numbers by tolerance, lists and dicts part by part, everything else exactly; NaN agrees with NaN."""
        if depth == 0:
            raise Invalid(f"an answer to be compared has more than {MAX_DEPTH} levels")
        if _is_number(one) and _is_number(other):
            return self._agree_numbers(one, other)
        if isinstance(one, list | tuple) and isinstance(other, list | tuple):
            return len(one) == len(other) and all(
                self.agree(*pair, depth - 1) for pair in zip(one, other, strict=True)
            )
        if isinstance(one, dict) and isinstance(other, dict):
            return one.keys() == other.keys() and all(
                self.agree(one[key], other[key], depth - 1) for key in one
            )
        return type(one) is type(other) and one == other

    def _agree_numbers(self, one: object, other: object) -> bool:
        assert isinstance(one, int | float)
        assert isinstance(other, int | float)
        if isinstance(one, int) and isinstance(other, int) and one == other:
            return True  # integers beyond the range of a double too
        try:
            first, second = float(one), float(other)
        except OverflowError:
            return False
        if math.isnan(first) or math.isnan(second):
            return math.isnan(first) and math.isnan(second)
        return math.isclose(first, second, rel_tol=self.relative, abs_tol=self.absolute)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def by_digest(digests: Sequence[bytes]) -> Same:
    return lambda one, other: digests[one] == digests[other]


def by_tolerance(answers: Sequence[object], tolerance: Tolerance) -> Same:
    return lambda one, other: tolerance.agree(answers[one], answers[other])


def by_comparator(equal: Collection[tuple[int, int]]) -> Same:
    """Use the pairs of indices that the consumer's comparator called equal; a pair counts in either order."""
    return lambda one, other: one == other or (one, other) in equal or (other, one) in equal
