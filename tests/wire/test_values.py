"""Values sent as data: what the runner encodes, the SDK decodes to an equal value of the same type."""

from __future__ import annotations

import collections
import datetime
import enum
import json
import math
import pathlib
import pickle
import subprocess
import sys
import tracemalloc
import uuid
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NamedTuple

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from gpool.agent.runner import encoding, serve
from gpool.client.values import RESULTS_AS_DATA
from gpool.core.errors import TaskFailed
from gpool.wire import values
from tests.client import hostile_values


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    LOW = 1


class Allowed(enum.Flag):
    READ = 1
    WRITE = 2


class Point(NamedTuple):
    x: int
    y: float = 0.0


@dataclass
class Model:
    name: str
    weights: Any = None
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Frozen:
    number: int


@dataclass(eq=False)
class Counted(Model):
    count: int = 0


class Tally(Exception):
    """Its `__init__` takes two arguments, which are not its `args`."""

    def __init__(self, code: int, words: list[str]) -> None:
        super().__init__(f"{code}: {words}")
        self.code, self.words = code, words


def there_and_back(value: object) -> Any:
    return values.decode(encoding.encode(value, _no_pickle))


def _no_pickle(value: object) -> bytes:
    raise AssertionError(f"{value!r} is not data")


def raised(failure: BaseException) -> Any:
    return values.decode(encoding.encode_exception(failure))


def refusal(value: object) -> str:
    sent = encoding.encode(value, lambda _: b"pickled")
    assert sent[:1] == values.NOT_DATA
    reason, pickled = values.reason_for_pickle(sent)
    assert bytes(pickled) == b"pickled"
    return reason


