"""What travels by value and what by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import cloudpickle

from gpool.client.values import OwnModules, dumps, dumps_call


def test_installed_modules_go_by_name_and_the_callers_by_value(tmp_path: Path) -> None:
    own = OwnModules()
    assert not own.is_own("json")
    assert not own.is_own("click")
    assert not own.is_own("gpool.client.values")
    assert not own.is_own("sys")
    assert own.is_own(__name__)


def test_a_function_loads_where_the_callers_modules_are_not(tmp_path: Path) -> None:
    """Modules beside the script, and what they import in turn, arrive with the function."""
    (tmp_path / "deeper.py").write_text("FACTOR = 6\ndef times(x):\n    return FACTOR * x\n")
    (tmp_path / "kit").mkdir()
    (tmp_path / "kit" / "__init__.py").write_text("from kit.shape import Shape\n")
    (tmp_path / "kit" / "shape.py").write_text("class Shape:\n    sides = 4\n")
    (tmp_path / "beside.py").write_text(
        "import deeper\nfrom kit import Shape\n"
        "def work(x):\n    return deeper.times(x) + Shape.sides - 4\n"
    )
    script = (
        "import sys, beside\nfrom gpool.client.values import dumps\n"
        "sys.stdout.buffer.write(dumps(beside.work))"
    )
    sent = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, check=True
    ).stdout
    loads = "import pickle, sys; print(pickle.loads(sys.stdin.buffer.read())(7))"
    said = subprocess.run(
        [sys.executable, "-c", loads], cwd="/", input=sent, capture_output=True, check=True
    )
    assert said.stdout.strip() == b"42"


def test_pickling_leaves_cloudpickles_register_as_it_was() -> None:
    dumps(test_pickling_leaves_cloudpickles_register_as_it_was)
    assert __name__ not in cloudpickle.list_registry_pickle_by_value()


def test_plain_arguments_name_no_class() -> None:
    pickled = dumps_call(len, (1, "two", b"3", 4.0, None, True), {})
    assert b"\x93" not in pickled
    assert cloudpickle.loads(pickled) == ((1, "two", b"3", 4.0, None, True), {})


def test_subclasses_of_plain_types_keep_their_class() -> None:
    class Metres(int):
        pass

    args, _ = cloudpickle.loads(dumps_call(len, (Metres(3), [json.JSONDecoder]), {}))
    assert type(args[0]).__name__ == "Metres"
    assert args[1] == [json.JSONDecoder]
