"""Targets of `gpool wait`: a task or a batch. Prints nothing; results go to a callback."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpool.client.client import Client
    from gpool.client.results import Result

MOST_REPORTED = 10
"""Failed tasks of a batch that are reported one by one; the total is reported for all."""


@dataclass(frozen=True, slots=True)
class WaitOutcome:
    code: int
    document: dict[str, Any] = field(default_factory=dict)


Report = Callable[["Result | str"], None]
Wait = Callable[[float | None, Report], WaitOutcome]
"""Wait at most so many seconds; `TimeoutError` if the target has not ended."""


def is_batch(id_: str) -> bool:
    return id_.startswith("b-")


def awaited(client: Client, id_: str, *, as_json: bool) -> Wait:
    """`NotFound` if the id is unknown."""
    return (_batch if is_batch(id_) else _task)(client, id_, as_json)


def _task(client: Client, id_: str, as_json: bool) -> Wait:
    from gpool.client.results import exit_code

    run = client.get(id_)

    def wait(within_s: float | None, report: Report) -> WaitOutcome:
        result = run.wait(within_s)
        report(result)
        return WaitOutcome(exit_code(result), run.document() if as_json else {})

    return wait


def _batch(client: Client, id_: str, as_json: bool) -> Wait:
    from gpool.client.results import exit_code

    client.batch(id_)

    def wait(within_s: float | None, report: Report) -> WaitOutcome:
        codes: dict[int, int] = {}  # by position, of those that did not succeed
        total = 0
        for result in client.ended(id_, within_s):
            total += 1
            if code := exit_code(result):
                codes[result.position] = code
                if len(codes) <= MOST_REPORTED:
                    report(result)
        if codes:
            report(f"gpool: {len(codes)} of the {total} tasks of {id_} did not succeed")
        code = codes[min(codes)] if codes else 0
        return WaitOutcome(code, client.batch(id_) if as_json else {})

    return wait
