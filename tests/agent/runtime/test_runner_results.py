"""Results of functions in a runner: data where the caller asks for it, a marked pickle for other types."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import numpy
import pytest

from gpool.agent.runtime.protocol import CallAnswer
from gpool.core.errors import TaskFailed
from gpool.wire.values import DATA, NOT_DATA, decode, reason_for_pickle
from tests.tools.runtimes import Caller, caller, using

cloudpickle.register_pickle_by_value(sys.modules[__name__])
every = pytest.mark.parametrize("kind", ["bubblewrap", "process", "fake"])
preloads = pytest.mark.parametrize("preload", [(), ("json",)], ids=["plain", "forked"])


@dataclass
class Point:
    x: int
    y: list[float]


class TwoArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


class Plain:
    """No dataclass: it can only be pickled."""

    def __init__(self) -> None:
        self.word = "kept"


def make(what: str) -> object:
    if what == "error":
        raise TwoArguments(3, "no good")
    if what == "exit":
        sys.exit(3)
    if what == "array":
        return {"mean": numpy.arange(100_000.0)}
    found: dict[str, object] = {
        "int": 7,
        "text": "word",
        "mixed": [None, True, 2**70, {"a": (1.5, b"x")}],
        "point": Point(1, [2.0]),
        "plain": Plain(),
    }
    return found[what]


def content_of(answer: CallAnswer) -> bytes:
    if answer.value_file is None:
        return answer.value
    content = answer.value_file.read_bytes()
    answer.value_file.unlink()
    return content


def called(kind: str, data: Path, *words: str, preload: tuple[str, ...] = ()) -> list[Any]:
    async def work(runtime: Any) -> list[Any]:
        calling = await caller(runtime, preload=preload)
        try:
            return await ask(calling)
        finally:
            await calling.runner.remove()

    async def ask(calling: Caller) -> list[Any]:
        calling.as_data = True
        await calling.send(make, *((word,) for word in words))
        answers = await calling.answers(len(words))
        return [(each, content_of(each)) for each in answers]

    return using(kind, data, work)


@preloads
@every
def test_values_come_as_data(kind: str, preload: tuple[str, ...], tmp_path: Path) -> None:
    words = ("int", "text", "mixed", "point")
    found = called(kind, tmp_path, *words, preload=preload)
    assert all(content[:1] == DATA for _, content in found)
    assert [decode(content) for _, content in found] == [make(word) for word in words]


@every
def test_an_array_comes_as_its_buffer(kind: str, tmp_path: Path) -> None:
    [(_, content)] = called(kind, tmp_path, "array")
    assert len(content) < 800_100
    assert numpy.array_equal(decode(content)["mean"], numpy.arange(100_000.0))


@every
def test_an_exception_comes_as_data(kind: str, tmp_path: Path) -> None:
    [(answer, content)] = called(kind, tmp_path, "error")
    error = decode(content)
    assert answer.raised
    assert (type(error), str(error), error.code) == (TwoArguments, "no good", 3)
    assert "in make" in answer.error_text


@pytest.mark.parametrize("kind", ["bubblewrap", "process"])
def test_the_end_of_a_program_does_not_end_the_caller(kind: str, tmp_path: Path) -> None:
    [(answer, content)] = called(kind, tmp_path, "exit")
    assert answer.raised
    assert type(decode(content)) is TaskFailed
    assert "SystemExit: 3" in answer.error_text


@every
def test_another_type_comes_pickled_with_its_name(kind: str, tmp_path: Path) -> None:
    [(answer, content)] = called(kind, tmp_path, "plain")
    assert (answer.raised, content[:1]) == (False, NOT_DATA)
    reason, pickled = reason_for_pickle(content)
    assert reason == f"a value of type {__name__}.Plain"
    assert pickle.loads(pickled).word == "kept"
