"""`compare=function`: options that are refused, and the comparator as it is sent."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from gpool import Client
from gpool.client.client import default_client
from gpool.client.options import Options
from gpool.client.tasks import Task
from gpool.client.values import RESULTS_AS_DATA
from gpool.core.errors import Invalid


def are_near(one: float, other: float) -> object:
    return abs(one - other) < 0.1


async def are_near_later(one: float, other: float) -> bool:
    return abs(one - other) < 0.1


def half(number: int) -> float:
    return number / 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"compare": are_near}, "add verify=2"),
        ({"verify": 2, "compare": "near"}, "a function of two values"),
        ({"verify": "check", "check": are_near, "compare": are_near}, "no answers are compared"),
        ({"verify": 2, "compare": are_near, "results": "pickle"}, "it gets data"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        Options.of(options).members()


def test_a_command_is_refused_before_anything_is_sent() -> None:
    with Client("http://127.0.0.1:9", "key") as client, pytest.raises(Invalid, match="a command"):
        client.run(["true"], verify=2, compare=are_near)


def sent(comparator: Any) -> Any:
    task = Task(half, Options(verify=2, compare=comparator), default_client)
    pickled = task.pickled_comparator()
    assert pickled.endswith(RESULTS_AS_DATA)
    assert task.pickled_comparator() is pickled  # nothing has changed
    assert task.pickled_check() == b""
    return pickle.loads(pickled)


@pytest.mark.parametrize("comparator", [are_near, are_near_later])
def test_the_sent_comparator_reports_every_pair(comparator: Any) -> None:
    comparing = sent(comparator)
    assert comparing([(1.0,), (1.05,), (7.0,)]) == "TFF"
    assert comparing([(1.0,), (), (1.05,)]) == "FTF"  # a value that is no data


def test_a_value_that_cannot_be_compared_differs_and_leaves_the_others() -> None:
    assert sent(are_near)([("a lie",), (1.0,), (1.05,)]) == "FFT"


def test_a_comparator_that_fails_for_every_value_raises_its_error() -> None:
    with pytest.raises(TypeError, match="unsupported operand"):
        sent(are_near)([("text",), ("other text",)])
