"""Values of workers as arguments of checks: builtin types only, whatever a node has sent."""

from __future__ import annotations

import dataclasses
import enum
import pickle
import pickletools
from collections import OrderedDict, defaultdict, namedtuple
from pathlib import PurePosixPath

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.runner.encoding import encode
from gpool.core.errors import Invalid
from gpool.server.verification.check_values import check_arguments

ARGUMENTS = pickle.dumps(((1,), {}))
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
plain = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.sets(st.integers(), max_size=4)
    ),
    max_leaves=12,
)


@given(plain)
def test_plain_values_arrive_unchanged_and_name_no_code(value: object) -> None:
    call = check_arguments(encode(value, pickle.dumps), ARGUMENTS)
    (found, arguments), kwargs = pickle.loads(call)
    assert (found, arguments, kwargs) == (value, ARGUMENTS, {})
    named = [str(what) for code, what, _ in pickletools.genops(call) if code.name == "GLOBAL"]
    assert not named


@dataclasses.dataclass
class Point:
    x: int


class Colour(enum.Enum):
    RED = 1


Pair = namedtuple("Pair", "one other")


@pytest.mark.parametrize(
    "value",
    [
        Point(1),
        [Point(1)],
        Colour.RED,
        Pair(1, 2),
        OrderedDict(a=1),
        defaultdict(list, a=[1]),
        PurePosixPath("/x"),
        np.zeros(3),
        {"deep": [np.float32(1)]},
    ],
)
def test_other_types_are_refused(value: object) -> None:
    with pytest.raises(Invalid):
        check_arguments(encode(value, pickle.dumps), ARGUMENTS)


@pytest.mark.parametrize("content", [b"", pickle.dumps(1), b"\x02", b"\x01", b"\x01i123", b"\x01?"])
def test_pickles_and_malformed_values_are_refused(content: bytes) -> None:
    with pytest.raises(Invalid):
        check_arguments(content, ARGUMENTS)