zones = st.none() | st.builds(
    datetime.timezone, st.timedeltas(datetime.timedelta(hours=-23), datetime.timedelta(hours=23))
)
keys = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters())  # lone surrogates too
    | st.binary()
    | st.dates()
    | st.datetimes(timezones=zones)
    | st.times()
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
    | st.complex_numbers(allow_nan=False)
    | st.sampled_from([Colour.RED, Level.LOW, pathlib.PurePosixPath("a/b"), pathlib.Path("/tmp/x")])
    | st.builds(Frozen, st.integers())
    | st.builds(Point, st.integers(), st.floats(allow_nan=False))
)
things = st.recursive(
    keys | st.binary().map(bytearray) | st.builds(range, st.integers(), st.integers()),
    lambda inner: (
        st.lists(inner, max_size=12)
        | st.lists(inner, max_size=12).map(tuple)
        | st.dictionaries(keys, inner)
        | st.dictionaries(keys, inner).map(collections.OrderedDict)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.lists(inner, max_size=5).map(lambda items: collections.deque(items, 7))
        | st.lists(keys).map(collections.Counter)
        | st.dictionaries(keys, inner).map(lambda d: collections.defaultdict(list, d))
        | st.builds(Model, st.text(), inner)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other) or one != other:
        return False
    if isinstance(one, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return all(same(a, b) and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(one, list | tuple | collections.deque):
        return all(map(same, one, other))
    return not isinstance(one, Model) or same(one.weights, other.weights)


@given(things)
def test_values_arrive_equal_and_of_the_same_type(value: object) -> None:
    assert same(there_and_back(value), value)


@given(
    arrays.arrays(arrays.scalar_dtypes(), arrays.array_shapes(min_dims=0, min_side=0, max_dims=4))
)
def test_arrays_arrive_equal_writable_and_in_their_order(array: Any) -> None:
    if not array.dtype.itemsize:
        return  # text of no letters
    for given_ in (array, numpy.asfortranarray(array), array[..., ::2] if array.ndim else array):
        found = there_and_back(given_)
        assert (type(found), found.dtype, found.shape) == (numpy.ndarray, array.dtype, given_.shape)
        assert found.flags.writeable
        assert found.flags.c_contiguous == (
            given_.flags.c_contiguous or not given_.flags.f_contiguous
        )
        assert found.tobytes() == given_.tobytes()
        if not array.ndim:
            assert type(there_and_back(array[()])) is type(array[()])


def test_numbers_of_numpy_keep_their_type() -> None:
    for number in (
        numpy.float32(1.5),
        numpy.int64(-3),
        numpy.bool_(True),
        numpy.datetime64("2026"),
    ):
        found = there_and_back({"n": number})["n"]
        assert (type(found), found) == (type(number), number)
    assert math.isnan(there_and_back(numpy.float64("nan")))


def test_tensors_arrive_on_the_processor_without_history() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.arange(6, dtype=torch.bfloat16, requires_grad=True).reshape(2, 3)
    for tensor in (
        weights,
        weights.t(),
        torch.zeros(0, 3),
        torch.tensor(True),
        torch.tensor(1j).conj(),
    ):
        found = there_and_back([tensor])[0]
        assert (type(found), found.dtype, found.shape) == (torch.Tensor, tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor.detach())
        assert not found.requires_grad
    state = torch.nn.Linear(2, 1).state_dict()
    assert list(there_and_back(state)) == ["weight", "bias"]
    parameter = torch.nn.Parameter(torch.ones(2))
    assert type(there_and_back(parameter)) is torch.nn.Parameter
    assert "sparse" in refusal(torch.eye(2).to_sparse())


def test_malformed_tensors_are_refused() -> None:
    pytest.importorskip("torch")
    for kind in ("load", "float64", "qint8", "object"):
        for shape in ((1 << 62,), (1 << 40, 1 << 40), (0, 1 << 63), (3,)):
            sent = hostile_values.array(kind, shape, bytes(64), "w")
            with pytest.raises(values.BadValue):
                values.decode(sent)


@pytest.mark.parametrize(
    "failure",
    [
        ValueError("no", 3),
        KeyError("k"),
        FileNotFoundError(2, "No such file", "data.csv"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
        StopIteration(5),
        MemoryError(),
        json.JSONDecodeError("bad", "{", 1),
        subprocess.CalledProcessError(3, ["false"], b"out"),
        Tally(7, ["a"]),
    ],
    ids=repr,
)
def test_exceptions_arrive_with_arguments_and_attributes(failure: Exception) -> None:
    failure.add_note("a note")
    found = raised(failure)
    assert type(found) is type(failure)
    assert (str(found), found.args, vars(found)) == (str(failure), failure.args, vars(failure))


def test_an_exception_group_arrives_with_its_members() -> None:
    found = raised(ExceptionGroup("two", [ValueError("a"), Tally(1, [])]))
    assert [type(one) for one in found.exceptions] == [ValueError, Tally]


def test_a_file_name_of_an_error_arrives() -> None:
    assert raised(FileNotFoundError(2, "No such file", "data.csv")).filename == "data.csv"


def test_parts_of_an_exception_that_are_no_data_are_left_out() -> None:
    failure = ValueError("no", object())
    failure.handle, failure.code = object(), 3  # type: ignore[attr-defined]
    found = raised(failure)
    assert (type(found), vars(found)) == (ValueError, {"code": 3})
    assert found.args == (str(failure),)


def test_exceptions_of_other_classes_are_task_failures_with_their_text() -> None:
    class Local(Exception):
        pass

    for failure, text in ((Local("here"), "Local: here"), (SystemExit(3), "SystemExit: 3")):
        found = raised(failure)
        assert type(found) is TaskFailed
        assert found.detail.endswith(text)


def test_a_class_that_is_not_imported_is_named_with_the_remedy() -> None:
    sent = encoding.encode(Model("m"), pickle.dumps).replace(b"tests.wire", b"other.wire")
    with pytest.raises(
        values.MissingClass, match=r"other.wire.test_values.Model.*; import other.wire"
    ):
        values.decode(sent)
    assert "other" not in sys.modules


def test_numpy_is_not_imported_for_an_array() -> None:
    sent = encoding.encode(numpy.zeros(2), pickle.dumps)
    code = (
        "import sys; from gpool.wire import values\n"
        "try: values.decode(sys.stdin.buffer.read())\n"
        "except values.MissingClass as error: print(error, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert b"has not imported numpy; import it before you read the value False" in done.stdout


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (object(), "a value of type object"),
        ([{"a": {1: object}}], "a value of type type"),
        (Allowed.READ | Allowed.WRITE, "test_values.Allowed that is no single member"),
        (numpy.array([object()]), "a numpy array of type object"),
        (numpy.zeros(2, [("a", "f4")]), "a numpy array of type"),
        (collections.defaultdict(lambda: 1), "whose factory is no builtin type"),
        (SystemExit(1), "a value of type SystemExit"),
        ([0] * (1 << 20), "a value of more than 1,048,576 objects"),
        ("é" * (9 << 20), "more than 16 MiB of text that is not ASCII"),
    ],
    ids=lambda given: given if isinstance(given, str) and len(given) < 80 else "",
)
def test_other_values_are_pickled_and_the_reason_names_the_type(value: object, reason: str) -> None:
    assert reason in refusal(value)


def test_dataclasses_that_are_more_than_their_fields_are_pickled() -> None:
    extra = Model("m")
    extra.extra = 1  # type: ignore[attr-defined]
    assert "attributes that are no fields (extra)" in refusal(extra)
    bare = object.__new__(Model)
    assert "a field that is not set" in refusal(bare)

    @dataclass
    class Local:
        a: int

    assert "a class defined inside a function" in refusal(Local(1))


def test_a_value_in_itself_is_pickled() -> None:
    loop: list[object] = []
    loop.append(loop)
    assert "nested more than 100 levels deep, or in itself" in refusal(loop)


def test_the_deepest_value_arrives() -> None:
    nested: list[object] = []
    for _ in range(values.MAX_DEPTH):
        nested = [nested]
    assert there_and_back(nested) == nested
    assert "levels deep" in refusal([nested])


def test_a_subclass_of_a_dataclass_arrives_as_itself() -> None:
    found = there_and_back(Counted("m", count=3))
    assert (type(found), vars(found)) == (Counted, vars(Counted("m", count=3)))


def test_a_large_list_of_objects_writes_their_class_once() -> None:
    many = [Frozen(n) for n in range(1000)]
    assert there_and_back(many) == many
    assert encoding.encode(many, pickle.dumps).count(b"Frozen") == 1


@pytest.mark.parametrize(
    "value",
    [numpy.zeros(1 << 20), b"x" * (8 << 20), bytearray(8 << 20), "x" * (8 << 20)],
    ids=["array", "bytes", "bytearray", "text"],
)
def test_a_buffer_takes_at_most_twice_its_payload(value: object) -> None:
    sent = encoding.encode(value, _no_pickle)
    tracemalloc.start()
    try:
        found = values.decode(sent)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak + len(sent) <= 2 * len(sent) + 100_000
    assert len(found)  # type: ignore[arg-type]


def test_encoder_and_decoder_agree_on_marks_limits_and_tables() -> None:
    for name in (
        *("DATA", "NOT_DATA", "MAX_OBJECTS", "MAX_DEPTH", "MAX_WIDE_TEXT_BYTES"),
        *("SEQUENCE_COST", "OBJECT_COST", "MAX_DIMENSIONS", "TENSOR_TYPES", "FACTORIES"),
    ):
        assert getattr(encoding, name) == getattr(values, name), name
    assert serve.RESULTS_AS_DATA == RESULTS_AS_DATA


def test_the_frequent_values_of_the_runner_are_encoded_as_all_others() -> None:
    runner = object.__new__(serve.FunctionRunner)
    for value in (None, 0, -(2**63), 2**63 - 1, 2**63, 1.5, "", "text", "é", "x" * 1000, True):
        assert runner.encode(value) == encoding.encode(value, _no_pickle)


def test_no_pickle_starts_with_a_mark() -> None:
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for value in (1, "a", [1], {}, (), None, Frozen(1), uuid.uuid4(), Decimal(1)):
            assert pickle.dumps(value, protocol)[:1] not in (values.DATA, values.NOT_DATA)
