"""One task with a comparator at one tick: where hashes differ, nodes of further owners run the consumer's function.

A comparer's number is n x `NUMBERS` plus its place: it compared the answers of the siblings numbered below n. Everything
is decided anew at each tick from numbers and reports; the server decodes values as data and runs no function.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from gpool.core.errors import Invalid
from gpool.core.model import TaskStatus
from gpool.core.trust.checks import NUMBERS
from gpool.core.trust.comparison import Same
from gpool.core.trust.quorum import Disagreed, More, QuorumReached, comparers_of, decide
from gpool.core.trust.rounds import RunState
from gpool.server.store.operations.verification import siblings as operations
from gpool.server.store.operations.verification.siblings import SiblingRow, StoredAnswer
from gpool.server.verification.answers import SiblingAnswer, read_answers
from gpool.server.verification.check_values import (
    comparison_arguments,
    decoded_value,
    refuse_pickle,
    reported_pairs,
)
from gpool.server.verification.sibling_rounds import Round, compared_answer

NOT_COMPARED = "not_compared"
SHOWN_ERROR_LETTERS = 500


@dataclass(frozen=True, slots=True)
class _Report:
    """What a comparer returned. `pairs`: whether each pair of values agrees; None: it failed, for the reason `why`."""

    answer: SiblingAnswer
    pairs: tuple[bool, ...] | None
    why: str = ""


class ComparisonRound(Round):
    async def _same(self, answers: Sequence[SiblingAnswer]) -> Same | None:
        """Compare by digest, and values whose digests differ by the comparers' reports."""
        rows = self._answered()
        stored = await self._server.store.read(operations.answers([row.task_id for row in rows]))
        found: dict[bytes, SiblingRow] = {}
        pickled: set[bytes] = set()
        for row, answer in zip(rows, answers, strict=True):
            if row.status != TaskStatus.SUCCEEDED:
                continue
            if why := _why_pickled(stored[row.task_id]):
                pickled.add(answer.digest)
            else:
                found.setdefault(answer.digest, row)
        if len(pickled) > 1 and not found:
            await self._not_compared(answers, why)
            return None
        known: dict[tuple[bytes, bytes], bool] = {}
        for base in sorted({row.number // NUMBERS for row in self._comparers_answered()}):
            compared = sorted(digest for digest, row in found.items() if row.number < base)
            pairs = list(combinations(compared, 2))
            reported = await self._reported(base, len(pairs), answers, found)
            if reported is None:
                return None
            known.update(zip(pairs, reported, strict=True))
        if any(pair not in known for pair in combinations(sorted(found), 2)):
            count = comparers_of(self._parent.siblings).needed
            await self._compare(self._next_number(), count, answers, found)
            return None

        def agree(one: int, other: int) -> bool:
            first, second = sorted((answers[one].digest, answers[other].digest))
            return first == second or known.get((first, second), False)

        return agree

    def _comparers_answered(self) -> list[SiblingRow]:
        return [
            row
            for row in self._rows
            if row.number >= NUMBERS and self._runs[row.task_id].state is RunState.ANSWERED
        ]

    async def _reported(
        self,
        base: int,
        pairs: int,
        answers: Sequence[SiblingAnswer],
        found: dict[bytes, SiblingRow],
    ) -> tuple[bool, ...] | None:
        """Return what the comparers of these answers agree on; None: they do not yet, or the task has ended."""
        rows = [row for row in self._comparers_answered() if row.number // NUMBERS == base]
        reports = await self._reports(rows, pairs)
        digests = [report.answer.digest for report in reports]
        decision = decide(
            comparers_of(self._parent.siblings),
            len(reports),
            lambda one, other: digests[one] == digests[other],
        )
        match decision:
            case More(count):
                earlier = {digest: row for digest, row in found.items() if row.number < base}
                await self._compare(base, count, answers, earlier)
                return None
            case Disagreed(count):
                self._comparers += [compared_answer(one.answer, "void") for one in reports]
                await self._not_compared(answers, f"{count} nodes that compared them disagree")
                return None
            case QuorumReached(chosen, winners, _):
                wanted = reports[chosen]
                self._comparers += [
                    replace(
                        compared_answer(one.answer, "agreed" if n in winners else "differed"),
                        wanted=wanted.answer.summary,
                    )
                    for n, one in enumerate(reports)
                ]
                if wanted.pairs is None:
                    await self._not_compared(answers, wanted.why)
                return wanted.pairs

    async def _reports(self, rows: Sequence[SiblingRow], pairs: int) -> list[_Report]:
        given = await read_answers(self._server, self._parent.spec, rows)
        stored = await self._server.store.read(operations.answers([row.task_id for row in rows]))
        found = []
        for row, answer in zip(rows, given, strict=True):
            returned = stored[row.task_id]
            if row.status != TaskStatus.SUCCEEDED:
                ended = (row.reason or "").replace("_", " ")
                lines = returned.error_text.strip().splitlines() or [""]
                said = f": {lines[-1][:SHOWN_ERROR_LETTERS]}" if lines[-1] else ""
                summary = f"the comparison ended: {ended}"
                why = f"the comparator failed ({ended}){said}"
                found.append(_Report(replace(answer, summary=summary), None, why))
                continue
            reported = reported_pairs(returned.value, pairs)
            summary = f"the comparison returned {reported}"
            why = "" if reported is not None else "the comparator's node returned no comparison"
            found.append(_Report(replace(answer, summary=summary), reported, why))
        return found

    async def _compare(
        self,
        base: int,
        count: int,
        answers: Sequence[SiblingAnswer],
        found: dict[bytes, SiblingRow],
    ) -> None:
        """Start comparers of these values, in the order of their digests, if enough owners are there."""
        if len(self._candidates().owners(self._taken())) < count:
            return  # nothing is stored for them
        values: list[tuple[object, ...]] = []
        reasons: list[str] = []
        for _, row in sorted(found.items()):
            try:
                values.append((await self._value(row),))
            except Invalid as error:  # it agrees with no other value
                values.append(())
                reasons.append(error.detail)
        if not any(values):
            await self._not_compared(answers, reasons[0])
            return
        call = await asyncio.to_thread(comparison_arguments, values)
        numbers = [row.number for row in self._rows if row.number // NUMBERS == base]
        await self._start_with(call, count, 1 + max(numbers, default=base * NUMBERS - 1))

    async def _value(self, row: SiblingRow) -> object:
        [answer] = (await self._server.store.read(operations.answers([row.task_id]))).values()
        content = answer.value
        if answer.value_sha256:
            content = await self._content("value", answer.value_sha256)
        return await asyncio.to_thread(decoded_value, content)

    async def _not_compared(self, answers: Sequence[SiblingAnswer], why: str) -> None:
        text = f"its {len(answers)} answers differ and could not be compared: {why}"
        await self._refuse(answers, text, NOT_COMPARED)


def _why_pickled(answer: StoredAnswer) -> str:
    """Return why an inline value is not given to a comparator; empty: nothing is known against it."""
    if answer.value_sha256:
        return ""
    try:
        refuse_pickle(answer.value)
    except Invalid as error:
        return error.detail
    return ""
