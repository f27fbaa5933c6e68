"""The standard library's own tests of executors, over a real pool.

Left out, with the reason: docs/guides/python.md lists the same.
"""

from __future__ import annotations

import importlib.util
import sys
import unittest
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from gpool import Client, Executor
from tests.tools.components import stdlib_tests

MODULES = {
    "WaitTests": "test_wait",
    "AsCompletedTests": "test_as_completed",
    "ExecutorTest": "executor",
    "ExecutorShutdownTest": "test_shutdown",
}
"""Mixins that apply to any executor, and their modules since Python 3.13."""

LEFT_OUT = {
    "test_interpreter_shutdown": "starts a process that names an executor of concurrent.futures",
    "test_submit_after_interpreter_shutdown": "the same",
    "test_hang_gh83386": "the same",
}
"""Tests of those mixins that name the standard executors in the source of another process."""

NEWER = {"test_map_buffersize": "a parameter of Python 3.14"}


@cache
def _standard() -> dict[str, type[Any]]:
    """The mixins, by name; empty without the standard library's tests."""
    file = stdlib_tests()
    if file is None:
        return {}
    name = "test.test_concurrent_futures"
    is_package = file.name == "__init__.py"
    folders = [str(file.parent)] if is_package else None
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if not is_package:
        return {mixin: getattr(module, mixin) for mixin in MODULES}
    return {
        mixin: getattr(importlib.import_module(f"{name}.{where}"), mixin)
        for mixin, where in MODULES.items()
    }


def _tests() -> list[tuple[str, str]]:
    return [
        (mixin, name)
        for mixin, found in _standard().items()
        for name in dir(found)
        if name.startswith("test_") and name not in LEFT_OUT and not name.startswith(tuple(NEWER))
    ]


@pytest.mark.parametrize(("mixin", "name"), _tests() or [("", "")], ids=lambda word: word)
def test_an_executor_passes_the_standard_library_s_tests(
    require: Callable[[str], None], sdk: Client, mixin: str, name: str
) -> None:
    require("standard library's tests")

    class Case(_standard()[mixin], unittest.TestCase):  # type: ignore[misc]
        worker_count = 5
        executor_type = staticmethod(partial(Executor, client=sdk))

        def setUp(self) -> None:
            self.executor = self.executor_type(max_workers=self.worker_count)

        def tearDown(self) -> None:
            self.executor.shutdown(wait=True)

    result = unittest.TestResult()
    Case(name).run(result)
    problems = [text for _, text in [*result.failures, *result.errors]]
    assert not problems, problems[0]
    assert result.testsRun == 1


def test_the_left_out_tests_exist(require: Callable[[str], None]) -> None:
    require("standard library's tests")
    names = {name for mixin in _standard().values() for name in dir(mixin)}
    assert set(LEFT_OUT) <= names
