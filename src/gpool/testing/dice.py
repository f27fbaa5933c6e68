"""All chance of a run grows from one seed: branches by name, so that a draw added here moves nothing there."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice(random.Random):
    """A `random.Random` that knows its name; `branch` gives an independent one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)  # text is hashed by SHA-512, the same in every process
        self.name = name

    def branch(self, name: object) -> Dice:
        return Dice(f"{self.name}/{name}")

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def between(self, low: int, high: int) -> int:
        """A whole number, both ends included; plain arithmetic, cheaper than `randint`."""
        return low + int(self.random() * (high - low + 1))

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.random() * len(choices))]
