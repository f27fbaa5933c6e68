"""Globals and modules of a function in the pool: as they are when a call is submitted."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpool import Client
from tests.client.standin import Pool


def program(text: str) -> dict[str, Any]:
    """Globals of a script or notebook that was run."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(text, names)
    return names


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[types.ModuleType]:
    """A module beside the caller's script."""
    path = tmp_path / "mylocal.py"
    path.write_text("FACTOR = 3\n")
    module = types.ModuleType("mylocal")
    module.__file__ = str(path)
    exec(path.read_text(), module.__dict__)
    sys.modules["mylocal"] = module
    yield module
    del sys.modules["mylocal"]


def changing(text: str, change: str) -> tuple[Callable[[int], Any], Callable[[], None]]:
    names = program(text)
    return names["work"], lambda: exec(change, names)


@pytest.mark.parametrize(
    ("text", "change", "values"),
    [
        ("k = 7\ndef work(x): return x + k", "k = 100", (8, 101)),
        ("k = [1]\ndef work(x): return x + sum(k)", "k.append(5)", (2, 7)),
        ("k = {}\ndef work(x): return len(k)", "k['a'] = 1", (0, 1)),
        ("def inner(): return 1\ndef work(x): return inner()", "def inner(): return 2", (1, 2)),
        ("k = 1\ndef inner(): return k\ndef work(x): return inner()", "k = 2", (1, 2)),
        ("class K: n = 1\ndef work(x): return K.n", "K.n = 2", (1, 2)),
        ("k = 1\nwork = lambda x: [k for _ in range(x)][0]", "k = 2", (1, 2)),
        ("def work(x, y=[1]): return len(y)", "work.__defaults__[0].append(2)", (1, 2)),
        ("k = (1, [2])\ndef work(x): return len(k[1])", "k[1].append(3)", (1, 2)),
        ("def work(x): return len('ab')", "len = lambda given: 7", (2, 7)),
    ],
)
def test_a_changed_global_is_seen_at_the_next_call(
    client: Client, text: str, change: str, values: tuple[int, int]
) -> None:
    function, change_it = changing(text, change)
    task = client.task(function)
    before = task.remote(1), task.submit(1).result(), next(task.map([1]))
    change_it()
    after = task.remote(1), task.submit(1).result(), next(task.map([1]))
    assert (set(before), set(after)) == ({values[0]}, {values[1]})


def test_a_changed_cell_is_seen_at_the_next_call(client: Client) -> None:
    count = 1
    task = client.task(lambda: count)
    assert task.remote() == 1
    count = 2
    assert task.remote() == 2


def test_a_changed_module_is_seen_at_the_next_call(
    client: Client, beside: types.ModuleType
) -> None:
    names = program("import mylocal\ndef work(x): return x * mylocal.FACTOR")
    task = client.task(names["work"])
    assert task.remote(2) == 6
    beside.FACTOR = 4  # type: ignore[attr-defined]
    assert task.remote(2) == 8


def test_a_function_is_uploaded_again_only_after_a_change(client: Client, pool: Pool) -> None:
    names = program(
        "import math\nk, many = 7, [1, {2}]\n"
        "def plain(x): return math.floor(x) + k\n"
        "def reads(x): return len(many)\n"
    )
    for name in ("plain", "reads"):
        task = client.task(names[name])
        for number in range(5):
            task.remote(number)
    assert len({body["function"]["sha256"] for body in pool.bodies}) == 2
    uploads = [path for method, path, _ in pool.requests if method == "PUT"]
    assert len(uploads) == 2


def test_an_unchanged_plain_function_is_not_pickled_again(client: Client) -> None:
    task = client.task(program("k = 7\ndef work(x): return x + k")["work"])
    first = task.pickled()
    assert task.pickled() is first
    task.function.__globals__["k"] = 8
    assert task.pickled() != first


def test_a_function_with_a_class_has_the_same_pickle_until_the_class_changes(
    client: Client,
) -> None:
    names = program("class K:\n    n, words = 1, {'a', 'b'}\ndef work(x: int) -> int: return K.n")
    task = client.task(names["work"])
    first = task.pickled()
    assert task.pickled() is first
    names["K"].n = 2
    assert task.pickled() != first
