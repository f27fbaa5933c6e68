"""Names of inputs and outputs: nothing but plain relative paths gets through."""

from __future__ import annotations

from pathlib import PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.core.errors import Invalid
from gpool.core.specs.fields import checked_path, folded_path


@pytest.mark.parametrize("path", ["a", "a/b.txt", "ä/ö", "...", "a b", "-rf", "~", "C:", ".hidden"])
def test_plain_paths_pass(path: str) -> None:
    assert checked_path(path) == path


@pytest.mark.parametrize(
    "path",
    [
        "", "/", "/etc/passwd", "..", "a/../b", "a/..", "./a", "a//b", "a/", "a\x00b", "a\nb",
        "a\u202eb", "a\u2028b", "x" * 256, "a/" * 600 + "a", "\udcff", "a\u200bb",
    ],
)  # fmt: skip
def test_what_could_leave_or_mislead_is_refused(path: str) -> None:
    with pytest.raises(Invalid):
        checked_path(path)


def test_a_directory_may_end_in_a_slash() -> None:
    assert checked_path("model/", directory=True) == "model/"
    with pytest.raises(Invalid):
        checked_path("/", directory=True)


@given(st.text(alphabet="a./\\~ \n\x00é..", max_size=30), st.booleans())
def test_a_checked_path_never_leaves_its_directory(path: str, directory: bool) -> None:
    try:
        checked_path(path, directory=directory)
    except Invalid:
        return
    parts = PurePosixPath(path).parts
    assert parts
    assert not PurePosixPath(path).is_absolute()
    assert not {"..", "."} & set(path.split("/"))


def test_names_that_some_file_systems_take_for_one_fold_alike() -> None:
    assert folded_path("Model/A.TXT") == folded_path("model/a.txt")
    assert folded_path("e\u0301") == folded_path("é")
    assert folded_path("a") != folded_path("b")
