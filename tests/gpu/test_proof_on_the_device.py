"""The kernels on a real device against their reference, and a whole trial in small.

Each in a process of its own: who has once begun with CUDA holds the card until it ends, and MIG cannot be switched.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest

from gpool.agent.gpu_verification.cuda import Device, measure
from gpool.agent.gpu_verification.prover import DeviceProver
from gpool.core.gpu_verification import GpuVerdict, Size, keys_of
from gpool.server.nodes.gpu_checks import Claimed, check_openings
from tests.tools.gpu_prover import NumpyProver

pytestmark = pytest.mark.gpu
SIZE = Size(3, 256, 1088)
KEYS = keys_of(b"s" * 32, 7, "GPU-a", 1)


def apart(work: Callable[[], None]) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as one:
        one.submit(work).result()


def test_device_and_reference_never_differ(require: Callable[[str], None]) -> None:
    require("gpu")
    apart(device_and_reference_agree)


def device_and_reference_agree() -> None:
    with Device() as device:
        here, there = DeviceProver(device, SIZE, KEYS), NumpyProver(SIZE, KEYS)
        root = here.commit()
        assert root == there.commit()
        answer = here.answer(b"n" * 32, root, 3)
        assert answer == there.answer(b"n" * 32, root, 3)
        openings = here.open([5, 40, 0])
        assert openings == there.open([5, 40, 0])
        claimed = Claimed(SIZE, KEYS, b"n" * 32, root, answer)
        assert check_openings(claimed, [5, 40, 0], openings, b"d") is GpuVerdict.PASSED


def test_every_rate_is_measured(require: Callable[[str], None]) -> None:
    require("gpu")
    apart(rates_are_as_they_must)


def rates_are_as_they_must() -> None:
    with Device() as device:
        measured = measure(device)
    assert measured.fp32_gigaflops > 100
    assert measured.int8_gigaops > measured.fp32_gigaflops
    assert measured.memory_bytes_per_s > measured.host_bytes_per_s > 10**8
