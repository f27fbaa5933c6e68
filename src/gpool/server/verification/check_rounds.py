"""One task with `verify="check"` at one tick: a worker runs it, other owners' nodes run the consumer's check function.

The attempts are read from the numbers of the siblings (`core.trust.checks.NUMBERS`) and decided anew at each tick.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from gpool.core.errors import Invalid
from gpool.core.model import TaskStatus
from gpool.core.trust import checks
from gpool.core.trust.checks import (
    NUMBERS,
    CheckedAttempt,
    FailureConfirmed,
    NoneRight,
    ResultPassed,
    StartChecks,
    StartWorker,
)
from gpool.core.trust.rounds import RunState
from gpool.server.store.operations.verification import siblings as operations
from gpool.server.store.operations.verification.siblings import SiblingRow, StoredAnswer
from gpool.server.store.operations.verification.verdicts import ComparedAnswer, Verdict
from gpool.server.verification.answers import SiblingAnswer, read_answers
from gpool.server.verification.check_values import check_arguments, refuse_pickle
from gpool.server.verification.sibling_rounds import Round, compared_answer
from gpool.wire.values import DATA

PASSED = b"\x01T"
"""Value of a check that returned true, as a runner encodes it."""


@dataclass(frozen=True, slots=True)
class WorkerAttempt:
    """A worker that answered and its checks that answered."""

    number: int
    worker: SiblingAnswer
    checks: tuple[SiblingAnswer, ...]
    state: CheckedAttempt
    why: str = ""  # its value cannot be checked


class CheckRound(Round):
    async def _decide(self) -> None:
        attempts = await self._attempts()
        match checks.next_step([one.state for one in attempts]):
            case StartWorker():
                last = max((row.number // NUMBERS for row in self._rows), default=-1)
                await self._start(1, (last + 1) * NUMBERS)
            case StartChecks(index, count):
                await self._start_checks(attempts[index], count)
            case ResultPassed(index):
                compared = [part for one in attempts for part in _parts(one)]
                await self._end(compared, attempts[index].worker)
            case FailureConfirmed(first, second):
                agreed = [compared_answer(attempts[n].worker, "agreed") for n in (first, second)]
                others = [
                    compared_answer(answer, "void")
                    for number, one in enumerate(attempts)
                    if number not in (first, second)
                    for answer in (one.worker, *one.checks)
                ]
                await self._end([*agreed, *others], attempts[second].worker)
            case NoneRight():
                answers = [answer for one in attempts for answer in (one.worker, *one.checks)]
                why = next((f": {one.why}" for one in attempts if one.why), "")
                text = f"none of its {len(attempts)} results passed its check{why}"
                await self._refuse(answers, text)

    async def _attempts(self) -> list[WorkerAttempt]:
        rows = [r for r in self._rows if self._runs[r.task_id].state is RunState.ANSWERED]
        answers = await read_answers(self._server, replace(self._parent.spec, tolerance=None), rows)
        stored = await self._server.store.read(operations.answers([row.task_id for row in rows]))
        can_start = bool(self._candidates().owners(self._taken()))  # else the task waits anyway
        found: list[WorkerAttempt] = []
        for row, worker in zip(rows, answers, strict=True):
            if row.number % NUMBERS:
                continue
            number = row.number // NUMBERS
            parts = [
                (other, answer)
                for other, answer in zip(rows, answers, strict=True)
                if other.number // NUMBERS == number and other.number % NUMBERS
            ]
            passed = tuple(
                other.status == TaskStatus.SUCCEEDED and stored[other.task_id].value == PASSED
                for other, _ in parts
            )
            given = tuple(
                replace(answer, summary=f"the check returned {is_passed}")
                for (_, answer), is_passed in zip(parts, passed, strict=True)
            )
            why, failure = "", None
            if row.status != TaskStatus.SUCCEEDED:
                failure = worker.digest
            elif not passed and (can_start or _is_pickle(stored[row.task_id])):
                why = await self._why_not(row)
            state = CheckedAttempt(passed, failure, not why)
            found.append(WorkerAttempt(number, worker, given, state, why))
        return found

    async def _why_not(self, row: SiblingRow) -> str:
        """Return why a worker's value cannot be given to a check; empty: it can."""
        try:
            await self._call(row)
        except Invalid as error:
            return error.detail
        return ""

    async def _call(self, row: SiblingRow) -> bytes:
        store, parent = self._server.store, self._parent.task_id
        [answer] = (await store.read(operations.answers([row.task_id]))).values()
        payload, payload_sha256 = await store.read(operations.arguments_of(parent))
        if answer.value_sha256:
            value = await self._content("value", answer.value_sha256)
        else:
            value = answer.value
        refuse_pickle(value)
        if payload_sha256:
            payload = await self._content("argument", payload_sha256)
        return await asyncio.to_thread(check_arguments, value, payload)

    async def _start_checks(self, attempt: WorkerAttempt, count: int) -> None:
        if len(self._candidates().owners(self._taken())) < count:
            return  # too few owners just now: nothing is stored for them
        [row] = [one for one in self._rows if one.task_id == attempt.worker.task]
        call = await self._call(row)
        numbers = [one.number for one in self._rows if one.number // NUMBERS == attempt.number]
        await self._start_with(call, count, max(numbers) + 1)

    async def _end(self, compared: list[ComparedAnswer], accepted: SiblingAnswer) -> None:
        environment = self._parent.spec.environment
        keys = {one.node: (one.model, environment) for one in self._candidates().capable}
        await self._write(Verdict(self._parent.task_id, compared, accepted.task, keys=keys))


def _is_pickle(answer: StoredAnswer) -> bool:
    return not answer.value_sha256 and not answer.value.startswith(DATA)


def _parts(attempt: WorkerAttempt) -> list[ComparedAnswer]:
    """Return the part of each sibling of an attempt in the verdict of an accepted result."""
    worker, states = checks.states_of(attempt.state)
    own = replace(
        compared_answer(attempt.worker, worker), wanted="a value that passes the consumer's check"
    )
    right = f"the check returned {attempt.state.is_right}"
    others = [
        replace(compared_answer(answer, state), wanted=right)
        for answer, state in zip(attempt.checks, states, strict=True)
    ]
    return [own, *others]
