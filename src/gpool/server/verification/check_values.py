"""Arguments of checks: a held value, decoded as data, with the task's own pickled arguments.

Nothing is unpickled here, and the made pickle holds builtin types only: loading it in a checker's sandbox runs no code
that the value's node has chosen.
"""

from __future__ import annotations

import io
import pickle
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
    refuse_pickle(value)
    try:
        decoded = decode(value)
    except BadValue as error:
        raise Invalid(f"the value cannot be decoded: {error}") from None
    made = io.BytesIO()
    _PlainPickler(made, 5).dump(((decoded, arguments), {}))
    return made.getvalue()
