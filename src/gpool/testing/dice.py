"""Random numbers of a run, all derived from one seed: branches by name, so that a draw added in one affects no other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice(random.Random):
    """A named `random.Random`; `branch` returns an independent one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)  # text is hashed by SHA-512, the same in every process
        self.name = name

    def branch(self, name: object) -> Dice:
        return Dice(f"{self.name}/{name}")

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def between(self, low: int, high: int) -> int:
        """An integer in [low, high]; plain arithmetic, cheaper than `randint`."""
        return low + int(self.random() * (high - low + 1))

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.random() * len(choices))]
