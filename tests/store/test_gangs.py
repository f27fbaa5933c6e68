"""Gangs in the store: granted whole or not at all, heard of member by member, ended once."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest

from gpool.core.errors import Conflict
from gpool.core.gangs import GangOrder
from gpool.core.ids import TaskId
from gpool.core.model import (
    Availability,
    EndReason,
    Engine,
    InputFile,
    OnLoss,
    OutputFile,
    Phase,
    Slice,
    TaskStatus,
)
from gpool.core.scheduler.state.events import GangPart, LeaseGrant, Placement
from gpool.core.scheduler.state.waiting import shape_of
from gpool.server.store.operations import gpus, nodes
from gpool.server.store.operations.identity import teams
from gpool.server.store.operations.leases import grants, leases
from gpool.server.store.operations.tasks import artifacts, progress, tasks
from gpool.server.store.protocol import Operation, again, operation
from gpool.server.store.sealing import CIPHER
from gpool.server.store.values import Recording
from gpool.wire.frames import (
    Checkpointed,
    Finished,
    HandedBack,
    Hold,
    LogChunk,
    Progressed,
    Reached,
    Released,
    Started,
)
from tests.store.gang_pool import Site, gang_spec, site_of
from tests.store.store_pool import CPU, Pool, exited, race

A = "a" * 64


@pytest.fixture
def site(pool: Pool) -> Site:
    return site_of(pool)


def status(site: Site, task: TaskId) -> TaskStatus:
    return site.pool.view(task).row.status


def members(site: Site, task: TaskId) -> list[str]:
    return [member.status for member in site.pool.view(task).members]


def holds_nothing(site: Site, task: TaskId) -> bool:
    picture = site.pool.read(leases.picture())
    return not picture.gangs and not site.pool.view(task).row.holding


# ---- grants


def test_a_gang_is_leased_to_all_of_its_nodes(site: Site) -> None:
    spec = gang_spec(3)
    (task,) = site.pool.submit(spec=spec)
    applied = site.apply(site.place(task, spec), gang_secrets={task: b"sealed"})
    (line,) = applied.lines
    assert line.meeting.peers == (("10.0.0.1", 47000), ("10.0.0.2", 47001), ("10.0.0.3", 47002))
    assert status(site, task) is TaskStatus.LEASED
    assert [site.held(rank) for rank in range(3)] == [(Hold(task, 1),)] * 3
    view = site.pool.view(task)
    assert [member.node for member in view.members] == site.nodes
    assert view.row.node == site.nodes[0]
    assert members(site, task) == ["leased"] * 3


def test_a_member_that_asks_is_told_its_rank_its_peers_and_the_secret(site: Site) -> None:
    task = site.gang()
    (lease,) = site.pool.read(leases.held(site.nodes[1]))
    assert lease.gang is not None
    assert (lease.gang.rank, lease.gang.secret_sealed) == (1, b"sealed")
    assert lease.gang.meeting.peers == (("10.0.0.1", 47000), ("10.0.0.2", 47001))
    assert lease.allocation.number == 1
    assert (lease.task, lease.status, lease.gang.call) == (task, TaskStatus.LEASED, None)


def refuse_removed(site: Site, task: TaskId) -> None:
    assert site.pool.write(nodes.remove_node(site.nodes[1], None))


def refuse_paused(site: Site, task: TaskId) -> None:
    node, now = site.nodes[1], site.pool.now()
    site.pool.write(nodes.set_availability(node, None, Availability.PAUSED, now))


def refuse_cancelled(site: Site, task: TaskId) -> None:
    site.pool.cancel(task)


def refuse_overtaken(site: Site, task: TaskId) -> None:
    site.lease(task, gang_spec())
    site.pool.expire(site.nodes[0])
    site.pool.expire(site.nodes[1])


@pytest.mark.parametrize(
    "meanwhile", [refuse_removed, refuse_paused, refuse_cancelled, refuse_overtaken]
)
def test_a_gang_that_cannot_have_one_of_its_nodes_gets_none(site: Site, meanwhile: object) -> None:
    spec = gang_spec()
    (task,) = site.pool.submit(spec=spec)
    place = site.place(task, spec)
    meanwhile(site, task)  # type: ignore[operator]
    before = status(site, task)
    assert site.apply(place).lines == ()
    assert status(site, task) is before
    assert site.held(0) == site.held(1) == ()
    assert site.pool.read(leases.picture()).gangs == ()


def gang_on_gpus(pool: Pool) -> tuple[TaskId, Placement]:
    """Two nodes of a site with a GPU each, and a gang for both."""
    spec = gang_spec()
    (task,) = pool.submit(spec=spec)
    one, other = site_of(pool, 2, gpus=1).nodes
    whole = replace(CPU, slices=(Slice(0, 80 << 30, 1000),))
    shape = shape_of(spec, pool.ann)
    return task, Placement(one, whole, shape, (LeaseGrant(task, 1),), (GangPart(other, whole),))


def test_a_gang_on_a_flagged_gpu_of_one_node_is_refused_whole(pool: Pool) -> None:
    task, place = gang_on_gpus(pool)
    pool.write(gpus.keep_back(place.members[0].node, ["n1-0"], "waits"))
    assert pool.write(leases.apply_plan([place], pool.term, pool.now())).lines == ()
    assert pool.view(task).row.status is TaskStatus.QUEUED


@pytest.mark.parametrize("change", [{"site": "attic"}, {"address": ""}, {"gang_port": 0}])
def test_a_gang_whose_nodes_do_not_meet_any_more_is_refused_whole(
    site: Site, change: dict[str, Any]
) -> None:
    spec = gang_spec()
    (task,) = site.pool.submit(spec=spec)
    row = site.pool.read(nodes.node(site.nodes[1]))
    assert row is not None
    moved = replace(row.node.offer, **change)
    site.pool.write(nodes.greet(site.nodes[1], moved, (), site.pool.now()))
    assert site.apply(site.place(task, spec)).lines == ()
    assert status(site, task) is TaskStatus.QUEUED


def test_a_place_that_is_not_the_whole_gang_is_never_written(site: Site) -> None:
    spec = gang_spec(3)
    (task,) = site.pool.submit(spec=spec)
    two = site.place(task, gang_spec(2))
    short = replace(two, shape=shape_of(spec, site.pool.ann))
    alone = replace(short, members=())
    twice = site.place(task, spec, on=[site.nodes[0], site.nodes[1], site.nodes[0]])
    assert site.apply(short, alone, twice).lines == ()
    assert status(site, task) is TaskStatus.QUEUED


def test_two_plans_that_race_for_a_gang_leave_one_whole(site: Site) -> None:
    spec = gang_spec()
    (task,) = site.pool.submit(spec=spec)
    places = [site.place(task, spec, on=list(on)) for on in permutations(site.nodes, 2)]
    plans = [leases.apply_plan([each], site.pool.term, site.pool.now()) for each in places]
    applied = race(site.pool.database, plans)
    assert sum(len(each.lines) for each in applied) == 1
    (gang,) = site.pool.read(leases.picture()).gangs
    (line,) = [line for each in applied for line in each.lines]
    assert (gang.node, gang.members) == (line.place.node, line.place.members)


# ---- ends


@pytest.mark.parametrize("order", list(permutations(range(3))))
def test_a_gang_ends_with_its_last_member_in_whatever_order(
    site: Site, order: tuple[int, ...]
) -> None:
    task = site.running(gang_spec(3))
    for rank in order[:-1]:
        done = site.ends(rank, task)
        assert (done.ended, done.released, done.to_stop) == ((), (), ())
    assert status(site, task) is TaskStatus.RUNNING
    done = site.ends(order[-1], task)
    assert [(each.task, each.status) for each in done.ended] == [(task, TaskStatus.SUCCEEDED)]
    assert done.released == (task,)
    assert holds_nothing(site, task)
    assert site.pool.view(task).row.exit_code == 0


def test_it_runs_when_rank_0_does(site: Site) -> None:
    task = site.gang()
    site.say(1, Started(task, 1))
    assert status(site, task) is TaskStatus.LEASED
    assert members(site, task) == ["leased", "running"]
    assert site.say(0, Started(task, 1)).started == (task,)
    assert status(site, task) is TaskStatus.RUNNING


def test_the_first_failure_stops_the_others_and_is_told(site: Site) -> None:
    task = site.running(gang_spec(3))
    site.ends(0, task)
    done = site.ends(2, task, 7)
    assert done.to_stop == ((site.nodes[1], Hold(task, 1)),)
    assert done.released == ()
    done = site.say(1, Released(task, 1))
    assert [each.status for each in done.ended] == [TaskStatus.FAILED]
    row = site.pool.view(task).row
    assert (row.reason, row.exit_code) == (EndReason.EXITED, 7)
    assert row.error_text == "rank 2: exited with code 7"
    assert holds_nothing(site, task)


@pytest.mark.parametrize(
    "reason",
    [
        EndReason.TIMED_OUT,
        EndReason.OUT_OF_MEMORY,
        EndReason.BAD_INPUT,
        EndReason.BAD_OUTPUT,
    ],
)
def test_what_one_member_fails_of_the_gang_does(site: Site, reason: EndReason) -> None:
    task = site.gang()
    done = site.say(1, Finished(task, 1, reason, error_text="because"))
    assert done.to_stop == ((site.nodes[0], Hold(task, 1)),)
    site.say(0, Released(task, 1))
    row = site.pool.view(task).row
    assert (row.status, row.reason, row.tries) == (TaskStatus.FAILED, reason, 1)
    assert row.error_text == "rank 1: because"


def test_a_failure_is_tried_again_as_often_as_asked(site: Site) -> None:
    spec = gang_spec(retries=1)
    task = site.running(spec)
    site.ends(1, task, 1)
    done = site.say(0, Released(task, 1))
    assert [(each.task, each.reason) for each in done.requeued] == [(task, EndReason.EXITED)]
    assert site.pool.view(task).row.tries == 1
    site.lease(task, spec, 2)
    site.ends(1, task, 1, epoch=2)
    site.say(0, Released(task, 2))
    assert status(site, task) is TaskStatus.FAILED


def test_a_lost_member_takes_the_gang_back_to_the_queue(site: Site) -> None:
    spec = gang_spec()
    task = site.running(spec)
    done = site.pool.expire(site.nodes[1])
    assert done.to_preempt == ((site.nodes[0], Hold(task, 1)),)
    assert (done.requeued, done.released) == ((), ())
    saved = Finished(task, 1, EndReason.PREEMPTED)
    done = site.say(0, saved)
    assert [(each.task, each.epoch, each.reason) for each in done.requeued] == [
        (task, 1, EndReason.LOST)
    ]
    assert done.released == (task,)
    story = site.pool.read(tasks.story(task, None))
    assert story is not None
    (attempt,) = story.attempts
    assert (attempt.node, attempt.reason) == (site.nodes[1], EndReason.LOST)
    assert "rank 1" in attempt.detail
    assert site.pool.view(task).row.losses == 1
    assert site.pool.view(task).members == ()
    site.lease(task, spec, 2)
    assert site.say(0, saved).refused == (Hold(task, 1),)
    site.ends(0, task, epoch=2)
    site.ends(1, task, epoch=2)
    assert status(site, task) is TaskStatus.SUCCEEDED


def test_peers_that_fail_before_the_loss_is_noticed_are_not_blamed(site: Site) -> None:
    task = site.running()
    site.ends(0, task, 1)
    done = site.pool.expire(site.nodes[1])
    assert [each.reason for each in done.requeued] == [EndReason.LOST]
    assert site.pool.view(task).row.tries == 0


def test_a_gang_that_asks_to_end_with_a_member_says_so(site: Site) -> None:
    task = site.running(gang_spec(on_loss=OnLoss.END))
    done = site.pool.expire(site.nodes[1])
    assert done.to_stop == ((site.nodes[0], Hold(task, 1)),)
    site.say(0, Released(task, 1))
    row = site.pool.view(task).row
    assert (row.status, row.reason) == (TaskStatus.FAILED, EndReason.LOST)
    assert row.error_text == (
        "rank 1 was lost with its node; the task asks to end then (on_loss=end)"
    )


def test_three_nodes_lost_under_a_gang_are_enough(site: Site) -> None:
    spec = gang_spec(3)
    task = site.running(spec)
    for epoch in (1, 2, 3):
        if epoch > 1:
            site.lease(task, spec, epoch)
            for rank in range(3):
                site.say(rank, Started(task, epoch))
        lost = epoch - 1
        site.pool.expire(site.nodes[lost])
        for rank in {0, 1, 2} - {lost}:
            site.say(rank, Finished(task, epoch, EndReason.PREEMPTED))
    row = site.pool.view(task).row
    assert (row.status, row.reason, row.losses) == (TaskStatus.FAILED, EndReason.LOSES_NODES, 3)


def test_all_members_lost_at_once_are_one_loss(site: Site) -> None:
    task = site.running()
    site.pool.expire(site.nodes[0])
    assert site.pool.expire(site.nodes[1]).released == (task,)
    row = site.pool.view(task).row
    assert (row.status, row.losses) == (TaskStatus.QUEUED, 1)


def test_a_member_handed_back_takes_the_gang_back(site: Site) -> None:
    task = site.gang()
    done = site.say(1, HandedBack(task, 1))
    assert done.to_preempt == ((site.nodes[0], Hold(task, 1)),)
    done = site.say(0, HandedBack(task, 1))
    assert [each.reason for each in done.requeued] == [EndReason.HANDED_BACK]
    assert holds_nothing(site, task)


def test_of_a_cluster_rank_0_decides(site: Site) -> None:
    task = site.running(gang_spec(3, engine=Engine.RAY))
    assert site.ends(1, task, 1).to_stop == ()
    done = site.ends(0, task)
    assert done.to_stop == ((site.nodes[2], Hold(task, 1)),)
    site.say(2, Released(task, 1))
    assert status(site, task) is TaskStatus.SUCCEEDED


# ---- cancel and preempt


def test_a_cancelled_gang_holds_on_until_its_last_member_confirms(site: Site) -> None:
    task = site.running(gang_spec(3))
    site.ends(2, task)
    done = site.pool.cancel(task)
    assert done.to_stop == ((site.nodes[0], Hold(task, 1)), (site.nodes[1], Hold(task, 1)))
    assert site.say(0, Released(task, 1)).released == ()
    (lease,) = site.pool.read(leases.held(site.nodes[1]))
    assert lease.status is TaskStatus.CANCELLED
    assert site.pool.expire(site.nodes[1]).released == (task,)
    assert status(site, task) is TaskStatus.CANCELLED
    assert holds_nothing(site, task)


def test_all_members_are_asked_to_make_room_and_then_it_waits_again(site: Site) -> None:
    task = site.running()
    done = site.pool.write(grants.preempt([task], site.pool.now()))
    assert done.to_preempt == tuple((node, Hold(task, 1)) for node in site.nodes[:2])
    assert done.noted == (task,)
    assert site.pool.read(leases.picture()).preempting == (task,)
    (lease,) = site.pool.read(leases.held(site.nodes[0]))
    assert lease.gang is not None
    assert lease.gang.call is GangOrder.BACK
    assert site.say(1, Finished(task, 1, EndReason.PREEMPTED)).to_preempt == ()
    done = site.ends(0, task, 1)  # its peer was gone
    assert [each.reason for each in done.requeued] == [EndReason.PREEMPTED]
    assert site.pool.view(task).row.tries == 0


def test_a_gang_that_stops_already_is_not_asked_to_make_room(site: Site) -> None:
    task = site.running()
    site.ends(1, task, 1)
    hold = [Hold(task, 1)]
    asked = grants.preempt_if_current(hold, site.pool.term, site.pool.now())
    assert site.pool.write(asked) == Recording()
    site.say(0, Released(task, 1))
    assert status(site, task) is TaskStatus.FAILED


def test_a_member_that_connects_late_is_told_what_was_called(site: Site) -> None:
    task = site.running(gang_spec(3))
    site.ends(1, task, 1)
    (lease,) = site.pool.read(leases.held(site.nodes[0]))
    assert lease.status is TaskStatus.CANCELLED
    back = site.running(gang_spec(2))
    site.pool.expire(site.nodes[1])
    held = {each.task: each for each in site.pool.read(leases.held(site.nodes[0]))}
    assert held[back].status is TaskStatus.RUNNING
    assert held[back].gang is not None
    assert held[back].gang.call is GangOrder.BACK
    assert held[task].status is TaskStatus.CANCELLED


# ---- fences


def test_what_an_old_epoch_or_another_node_says_is_refused(site: Site) -> None:
    spec = gang_spec()
    task = site.running(spec)
    site.pool.expire(site.nodes[0])
    site.pool.expire(site.nodes[1])
    site.lease(task, spec, 2)
    for rank in (0, 1):
        for item in (Started(task, 1), Finished(task, 1, EndReason.EXITED, 0)):
            assert site.say(rank, item).refused == (Hold(task, 1),)
    assert site.say(2, Finished(task, 2, EndReason.EXITED, 0)).refused == (Hold(task, 2),)
    assert members(site, task) == ["leased", "leased"]


def test_an_end_said_again_is_taken_in_silence(site: Site) -> None:
    task = site.running()
    assert site.ends(1, task).refused == ()
    assert site.ends(1, task, 5).refused == ()
    site.ends(0, task)
    assert site.ends(1, task).refused == site.ends(0, task).refused == ()
    assert status(site, task) is TaskStatus.SUCCEEDED


def test_a_node_is_told_to_drop_what_is_not_its_own_any_more(site: Site) -> None:
    task = site.running()
    hold = Hold(task, 1)
    assert site.pool.beats((site.nodes[1], [hold]), (site.nodes[2], [hold])) == [(), (hold,)]
    site.pool.expire(site.nodes[1])
    assert site.pool.beats((site.nodes[1], [hold])) == [(hold,)]


def test_a_node_that_has_a_member_cannot_be_removed(site: Site) -> None:
    task = site.running()
    with pytest.raises(Conflict):
        site.pool.write(nodes.remove_node(site.nodes[1], None))
    site.ends(1, task)
    assert site.pool.write(nodes.remove_node(site.nodes[1], None))


# ---- what it leaves


def test_every_member_reads_the_inputs_and_only_rank_0_writes(site: Site) -> None:
    task = site.running()
    for rank, allowed in ((0, True), (1, False)):
        node = site.nodes[rank]
        owner = site.pool.read(artifacts.upload_owner(node, task, 1))
        assert (owner is not None) is allowed
        add = artifacts.add_artifact(A, 10, None, node, (task, 1), site.pool.now())
        assert site.pool.write(add) is allowed
    assert site.pool.read(artifacts.upload_owner(site.nodes[0], task, 2)) is None


def test_an_input_is_seen_by_the_nodes_of_a_gang_alone(site: Site) -> None:

    site.pool.write(artifacts.add_artifact(A, 10, site.pool.ann, None, None, site.pool.now()))
    task = site.running(replace(gang_spec(), inputs=(InputFile("in", A, 10),)))
    seen = [site.pool.read(artifacts.visible_to_node(A, node)) for node in site.nodes]
    assert seen == [10, 10, None]
    site.ends(1, task)
    assert site.pool.read(artifacts.visible_to_node(A, site.nodes[1], task)) is None


def test_outputs_are_rank_0s_and_wait_for_the_others(site: Site) -> None:
    task = site.running()
    add = artifacts.add_artifact(A, 10, None, site.nodes[0], (task, 1), site.pool.now())
    assert site.pool.write(add)
    output = OutputFile("model", A, 10)
    site.say(0, Finished(task, 1, EndReason.EXITED, 0, outputs=(output,)))
    assert site.pool.read(artifacts.unreferenced(site.pool.now(), 10)) == ()
    other = OutputFile("other", "b" * 64, 10)
    site.say(1, Finished(task, 1, EndReason.EXITED, 0, outputs=(other,)))
    assert site.pool.view(task).outputs == (output,)
    assert site.pool.read(artifacts.visible(A, site.pool.ann)) == 10


def test_outputs_of_an_attempt_that_counts_for_nothing_go(site: Site) -> None:
    task = site.running()
    add = artifacts.add_artifact(A, 10, None, site.nodes[0], (task, 1), site.pool.now())
    assert site.pool.write(add)
    output = OutputFile("model", A, 10)
    site.say(0, Finished(task, 1, EndReason.EXITED, 0, outputs=(output,)))
    site.pool.expire(site.nodes[1])
    assert site.pool.view(task).outputs == ()
    assert site.pool.read(artifacts.unreferenced(site.pool.now(), 10)) == (A,)


def test_phases_progress_and_checkpoints_are_rank_0s(site: Site) -> None:
    task = site.gang(gang_spec(checkpoint="state/"))
    site.say(1, Reached(task, 1, Phase.BUILD))
    assert site.pool.view(task).note is None
    site.say(0, Reached(task, 1, Phase.FETCH))
    assert site.pool.view(task).note == "fetch"
    add = artifacts.add_artifact(A, 10, None, site.nodes[0], (task, 1), site.pool.now())
    assert site.pool.write(add)
    site.say(1, Progressed(task, 1, 500_000, "rank 1"))
    assert site.pool.view(task).record.progress is None
    site.say(0, Progressed(task, 1, 400_000, "rank 0"))
    assert (site.pool.view(task).record.progress or "").endswith("rank 0")
    saved = Checkpointed(task, 1, (OutputFile("state/w", A, 10),))
    assert site.say(1, saved).unusable == (Hold(task, 1),)
    assert site.pool.view(task).checkpoint is None
    assert site.say(0, saved).unusable == ()
    assert site.pool.view(task).checkpoint is not None


def test_output_of_all_ranks_is_kept_apart_and_marked(site: Site) -> None:
    task = site.running()

    def chunk(sequence: int, data: bytes, stream: int = 1) -> LogChunk:
        return LogChunk(task, 1, sequence, stream, data)

    assert site.say(0, chunk(0, b"zero\n")).logged == (task,)
    site.say(1, chunk(0, b"one\nand "), chunk(1, b"err\n", 2))
    site.say(0, chunk(1, b"more\n"))
    site.say(1, chunk(0, b"one\nand "), chunk(1, b"err\n", 2))  # said again
    site.say(1, chunk(2, b"a half\nlast"), Finished(task, 1, EndReason.EXITED, 0))
    lines = site.pool.read(progress.logs(task, 0, 100))
    assert [(line.stream, line.data) for line in lines] == [
        (1, b"zero\n"),
        (1, b"[1] one\n[1] and "),
        (2, b"[1] err\n"),
        (1, b"more\n"),
        (1, b"a half\n[1] last"),
    ]
    assert [line.cursor for line in lines] == sorted({line.cursor for line in lines})


def test_a_gang_counts_for_its_user_on_every_node(pool: Pool) -> None:
    _, place = gang_on_gpus(pool)
    assert pool.write(leases.apply_plan([place], pool.term, pool.now())).lines
    assert pool.read(teams.usage_of("user", pool.ann)).running_gpu_milli == 2000


def test_a_task_of_one_node_never_pays_for_gangs(pool: Pool) -> None:
    """Its statements are those of before, in number and in what they touch."""
    node = pool.node("box")
    (task,) = pool.submit()
    asked = [
        *_asked(pool, leases.apply_plan([pool.place(node, [task])], pool.term, pool.now())),
        *_asked(pool, leases.record([(node, [Started(task, 1)])], pool.now())),
        *_asked(pool, leases.record([(node, [LogChunk(task, 1, 0, 1, b"x")])], pool.now())),
        *_asked(pool, leases.record([(node, [exited(task, code=0)])], pool.now())),
    ]
    assert pool.view(task).row.status is TaskStatus.SUCCEEDED
    assert len(asked) == 3 + 2 + 7 + 4  # two of seven charge the output to its owner
    assert not [sql for sql in asked if "members" in sql or "gangs" in sql]


def _asked(pool: Pool, done: Operation[Any]) -> list[str]:
    """Runs the operation, and gives its statements."""
    asked: list[str] = []

    @operation
    def spied() -> Operation[None]:
        rows: Any = None
        steps = again(done)
        try:
            while True:
                statement = steps.send(rows)
                if statement is not CIPHER:  # the driver answers it itself
                    asked.append(statement.sql)
                rows = yield statement
        except StopIteration:
            return

    pool.write(spied())
    return asked


# ---- races


@pytest.mark.parametrize("code", [0, 1])
def test_members_that_end_at_once_at_several_replicas_end_it_once(site: Site, code: int) -> None:
    for _ in range(5):
        task = site.running(gang_spec(3))
        end = Finished(task, 1, EndReason.EXITED, code)
        reports = [leases.record([(node, [end])], site.pool.now()) for node in site.nodes]
        reports.append(leases.expire(site.nodes[0], site.pool.now()))
        reports.append(tasks.cancel([task], None, site.pool.now()))
        done = race(site.pool.database, reports)
        assert sum(each.released.count(task) for each in done) == 1
        assert sum(len(each.ended) + len(each.requeued) for each in done) >= 1
        assert holds_nothing(site, task)
        if status(site, task) is TaskStatus.QUEUED:
            site.pool.cancel(task)
