"""The process of a function that used a GPU, and its successor: the second waits for the first only where both do not fit."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from gpool.agent.runner import forking
from tests.tools.runtimes import caller, using

cloudpickle.register_pickle_by_value(sys.modules[__name__])
STUB = """
#include <stddef.h>
int cuDeviceGetCount(int *count) { *count = GPUS; return INITIALIZED ? 0 : 3; }
int cuCtxGetDevice(int *device) { *device = 0; return CONTEXT ? 0 : 201; }
int cuDeviceGetAttribute(int *value, int which, int device) { *value = which == 20 ? MODE : 0; return device; }
int cuMemGetInfo_v2(size_t *free, size_t *total) { *free = FREE; *total = 100; return 0; }
"""
PLAIN = {"GPUS": 1, "INITIALIZED": 1, "CONTEXT": 1, "MODE": 0, "FREE": 90}
LOOK = """
import ctypes, sys
from gpool.agent.runner import forking
if sys.argv[1]:
    ctypes.CDLL(sys.argv[1])
print(forking.leaves_room())
"""


@pytest.mark.parametrize(
    ("changed", "room"),
    [
        ({}, True),
        ({"FREE": 80}, False),  # a successor could find no memory
        ({"MODE": 3}, False),  # exclusive process: a successor would be refused
        ({"GPUS": 2, "CONTEXT": 1}, False),
        ({"CONTEXT": 0}, False),
        ({"INITIALIZED": 0}, True),
        (None, True),  # CUDA was never loaded
    ],
)
def test_a_successor_starts_at_once_only_where_the_gpu_has_room_for_both(
    changed: dict[str, int] | None,
    room: bool,
    tmp_path: Path,
    require: Callable[[str], None],
) -> None:
    """The driver's library is played by a small one with its name: the real one is used by bench/gpu/warm.sh."""
    library = ""
    if changed is not None:
        require("C compiler")
        compiler = shutil.which("cc")
        assert compiler is not None
        (tmp_path / "stub.c").write_text(STUB)
        library = str(tmp_path / "libcuda.so.1")
        words = [f"-D{name}={value}" for name, value in (PLAIN | changed).items()]
        named = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library]
        subprocess.run([compiler, *words, *named, str(tmp_path / "stub.c")], check=True)

    def told(visible: str) -> bytes:
        variables = {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_VISIBLE_DEVICES": visible}
        words = [sys.executable, "-c", LOOK, library]
        return subprocess.run(words, env=variables, stdout=subprocess.PIPE, check=True).stdout

    assert told("GPU-1") == f"{room}\n".encode()
    assert told("") == b"False\n"


def numbered(number: int) -> Callable[[], tuple[int, int]]:
    def run() -> tuple[int, int]:
        with open(f"/proc/{os.getppid()}/task/{os.getppid()}/children") as listing:
            return number, len(listing.read().split())

    return run


def test_a_dismissed_process_that_leaves_room_is_reaped_while_its_successor_runs(
    tmp_path: Path,
) -> None:
    functions = 4 * forking.MOST_CHILDREN

    async def work(runtime: Any) -> list[tuple[int, int]]:
        calling = await caller(runtime, preload=["wave"], env=[("CUDA_VISIBLE_DEVICES", "GPU-1")])
        try:
            answers = [await calling.call(numbered(at)) for at in range(functions)]
        finally:
            await calling.runner.remove()
        return [pickle.loads(answer.value) for answer in answers]

    found = using("bubblewrap", tmp_path, work)
    assert [number for number, _ in found] == list(range(functions))
    # those kept, and at most those that are still ending: were none reaped, all would be there
    assert found[-1][1] < functions
