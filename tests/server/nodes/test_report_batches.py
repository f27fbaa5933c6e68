"""Reports that come while one is written are written together, folded before anybody is answered, and none is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gpool.core.errors import InternalFault, Unreachable
from gpool.core.ids import NodeId, SpecId, TaskId, UserId
from gpool.core.model import KIB, EndReason, Instant, Span, TaskStatus
from gpool.server.nodes.reports import ReportBatches
from gpool.server.store.protocol import is_brief
from gpool.server.store.values import BatchResult, Recording, Requeued
from gpool.wire.frames import Finished, Hold

pytestmark = pytest.mark.anyio
NOW = Instant(5)


class Sender:
    """A connection without replicas."""

    def __init__(self, node: int) -> None:
        self.node, self.closed, self.link = NodeId(node), False, None


class Writer:
    """A store whose commits take as long as the test likes."""

    def __init__(self) -> None:
        self.writes: list[tuple[Any, asyncio.Future[Any]]] = []
        self.folded: list[Recording] = []

    async def write(self, operation: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.writes.append((operation, answer))
        return await answer

    def commit(self, place: int, value: Any) -> None:
        self.writes[place][1].set_result(value)


def an_end(task: int) -> list[Finished]:
    return [Finished(task, 1, EndReason.RETURNED)]


async def soon() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_that_meets_nobody_is_written_at_once_by_itself() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    asked = asyncio.create_task(recorder.record(Sender(1), an_end(7), NOW))
    await soon()
    assert is_brief(writer.writes[0][0])
    done = Recording(refused=((NodeId(1), Hold(7, 1)),))
    writer.commit(0, done)
    assert await asked == (Hold(7, 1),)
    assert writer.folded == [done]


async def test_those_that_come_meanwhile_are_one_write_and_each_gets_its_own_answer() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    asked = [asyncio.create_task(recorder.record(Sender(n), an_end(n), NOW)) for n in range(1, 6)]
    await soon()
    assert len(writer.writes) == 1
    writer.commit(0, Recording())
    await soon()
    assert len(writer.writes) == 2
    assert asked[0].done()
    assert not any(each.done() for each in asked[1:]), "nobody is answered before the commit"
    done = Recording(started=(2,), refused=((NodeId(4), Hold(4, 1)),))
    writer.commit(1, done)
    answers = await asyncio.gather(*asked)
    assert answers == [(), (), (), (Hold(4, 1),), ()]
    assert writer.folded[1:] == [done]


def a_result(task: int) -> BatchResult:
    return BatchResult(
        1,
        0,
        TaskId(task),
        TaskStatus.SUCCEEDED,
        EndReason.RETURNED,
        None,
        b"",
        "",
        "",
        None,
        None,
        None,
        False,
    )


class Waiting:
    """A request that waits for one task and looks, when it answers, at what was folded by then."""

    def __init__(self, recorder: ReportBatches, folded: list[Recording], task: int) -> None:
        self.folded_before: int | None = None
        self._woken = asyncio.Event()
        self._folded = folded
        self._results = recorder.awaited.expect([task], self._woken.set)
        self.answering = asyncio.create_task(self._answer())

    async def _answer(self) -> None:
        await self._woken.wait()
        assert self._results
        self.folded_before = len(self._folded)


async def test_a_request_that_waits_for_a_result_is_answered_before_it_is_folded() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    request = Waiting(recorder, writer.folded, 7)
    asked = asyncio.create_task(recorder.record(Sender(1), an_end(7), NOW))
    await soon()
    assert request.folded_before is None, "nobody is answered before the commit"
    writer.commit(0, Recording(released=(TaskId(7),), results=(a_result(7),)))
    assert await asked == ()
    assert request.folded_before == 0
    assert len(writer.folded) == 1, "the node is answered after the fold"


async def test_what_may_be_planned_again_is_folded_before_any_request_is_answered() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    request = Waiting(recorder, writer.folded, 7)
    asked = asyncio.create_task(recorder.record(Sender(1), an_end(7), NOW))
    await soon()
    again = Requeued(
        TaskId(8), 1, SpecId(1), UserId(1), NOW, EndReason.LOST, Span(0), NodeId(1), None
    )
    writer.commit(0, Recording(requeued=(again,), results=(a_result(7),)))
    await asked
    await request.answering
    assert request.folded_before == 1


async def test_a_report_whose_channel_ends_after_its_commit_is_folded_once() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    asked = asyncio.create_task(recorder.record(Sender(1), an_end(7), NOW))
    recorder.awaited.expect([7], asked.cancel)
    await soon()
    writer.commit(0, Recording(released=(TaskId(7),), results=(a_result(7),)))
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert len(writer.folded) == 1


async def test_a_failed_commit_is_told_to_all_of_them_and_the_next_goes_on() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    asked = [asyncio.create_task(recorder.record(Sender(n), an_end(n), NOW)) for n in range(1, 4)]
    await soon()
    writer.commit(0, Recording())
    await soon()
    writer.writes[1][1].set_exception(Unreachable("the disk is full"))
    told = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in told] == [tuple, Unreachable, Unreachable]
    assert len(writer.folded) == 1
    again = asyncio.create_task(recorder.record(Sender(9), an_end(9), NOW))
    await soon()
    writer.commit(2, Recording())
    assert await again == ()


async def test_a_frame_that_cannot_be_written_never_fails_the_others() -> None:
    folded: list[Recording] = []
    held = asyncio.Event()

    async def write(operation: Any) -> Any:
        await held.wait()
        (relation,) = next(operation).relations.values()
        said = [row[0] for row in relation.rows]
        if 13 in said:
            raise InternalFault("the database refused: a NUL")
        return Recording(released=tuple(said))

    recorder = ReportBatches(write, folded.append)
    asked = [asyncio.create_task(recorder.record(Sender(n), an_end(n), NOW)) for n in range(9, 18)]
    await soon()
    held.set()
    told = await asyncio.gather(*asked, return_exceptions=True)
    assert [n for n, each in enumerate(told, 9) if each != ()] == [13]
    assert isinstance(told[4], InternalFault)
    assert sorted(task for each in folded for task in each.released) == [
        n for n in range(9, 18) if n != 13
    ]


async def test_an_agent_that_goes_away_meanwhile_holds_up_nobody() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    first, gone, other = [
        asyncio.create_task(recorder.record(Sender(n), an_end(n), NOW)) for n in (1, 2, 3)
    ]
    await soon()
    first.cancel()
    gone.cancel()
    await soon()
    together = Recording(released=(2, 3))
    writer.commit(1, together)
    assert await other == ()
    assert writer.folded == [together], "what the one that is gone reported is folded too"


async def test_beats_that_come_meanwhile_are_one_write_and_each_gets_its_own_answer() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    holds = [Hold(7, 1)]
    asked = [asyncio.create_task(recorder.beat(NodeId(n), holds, NOW)) for n in range(1, 5)]
    await soon()
    assert len(writer.writes) == 1
    writer.commit(0, [()])
    await soon()
    assert [each.done() for each in asked] == [True, False, False, False]
    (beats,) = next(writer.writes[1][0]).relations.values()
    assert [row[0] for row in beats.rows] == [2, 3, 4]
    writer.commit(1, [(), (Hold(7, 1),), ()])
    assert await asyncio.gather(*asked) == [(), (), (Hold(7, 1),), ()]
    assert writer.folded == []


async def test_beats_do_not_wait_for_reports() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    report = asyncio.create_task(recorder.record(Sender(1), an_end(7), NOW))
    beat = asyncio.create_task(recorder.beat(NodeId(1), (), NOW))
    await soon()
    assert len(writer.writes) == 2
    writer.commit(1, [()])
    assert await beat == ()
    writer.commit(0, Recording())
    await report


async def test_a_fold_that_fails_is_told_to_those_it_was_for_and_to_nobody_else() -> None:
    held = asyncio.Event()

    def absorb(recording: Recording) -> None:
        if 11 in recording.released:
            raise LookupError("what was committed cannot be folded")

    async def write(operation: Any) -> Any:
        await held.wait()
        (relation,) = next(operation).relations.values()
        said = [row[0] for row in relation.rows]
        if len(said) > 2:
            raise InternalFault("the database refused")
        return Recording(released=tuple(said))

    recorder = ReportBatches(write, absorb)
    asked = [asyncio.create_task(recorder.record(Sender(n), an_end(n), NOW)) for n in range(9, 14)]
    await soon()
    held.set()
    told = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(each) for each in told] == [tuple, LookupError, LookupError, tuple, tuple]


async def test_frames_full_of_results_are_written_by_themselves() -> None:
    """Those of some hundred nodes together would be more than PostgreSQL takes in one statement."""
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    full = [Finished(task, 1, EndReason.RETURNED, value=bytes(64 * KIB)) for task in range(5)]
    asked = [asyncio.create_task(recorder.record(Sender(n), full, NOW)) for n in range(1, 4)]
    await soon()
    assert len(writer.writes) == 3
    for place in range(3):
        writer.commit(place, Recording())
    assert await asyncio.gather(*asked) == [()] * 3
    assert len(writer.folded) == 3


async def test_a_frame_of_a_replaced_connection_is_not_written() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    replaced, open_ = Sender(2), Sender(3)
    first = asyncio.create_task(recorder.record(Sender(1), an_end(7), NOW))
    await soon()
    late = asyncio.create_task(recorder.record(replaced, an_end(8), NOW))
    control = asyncio.create_task(recorder.record(open_, an_end(9), NOW))
    await soon()
    replaced.closed = True  # its node says Hello on another connection, while the frame waits
    writer.commit(0, Recording())
    await soon()
    writer.commit(1, Recording())
    assert await asyncio.gather(first, late, control) == [(), None, ()]


async def test_a_frame_that_another_replica_has_overtaken_is_not_answered_as_recorded() -> None:
    writer = Writer()
    recorder = ReportBatches(writer.write, writer.folded.append)
    asked = asyncio.create_task(recorder.record(Sender(1), an_end(7), NOW))
    await soon()
    writer.commit(0, Recording(overtaken=(NodeId(1),)))
    assert await asked is None
