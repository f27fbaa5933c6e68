"""Values for tests, whole and plausible: name only what the test is about."""

from __future__ import annotations

from gpool.core.ids import UserId
from gpool.core.model import GIB, Gpu, Instant, Offer, Permission, Requirements, TaskKind, TaskSpec
from gpool.server.store.values import User
from gpool.testing.clock import MORNING


def an_offer(*, cpus: int = 4, gpus: int = 0, gpu_gib: int = 24, python: str = "3.11") -> Offer:
    """A machine with so many processors and simulated GPUs."""
    devices = (
        Gpu(index, f"sim-{index}", "RTX4090", "nvidia", gpu_gib * GIB, simulated=True)
        for index in range(gpus)
    )
    return Offer(cpus * 1000, cpus * 4 * GIB, 100 * GIB, tuple(devices), frozenset({python}))


def a_command(*words: str, requirements: Requirements | None = None, retries: int = 0) -> TaskSpec:
    command = words or ("true",)
    needs = requirements or Requirements()
    return TaskSpec(TaskKind.COMMAND, command[0], needs, command=command, retries=retries)


def a_function(sha256: str = "f" * 64, *, python: str = "3.11") -> TaskSpec:
    return TaskSpec(
        TaskKind.FUNCTION, "function", Requirements(python=python), function_sha256=sha256
    )


def a_user(number: int = 1, *permissions: Permission, at: Instant = MORNING) -> User:
    allowed = frozenset(permissions or (Permission.CONSUMER,))
    return User(UserId(number), f"user-{number}", allowed, at)
