"""One request, however heavy, must not hold up the server's only loop for long."""

from __future__ import annotations

from contextlib import suppress
from time import thread_time

import pytest

from gpool.core.errors import GpoolError, TooLarge
from gpool.server.actions.tasks.specs import spec_of
from gpool.wire.documents import InputDocument, TaskRequest

LONGEST_S = 2.0
"""A twentieth of it on a quiet machine; it took four seconds and more."""
AS_LONG_AS = 80
"""Times what it takes to read those names from a request, where that is more: on a machine that is slow at everything."""

PATHS = {
    "deep": lambda number: f"{number:04}/" + "a/" * 500 + "b",
    "deep, but few enough": lambda number: f"{number:04}/" + "a/" * 100 + "b",
    "long": lambda number: "/".join([f"{number:0250}"] * 4),
    "wide letters": lambda number: f"{number:05}/" + "/".join(["\u6f22" * 80] * 4),
}


@pytest.mark.parametrize("kind", PATHS)
def test_ten_thousand_of_the_worst_names_are_checked_quickly(kind: str) -> None:
    began = thread_time()
    inputs = [
        InputDocument(path=PATHS[kind](number), sha256="0" * 64, size_bytes=1)
        for number in range(10_000)
    ]
    request = TaskRequest(command=["true"], inputs=inputs)
    read = thread_time()
    with suppress(TooLarge):
        spec_of(request)
    assert thread_time() - read < max(LONGEST_S, AS_LONG_AS * (read - began))


@pytest.mark.parametrize("names", [("a", "a/b"), ("a-b", "a/b", "A"), ("x", "a/b/c/d", "a/b")])
def test_a_file_that_is_also_a_folder_is_refused(names: tuple[str, ...]) -> None:
    inputs = [InputDocument(path=name, sha256="0" * 64, size_bytes=1) for name in names]
    with pytest.raises(GpoolError, match="is a file and also the folder of"):
        spec_of(TaskRequest(command=["true"], inputs=inputs))


def test_names_that_only_begin_alike_are_taken() -> None:
    inputs = [
        InputDocument(path=name, sha256="0" * 64, size_bytes=1)
        for name in ("a", "a.b", "a-b/c", "ab/c", "b/a")
    ]
    assert len(spec_of(TaskRequest(command=["true"], inputs=inputs)).inputs) == 5
