"""`verify="check"`: options that are refused, and the check function as it is sent."""

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


def is_half(result: float, number: int, *, exactly: bool = True) -> object:
    return result * 2 == number or not exactly


async def is_half_later(result: float, number: int) -> bool:
    return result * 2 == number


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"verify": "check"}, "check is None"),
        ({"verify": "check", "check": True}, "check is True"),
        ({"check": is_half}, 'add verify="check"'),
        ({"verify": 2, "check": is_half}, 'add verify="check"'),
        ({"verify": "check", "check": is_half, "results": "pickle"}, "a check gets data"),
        ({"verify": "check", "check": is_half, "compare": 0.1}, "no answers are compared"),
    ],
)
def test_options_without_a_meaning_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(Invalid, match=said):
        Options.of(options).members()


def test_a_command_is_refused_before_anything_is_sent() -> None:
    with Client("http://127.0.0.1:9", "key") as client, pytest.raises(Invalid, match="a command"):
        client.run(["true"], verify="check")


def half(number: int) -> float:
    return number / 2


@pytest.mark.parametrize("check", [is_half, is_half_later])
def test_the_sent_check_gets_the_result_and_the_arguments(check: Any) -> None:
    task = Task(half, Options(verify="check", check=check), default_client)
    sent = task.pickled_check()
    assert sent.endswith(RESULTS_AS_DATA)
    assert task.pickled_check() is sent  # nothing has changed
    checking = pickle.loads(sent)
    assert checking(2.0, pickle.dumps(((4,), {}))) is True
    assert checking(3.0, pickle.dumps(((4,), {}))) is False


def test_keywords_of_a_call_reach_the_check() -> None:
    task = Task(half, Options(verify="check", check=is_half), default_client)
    checking = pickle.loads(task.pickled_check())
    assert checking(3.0, pickle.dumps(((4,), {"exactly": False}))) is True
