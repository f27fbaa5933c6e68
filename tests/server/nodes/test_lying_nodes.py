"""Nodes that lie: about what they lend, how attempts ended and how long they took. None of it may harm anybody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from gpool.core.ids import TaskId
from gpool.core.model import (
    EndReason,
    Gpu,
    GpuDetails,
    Offer,
    RuntimeOffer,
    Sharing,
    SliceProfile,
    Span,
    Tier,
)
from gpool.server.nodes.reports import (
    MAX_ERROR_LETTERS,
    MAX_ITEMS,
    checked_report,
    offer_problem,
)
from gpool.server.scheduling.delivery import lines_on
from gpool.server.store.operations.leases.finished import LATE, plausible_duration
from gpool.server.store.operations.tasks import progress
from gpool.wire.frames import (
    PROTOCOL,
    Finished,
    Hello,
    Lease,
    LogChunk,
    Progressed,
    Recorded,
    Refused,
    Started,
)
from tests.server.server_desk import Agent, Desk, an_offer

pytestmark = pytest.mark.anyio

GIB = 1024**3
HOUR = 3600 * 1_000_000
H200 = (
    SliceProfile("1g.18gb", 16 * GIB, 1, 1, (0, 1, 2, 3, 4, 5, 6)),
    SliceProfile("3g.71gb", 70 * GIB, 3, 4, (0, 4)),
    SliceProfile("7g.141gb", 140 * GIB, 7, 8, (0,)),
)


def cut(*profiles: SliceProfile) -> Offer:
    offer = an_offer(gpus=1)
    return replace(offer, gpus=(replace(offer.gpus[0], sharing=Sharing.MIG, profiles=profiles),))


def detailed(**lies: object) -> Offer:
    offer = an_offer(gpus=1)
    details = replace(GpuDetails(), **lies)  # type: ignore[arg-type]
    return replace(offer, gpus=(replace(offer.gpus[0], details=details),))


def profile(**lies: object) -> Offer:
    return cut(replace(H200[0], **lies))  # type: ignore[arg-type]


LIES: dict[str, Offer] = {
    "a slice that takes a billion places": profile(size=1 << 30),
    "one that takes none": profile(size=0),
    "one that begins before the first place": profile(starts=(-1,)),
    "one that ends behind the last": profile(size=2, starts=(15,)),
    "one without memory": profile(memory_bytes=0),
    "one with more memory than there is": profile(memory_bytes=1 << 63),
    "one without compute": profile(compute=0),
    "one with endless starts": profile(starts=(0,) * 17),
    "one without a name": profile(name=""),
    "two of one name": cut(H200[0], replace(H200[1], name=H200[0].name)),
    "too many": cut(*(replace(H200[0], name=str(number)) for number in range(33))),
    "endless links": detailed(links=((1, 1),) * 1025),
    "endless paths": detailed(near=((1, 0),) * 1025),
    "a hundred thousand runtimes": replace(
        an_offer(), runtimes=(RuntimeOffer("bubblewrap", Tier.CONTAINER),) * 100_000
    ),
    "a runtime with an endless name": replace(
        an_offer(), runtimes=(RuntimeOffer("x" * 101, Tier.CONTAINER),)
    ),
    "endless gang links": replace(
        an_offer(), gang_links=frozenset(str(number) for number in range(11))
    ),
    "a gang link with an endless name": replace(an_offer(), gang_links=frozenset({"x" * 31})),
    "too many labels": replace(
        an_offer(), labels=frozenset(f"label{number}" for number in range(51))
    ),
    "more than is kept": replace(
        an_offer(),
        gpus=tuple(
            Gpu(
                number,
                f"{number:0199}",
                "M" * 200,
                "V" * 200,
                GIB,
                closed="c" * 300,
                ails="a" * 300,
            )
            for number in range(1024)
        ),
    ),
}


@pytest.mark.parametrize("lie", LIES)
async def test_an_offer_that_no_machine_makes_is_refused(desk: Desk, lie: str) -> None:
    agent = await desk.agent("liar", LIES[lie])
    [refused] = agent.frames(Refused)
    assert (refused.code, refused.retry) == ("invalid", False)
    assert desk.server.picture.state.nodes.keys() <= {agent.credentials.node}
    assert await desk.schedule() == 0


async def test_a_boot_that_is_a_book_is_not_remembered(desk: Desk) -> None:
    agent = await desk.node()
    await agent.channel.receive(Hello(PROTOCOL, "b" * 201, agent.offer, 1, ()))
    assert isinstance(agent.sent[-1], Refused)
    assert desk.server.nodes.newest_heartbeat(agent.credentials.node) is None


def test_a_real_card_cut_into_slices_and_a_node_of_64_gpus_are_taken() -> None:
    """64 is the default of `max_gpus_per_node`: a node cannot claim a thousand GPUs by its own word."""
    assert offer_problem(cut(*H200)) is None
    many = tuple(
        Gpu(number, f"GPU-{number:036}", "NVIDIA H200", "nvidia", 141 * GIB) for number in range(65)
    )
    assert offer_problem(replace(an_offer(), gpus=many[:64])) is None
    assert offer_problem(replace(an_offer(), gpus=many)) is not None


async def leased(desk: Desk, agent: Agent, **members: object) -> tuple[str, Lease]:
    name = await desk.command(**members)
    assert await desk.schedule() == 1
    return name, agent.leases()[-1]


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.LOSES_NODES])
async def test_a_node_does_not_end_a_task_that_has_tries_left_by_a_word_that_is_not_its_own(
    desk: Desk, reason: EndReason
) -> None:
    agent = await desk.agent()
    name, lease = await leased(desk, agent, retries=1)
    await agent.report(Started(lease.task, lease.epoch))
    await agent.report(Finished(lease.task, lease.epoch, reason))
    told = (await desk.get(f"/v1/tasks/{name}")).json()
    assert (told["status"], told["tries"]) == ("queued", 1)
    assert await desk.schedule() == 1
    lease = agent.leases()[-1]
    await agent.report(Finished(lease.task, lease.epoch, reason))
    told = (await desk.get(f"/v1/tasks/{name}")).json()
    assert (told["status"], told["reason"]) == ("failed", "bad_output")
    assert "which only the server may" in told["error_text"]


async def test_what_really_was_cancelled_is_let_go_of_by_any_word(desk: Desk) -> None:
    agent = await desk.agent()
    name, lease = await leased(desk, agent)
    await desk.http.delete(f"/v1/tasks/{name}")
    await agent.report(Finished(lease.task, lease.epoch, EndReason.CANCELLED))
    assert (await desk.get(f"/v1/tasks/{name}")).json()["status"] == "cancelled"
    assert not list(lines_on(desk.server.picture.state, agent.credentials.node))


async def test_an_endless_error_text_is_kept_in_part(desk: Desk) -> None:
    agent = await desk.agent()
    name, lease = await leased(desk, agent)
    said = "x" * 7_000_000
    end = Finished(lease.task, lease.epoch, EndReason.EXITED, 1, error_text=said, duration_us=5)
    await agent.report(end)
    told = (await desk.get(f"/v1/tasks/{name}")).json()
    assert told["error_text"] == "x" * MAX_ERROR_LETTERS


async def test_a_frame_of_more_reports_than_any_agent_sends_is_refused(desk: Desk) -> None:
    agent = await desk.agent()
    assert isinstance(await agent.report(*[Started(1, 1)] * MAX_ITEMS), Recorded)
    last = await agent.report(*[Started(1, 1)] * (MAX_ITEMS + 1))
    assert isinstance(last, Refused)
    assert last.code == "too_large"


async def test_output_in_crumbs_takes_no_more_room_than_other_output(desk: Desk) -> None:
    agent = await desk.agent()
    _, lease = await leased(desk, agent)
    task = TaskId(lease.task)
    await agent.report(*(LogChunk(task, 1, number, 1, b"") for number in range(1000)))
    assert await desk.server.store.read(progress.logs(task, 0, 10)) == ()
    await agent.report(LogChunk(task, 1, 1000, 1, b"x" * (progress.MAX_LOG_BYTES - 160)))
    await agent.report(*(LogChunk(task, 1, number, 1, b"y") for number in range(1001, 1100)))
    kept = await desk.server.store.read(progress.logs(task, 0, 200))
    assert [line.data for line in kept[1:]] == [b"y"] * 10 + [progress.TRUNCATED]


async def told_to_last(
    desk: Desk, ran_s: float, claimed: int, *, said: Callable[[Lease], bool] = bool
) -> Span | None:
    """What such tasks are expected to take after three of them."""
    agent = await desk.agent()
    for _ in range(3):
        _, lease = await leased(desk, agent, name="mine")
        if said(lease):
            await agent.report(Started(lease.task, lease.epoch))
        desk.clock.advance(ran_s)
        end = Finished(lease.task, lease.epoch, EndReason.EXITED, 0, duration_us=claimed)
        await agent.report(end)
    await desk.command(name="mine")
    state = desk.server.picture.state
    [shape] = state.shapes
    return state.predictions.of(shape)


async def test_a_task_is_not_expected_to_take_longer_than_its_lease_did(desk: Desk) -> None:
    assert await told_to_last(desk, 10, 1 << 52) == 10_000_000


async def test_a_long_task_is_not_taken_for_a_short_one_at_its_nodes_word(desk: Desk) -> None:
    assert await told_to_last(desk, 3600, 1) == (HOUR - LATE) // 2


async def test_what_a_node_says_within_reason_is_believed(desk: Desk) -> None:
    assert await told_to_last(desk, 10, 7_000_000) == 7_000_000


async def test_of_a_start_that_was_not_told_nothing_is_known(desk: Desk) -> None:
    assert await told_to_last(desk, 10, 1000, said=lambda lease: lease.task < 0) == 1000


def test_what_was_not_measured_stays_so_and_a_clock_set_back_gives_nothing_below_zero() -> None:
    assert plausible_duration(0, 0, 0, 100) == 0  # type: ignore[arg-type]
    assert plausible_duration(50, 200, 200, 100) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lie", "kept"),
    [
        (Progressed(1, 1, -(1 << 60), "x"), Progressed(1, 1, 0, "x")),
        (Progressed(1, 1, 1 << 60, "x" * 100_000), Progressed(1, 1, 1_000_000, "x" * 200)),
        (
            Progressed(1, 1, 5, "\0\x1b[2J\u202e\n"),
            Progressed(1, 1, 5, "\ufffd\ufffd[2J\ufffd\ufffd"),
        ),
    ],
)
def test_progress_is_kept_within_limits(lie: Progressed, kept: Progressed) -> None:
    assert checked_report(lie) == kept
