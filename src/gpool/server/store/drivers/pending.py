"""What both drivers share: an answer that may be an error, and who is waiting for it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from gpool.core.errors import GpoolError
from gpool.server.store.protocol import Operation, Statement

MAX_GROUP = 256
"""Operations in one commit; bounds how long the first of them waits for the last."""


class RefusedLate(Exception):
    """An operation refused after it had written. Its group is rolled back, so that what it wrote does not stay."""

    def __init__(self, refusal: GpoolError) -> None:
        super().__init__(refusal.detail)
        self.refusal = refusal


def writes(statement: Statement) -> bool:
    return not statement.sql.startswith("SELECT")


@dataclass(slots=True)
class Waiting:
    """An operation in the writer's or a reader's queue, and later its answer."""

    operation: Operation[Any]
    future: asyncio.Future[Any]
    value: Any = None
    error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        self.value, self.error = None, error

    def answer(self) -> None:
        """In the loop's thread only. The asker may have gone meanwhile; what was committed stays committed."""
        if self.future.done():
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


def answer_all(answered: list[Waiting]) -> None:
    for waiting in answered:
        waiting.answer()
