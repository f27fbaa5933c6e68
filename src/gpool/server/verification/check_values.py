"""Arguments of checks and comparisons: held values, decoded as data; a check gets the task's own pickled arguments too.

Nothing is unpickled here, and the made pickle holds builtin types only: loading it in a checker's sandbox runs no code
that the value's node has chosen.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

from gpool.core.errors import Invalid
from gpool.core.model import MIB
from gpool.wire.imported_classes import BadValue
from gpool.wire.values import DATA, decode

MAX_CHECKED_BYTES = 4 * MIB
"""Of a value, and of the arguments, that are given to a check."""


class _PlainPickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Refuse every type that has no pickle opcode of its own; called for those only."""
        if type(value) is complex or value is complex:
            return NotImplemented
        raise Invalid(f"a value of type {type(value).__name__} is not plain data")


def refuse_pickle(value: bytes) -> None:
    if not value.startswith(DATA):
        raise Invalid("the value was pickled, because it is no plain data")


def check_arguments(value: bytes, arguments: bytes) -> bytes:
    """Return the pickled call of a check; `Invalid` says why this value cannot be checked."""
    return _pickled_call(_decoded(value), arguments)


def comparison_arguments(values: Sequence[tuple[object, ...]]) -> bytes:
    """Return the pickled call of a comparison of decoded values; an empty tuple stands for a value that is no data."""
    return _pickled_call(list(values))


def reported_pairs(value: bytes, pairs: int) -> tuple[bool, ...] | None:
    """Read a comparer's report, a letter T or F for each pair; None: it is none of so many pairs."""
    try:
        letters = decode(value) if value.startswith(DATA) else None
    except BadValue:
        return None
    if not isinstance(letters, str) or len(letters) != pairs or letters.strip("TF"):
        return None
    return tuple(letter == "T" for letter in letters)


def decoded_value(value: bytes) -> object:
    """Decode a value that was sent as plain data; `Invalid` says why a function in a sandbox cannot get it."""
    found = _decoded(value)
    _pickled_call(found)
    return found


def _decoded(value: bytes) -> object:
    refuse_pickle(value)
    try:
        return decode(value)
    except BadValue as error:
        raise Invalid(f"the value cannot be decoded: {error}") from None


def _pickled_call(*arguments: object) -> bytes:
    made = io.BytesIO()
    _PlainPickler(made, 5).dump((arguments, {}))
    return made.getvalue()
