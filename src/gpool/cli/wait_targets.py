"""What `gpool wait` waits for: a task, or a batch as a whole. It prints nothing; whoever reads is told what ended."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpool.client.client import Client
    from gpool.client.results import Result

MOST_TOLD = 10
"""Tasks of a batch that are named when they did not succeed; of more it is said how many there are."""


@dataclass(frozen=True, slots=True)
class Ended:
    """One of the ids that were given: the code it stands for, and its document where that was asked for."""

    code: int
    document: dict[str, Any] = field(default_factory=dict)


Tell = Callable[["Result | str"], None]
Wait = Callable[[float | None, Tell], Ended]
"""Waits so long, tells what ended, and a line about it; `TimeoutError` when it has not by then."""


def is_batch(id_: str) -> bool:
    return id_.startswith("b-")


def awaited(client: Client, id_: str, *, as_json: bool) -> Wait:
    """How to wait for it; `NotFound` when there is nothing to wait for."""
    return (_batch if is_batch(id_) else _task)(client, id_, as_json)


def _task(client: Client, id_: str, as_json: bool) -> Wait:
    from gpool.client.results import exit_code

    run = client.get(id_)

    def wait(within_s: float | None, tell: Tell) -> Ended:
        result = run.wait(within_s)
        tell(result)
        return Ended(exit_code(result), run.document() if as_json else {})

    return wait


def _batch(client: Client, id_: str, as_json: bool) -> Wait:
    from gpool.client.results import exit_code

    client.batch(id_)

    def wait(within_s: float | None, tell: Tell) -> Ended:
        codes: dict[int, int] = {}  # by position, of those that did not succeed
        total = 0
        for result in client.ended(id_, within_s):
            total += 1
            if code := exit_code(result):
                codes[result.position] = code
                if len(codes) <= MOST_TOLD:
                    tell(result)
        if codes:
            tell(f"gpool: {len(codes)} of the {total} tasks of {id_} did not succeed")
        code = codes[min(codes)] if codes else 0
        return Ended(code, client.batch(id_) if as_json else {})

    return wait
