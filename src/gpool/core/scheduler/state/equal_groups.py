"""Which of many have the same: those get one number, so that what holds of one need not be found out of all. It knows no nodes."""

from __future__ import annotations

from collections.abc import Hashable


class EqualGroups:
    """A number for each place, equal where the values are. There are never more numbers than places."""

    __slots__ = ("_counts", "_numbers", "_unused", "_values")

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._values: dict[int, Hashable] = {}  # by place
        self._counts: list[int] = []  # by number
        self._unused: list[int] = []

    def set(self, place: int, value: Hashable) -> int:
        """Its number from now on."""
        self.remove(place)
        number = self._numbers.get(value)
        if number is None:
            if self._unused:
                number = self._unused.pop()
            else:
                number = len(self._counts)
                self._counts.append(0)
            self._numbers[value] = number
        self._counts[number] += 1
        self._values[place] = value
        return number

    def remove(self, place: int) -> None:
        if place in self._values:
            value = self._values.pop(place)
            number = self._numbers[value]
            self._counts[number] -= 1
            if not self._counts[number]:
                del self._numbers[value]
                self._unused.append(number)
