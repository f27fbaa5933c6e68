"""The error tree: what is drawn is what there is."""

from __future__ import annotations

import re

import pytest

from gpool.core import errors
from gpool.core.errors import BY_CODE, BadGpuSpec, GpoolError


def drawn() -> dict[str, tuple[str, int | None]]:
    """Each class of the docstring's drawing, with its parent and its status."""
    found: dict[str, tuple[str, int | None]] = {}
    path: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        entry = re.fullmatch(r"([│ ]*)[├└]── (\w+) +(\d+|-) .*", line)
        if entry is None:
            if re.fullmatch(r"\w+", line):
                path = [line]
            continue
        depth = len(entry[1]) // 4 + 1
        path = [*path[:depth], entry[2]]
        found[entry[2]] = (path[-2], None if entry[3] == "-" else int(entry[3]))
    return found


def classes() -> list[type[GpoolError]]:
    return [each for each in BY_CODE.values() if each is not GpoolError]


def test_the_drawn_tree_is_the_tree() -> None:
    tree = drawn()
    assert {each.__name__: each.__mro__[1].__name__ for each in classes()} == {
        name: parent for name, (parent, _) in tree.items()
    }
    for each in classes():
        status = tree[each.__name__][1]
        assert status is None or status == each.status, each


def test_every_error_of_the_module_has_a_code_of_its_own() -> None:
    there = {
        each
        for each in vars(errors).values()
        if isinstance(each, type) and issubclass(each, GpoolError)
    }
    assert set(BY_CODE.values()) == there
    assert all(code == each.code for code, each in BY_CODE.items())


@pytest.mark.parametrize("each", classes())
def test_every_error_can_be_raised_with_a_detail_alone(each: type[GpoolError]) -> None:
    error = each("what was wrong")
    assert error.detail == str(error) == "what was wrong"
    assert error.title


def test_a_bad_gpu_spec_carries_its_text_and_position() -> None:
    error = BadGpuSpec("no", text="H1$0", position=2)
    assert error.members == {"text": "H1$0", "position": 2}
