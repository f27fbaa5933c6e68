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
GPU = [("CUDA_VISIBLE_DEVICES", "GPU-1"), (forking.OWN, "1")]
LOOK = """
import ctypes, sys
from gpool.agent.runner import forking
if sys.argv[1]:
    ctypes.CDLL(sys.argv[1])
print(forking.free_parts())
"""


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({}, 8),
        ({"FREE": 80}, 0),  # a successor could find no memory
        ({"FREE": 98}, 32),
        ({"FREE": 98, "MODE": 3}, 0),  # exclusive process: a successor would be refused
        ({"GPUS": 2, "CONTEXT": 1}, 0),
        ({"CONTEXT": 0}, 0),
        ({"INITIALIZED": 0}, 8),
        (None, 8),  # CUDA was never loaded
    ],
)
def test_a_successor_starts_at_once_only_where_the_gpu_has_room_for_both(
    changed: dict[str, int] | None,
    parts: int,
    tmp_path: Path,
    require: Callable[[str], None],
) -> None:
    """The driver's library is played by a small one with its name: the real one is used by bench/gpu/warm.sh."""
    library = ""
    if changed is not None:
        require("C compiler")
        library = stub(tmp_path, **changed)

    def told(visible: str, own: str) -> int:
        variables = {"CUDA_VISIBLE_DEVICES": visible, forking.OWN: own}
        variables |= {"PYTHONPATH": os.pathsep.join(sys.path)}
        words = [sys.executable, "-c", LOOK, library]
        return int(subprocess.run(words, env=variables, stdout=subprocess.PIPE, check=True).stdout)

    assert told("GPU-1", "1") == parts
    assert told("GPU-1", "") == min(parts, 8)  # a slice: both together could exceed it
    assert told("", "1") == 0


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


def opened(library: str) -> Callable[[], int]:
    def run() -> int:
        import ctypes  # noqa: PLC0415 - inside, where it runs

        ctypes.CDLL(library)
        return os.getpid()

    return run


def state_of(pid: int, until_gone: bool) -> str:
    """The state letter of a process, as /proc has it; empty if it has ended, for which it waits if told so."""
    while True:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except (FileNotFoundError, ProcessLookupError):
            return ""
        letter = text.rpartition(")")[2].split()[0]
        if letter == "Z" or not until_gone:
            return letter.replace("Z", "")
        os.sched_yield()


def looks(pid: int) -> Callable[[bool], str]:
    def run(until_gone: bool) -> str:
        return state_of(pid, until_gone)

    return run


def stub(folder: Path, **changed: int) -> str:
    compiler = shutil.which("cc")
    assert compiler is not None
    (folder / "stub.c").write_text(STUB)
    library = str(folder / "libcuda.so.1")
    words = [f"-D{name}={value}" for name, value in (PLAIN | changed).items()]
    named = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library]
    subprocess.run([compiler, *words, *named, str(folder / "stub.c")], check=True)
    return library


def test_a_process_with_little_gpu_memory_is_dismissed_after_its_successor_has_answered(
    tmp_path: Path, require: Callable[[str], None]
) -> None:
    """Its release of the GPU would delay the successor's start."""
    require("C compiler")
    library = stub(tmp_path, FREE=98)

    async def work(runtime: Any) -> list[str]:
        calling = await caller(runtime, preload=["wave"], env=GPU)
        try:
            first = pickle.loads((await calling.call(opened(library))).value)
            look = looks(first)
            answers = [await calling.call(look, False), await calling.call(look, True)]
            return [pickle.loads(answer.value) for answer in answers]
        finally:
            await calling.runner.remove()

    beside, later = using("process", tmp_path / "data", work)
    assert (beside != "", later) == (True, "")


@pytest.mark.parametrize("free", [98, 90])
def test_a_predecessor_on_the_gpu_ends_while_its_successor_still_works(
    tmp_path: Path, require: Callable[[str], None], free: int
) -> None:
    """With little GPU memory after a second, with more at once: the successor may want all of it."""
    require("C compiler")
    library = stub(tmp_path, FREE=free)

    async def work(runtime: Any) -> str:
        calling = await caller(runtime, preload=["wave"], env=GPU)
        try:
            first = pickle.loads((await calling.call(opened(library))).value)
            return str(pickle.loads((await calling.call(looks(first), True)).value))
        finally:
            await calling.runner.remove()

    assert using("process", tmp_path / "data", work) == ""
