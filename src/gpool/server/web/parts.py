"""Parts of pages: a part that the visitor may not see, or that fails, is left out; the rest of the page is shown."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Generic, TypeVar

from gpool.core.errors import GpoolError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Part(Generic[T]):
    """`value` None: `missing` says why."""

    value: T | None
    missing: str = ""


async def part(reading: Awaitable[T]) -> Part[T]:
    try:
        return Part(await reading)
    except GpoolError as error:
        return Part(None, error.detail)
