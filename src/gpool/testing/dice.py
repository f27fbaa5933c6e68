"""Random numbers from one seed: a draw added in one named branch affects no other."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


class Dice(random.Random):
    def __init__(self, name: str) -> None:
        super().__init__(name)  # text is hashed by SHA-512, the same in every process
        self.name = name

    def branch(self, name: object) -> Dice:
        return Dice(f"{self.name}/{name}")

    def chance(self, probability: float) -> bool:
        return self.random() < probability

    def between(self, low: int, high: int) -> int:
        return low + int(self.random() * (high - low + 1))

    def pick(self, choices: Sequence[T]) -> T:
        return choices[int(self.random() * len(choices))]
