"""Answers in comparable form: values, outputs, failures; hostile bytes are compared by their hash."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from gpool.agent.runner.encoding import encode
from gpool.core.ids import NodeId, TaskId, UserId
from gpool.core.model import Instant, OutputFile, TaskKind, TaskSpec
from gpool.server.store.operations.verification.siblings import SiblingRow, StoredAnswer
from gpool.server.verification.answers import compared_form, plain_value, same_answers

FUNCTION = TaskSpec(TaskKind.FUNCTION, "f")
COMMAND = TaskSpec(TaskKind.COMMAND, "c", command=("true",))


def row(status: str = "succeeded", reason: str = "returned", code: int | None = None) -> SiblingRow:
    at = Instant(1)
    return SiblingRow(
        *(TaskId(1), TaskId(2), 0, NodeId(3), UserId(4), "open"),
        *(status, 1, at, at, at, reason, code, None),
    )


def stored(
    returned: object = None,
    *,
    value: bytes = b"",
    outputs: tuple[OutputFile, ...] = (),
    stdout: bytes = b"",
) -> StoredAnswer:
    content = value if returned is None else encode(returned, lambda _: b"")
    return StoredAnswer(content, "", outputs, stdout)


def agree(spec: TaskSpec, *answers: StoredAnswer) -> bool:
    forms = [compared_form(spec, row(), one, one.value or None) for one in answers]
    return same_answers(spec, forms)(0, 1)


def tolerant(tolerance: float) -> TaskSpec:
    return TaskSpec(TaskKind.FUNCTION, "f", tolerance=tolerance)


def test_equal_values_agree_whatever_their_bits() -> None:
    assert agree(FUNCTION, stored([float("nan"), -0.0]), stored([-float("nan"), 0.0]))
    assert agree(FUNCTION, stored({"a": 1, "b": 2}), stored({"b": 2, "a": 1}))
    assert not agree(FUNCTION, stored(1), stored(1.0))


@pytest.mark.parametrize("kind", [float, list, np.array])
def test_a_tolerance_applies_to_numbers_lists_and_arrays(kind: object) -> None:
    def made(number: float) -> object:
        return number if kind is float else kind([number, 2.0])  # type: ignore[operator]

    assert agree(tolerant(1e-6), stored(made(1.0)), stored(made(1.0 + 1e-7)))
    assert not agree(tolerant(1e-6), stored(made(1.0)), stored(made(1.1)))
    assert not agree(FUNCTION, stored(made(1.0)), stored(made(1.0 + 1e-7)))


def test_arrays_of_another_shape_or_type_differ() -> None:
    spec = tolerant(1e-3)
    assert not agree(spec, stored(np.zeros((2, 3))), stored(np.zeros((3, 2))))
    assert not agree(spec, stored(np.zeros(2, np.float32)), stored(np.zeros(2)))


def test_bytes_that_are_no_data_are_compared_by_their_hash() -> None:
    """Among them a pickle that would run code, and data that ends too early."""
    pickle = b"cos\nsystem\n(S'true'\ntR."
    for content in (pickle, b"\x01f" + struct.pack("<f", 1.0), b"\x01l\xff\xff\xff\xff"):
        assert plain_value(content) is None
        assert agree(tolerant(0.5), stored(value=content), stored(value=content))
        assert not agree(tolerant(0.5), stored(value=content), stored(value=content + b"x"))


def test_commands_are_compared_by_outputs_or_else_by_standard_output() -> None:
    assert agree(COMMAND, stored(stdout=b"42\n"), stored(stdout=b"42\n"))
    assert not agree(COMMAND, stored(stdout=b"42\n"), stored(stdout=b"43\n"))
    named = TaskSpec(TaskKind.COMMAND, "c", command=("true",), outputs=("out",))
    one, other = OutputFile("out", "aa", 1), OutputFile("out", "bb", 1)
    assert agree(named, stored(outputs=(one,), stdout=b"1"), stored(outputs=(one,), stdout=b"2"))
    assert not agree(named, stored(outputs=(one,)), stored(outputs=(other,)))
    extra = OutputFile("unasked", "cc", 1)
    assert agree(named, stored(outputs=(one, extra)), stored(outputs=(one,)))


def test_failures_agree_by_reason_and_code() -> None:
    ends = [
        compared_form(COMMAND, row("failed", reason, code), stored(stdout=b"x"), None)
        for reason, code in (("exited", 1), ("exited", 1), ("exited", 2), ("timed_out", None))
    ]
    same = same_answers(COMMAND, ends)
    assert same(0, 1)
    assert not same(0, 2)
    assert not same(0, 3)
