"""Servers on one PostgreSQL database: the change feed keeps their states equal, and each serves its own nodes."""

from __future__ import annotations

import asyncio
from importlib import import_module
from pathlib import Path
from secrets import token_hex

import pytest
from pydantic import SecretStr

from gpool.core.errors import NotSignedIn
from gpool.core.ids import NodeId, TaskId, decode, encode
from gpool.core.model import Permission, Span
from gpool.server.identity.access_tokens import thumbprint
from gpool.server.identity.node_proofs import NodeAuthenticator
from gpool.server.store.operations import replicas
from gpool.server.store.operations.identity import sealed_fields
from gpool.server.store.operations.leases import leases
from gpool.server.store.operations.leases.connections import NodeLink
from gpool.transfer.node_proofs import RequestStatement, new_nonce
from gpool.wire.frames import Hold, Refused, Released, Started, Stop, StopReason
from tests.server.replicas.replica_desks import LEASE_S, ReplicaDesk, executed, replica_desks
from tests.server.server_desk import an_offer, exited
from tests.tools.nodes import a_key
from tests.tools.processes import PATIENCE_S, eventually

pytestmark = pytest.mark.anyio


async def test_the_leader_starts_a_follower_s_tasks_on_a_follower_s_node(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        agent = await follower.desk.agent()
        task = await follower.desk.command()
        assert agent.leases() == [], "a follower plans nothing"
        assert await leader.schedule() == 1
        await follower.follow()
        [lease] = agent.leases()
        await agent.report(Started(lease.task, lease.epoch))
        await agent.report(exited(lease))
        assert await leader.status(task) == "succeeded"
        await leader.follow()
        assert not leader.state.held
        assert leader.state == follower.state


async def test_a_follower_rejects_no_lease_twice_and_sends_it_once(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        agent = await follower.desk.agent()
        await leader.desk.command()
        assert await leader.schedule() == 1
        await follower.follow()
        await executed(url, "UPDATE tasks SET position = position")  # named again, nothing changed
        await follower.follow()
        assert len(agent.leases()) == 1


async def test_cancels_and_preemptions_reach_the_node_through_its_own_server(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        agent = await follower.desk.agent(offer=an_offer(cpus=1))
        task = await leader.desk.command()
        await leader.schedule()
        await follower.follow()
        [lease] = agent.leases()
        await agent.report(Started(lease.task, lease.epoch))
        answer = await leader.desk.http.delete(f"/v1/tasks/{task}")
        assert answer.status_code == 200, answer.text
        assert agent.frames(Stop) == [], "control: the leader has no connection of this node"
        await follower.follow()
        await follower.follow()
        hold = Hold(lease.task, lease.epoch)
        assert agent.frames(Stop) == [Stop((hold,), StopReason.CANCELLED)]
        await agent.report(Released(lease.task, lease.epoch))
        assert await leader.schedule() == 0
        assert not leader.state.held
        assert await leader.status(task) == "cancelled"


async def test_a_wait_ends_when_another_server_records_the_end(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        agent = await follower.desk.agent()
        task = await leader.desk.command()
        waiting = asyncio.create_task(leader.desk.get(f"/v1/tasks/{task}?wait=600"))
        await leader.schedule()
        await follower.follow()
        [lease] = agent.leases()
        await agent.report(exited(lease))
        await leader.follow()
        assert (await waiting).json()["status"] == "succeeded"


async def test_rules_and_accounts_changed_at_one_server_hold_at_the_other(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        agent = await leader.desk.agent()
        node = agent.credentials.node
        await follower.follow()
        changed = {"order": "fcfs"}
        answer = await follower.desk.http.patch("/v1/admin/policy", json=changed)
        assert answer.status_code == 200, answer.text
        await leader.follow()
        assert leader.desk.server.picture.policy.current.order == "fcfs"
        headers = await leader.desk.person("ann", Permission.PROVIDER)
        lent = await follower.desk.join(a_key(78), an_offer(), headers, name="ann's")
        await lent.connect()
        asked = await follower.desk.http.get("/v1/me", headers=headers)
        assert asked.status_code == 200
        user = asked.json()["id"]
        await leader.desk.http.patch(f"/v1/users/{user}", json={"disabled": True})
        await follower.follow()
        assert (await follower.desk.http.get("/v1/me", headers=headers)).status_code == 401
        assert lent.channel.closed, "nodes of a suspended account are disconnected everywhere"
        assert node in follower.state.nodes
        listed = encode("node", node)
        await leader.desk.http.delete(f"/v1/nodes/{listed}")
        await follower.follow()
        assert node not in follower.state.nodes


async def test_a_proof_that_one_server_accepted_is_refused_by_the_other(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        key = a_key(77)
        agent = await leader.desk.join(key, an_offer(), {}, name="alice")
        first, second = leader.desk.server.gate, follower.desk.server.gate
        token, path = first.token(agent.credentials).token, "/v1/artifacts/" + "0" * 64
        at_s = leader.desk.server.now // 1_000_000

        def proof() -> str:
            said = RequestStatement(first.name, "GET", path, token, at_s, new_nonce(), "")
            return key.request_proof(said)

        used = proof()
        assert await first.requests("GET", path, "", token, used) == agent.credentials
        with pytest.raises(NotSignedIn):
            await second.requests("GET", path, "", token, used)
        assert await second.requests("GET", path, "", token, proof()) == agent.credentials
        # control: a server that keeps used proofs to itself accepts the replay
        root = bytes.fromhex((tmp_path / "server.key").read_text())  # the first server's file
        server = follower.desk.server
        alone = NodeAuthenticator(server.store, server.clock.now, root, remember=Span(0))
        assert await alone.requests("GET", path, "", token, used) == agent.credentials


async def test_servers_with_one_master_key_and_own_folders_are_the_same_pool(
    url: str, tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    given = {
        "folders": folders,
        "master_key": SecretStr(token_hex(32)),
        "artifact_folder": tmp_path / "artifacts",
    }
    async with replica_desks(url, tmp_path, **given) as (_, (first, second)):
        assert first.desk.server.gate.name == second.desk.server.gate.name
        machine = a_key(77)
        agent = await first.desk.join(machine, an_offer(), {}, name="alice")
        issued = first.desk.server.gate.token(agent.credentials).token
        gate, thumb = second.desk.server.gate, thumbprint(machine.public)
        until = gate.good_until(issued, agent.credentials.node, thumb)
        assert until is not None, "a token of one server is valid at the other"
        stored = await second.desk.server.store.read(sealed_fields.server_secret("root"))
        assert stored is not None
        plain = bytes.fromhex((folders[0] / "server.key").read_text())
        assert plain not in stored, "it is encrypted"
        assert not (folders[1] / "server.key").exists()


# ---- leadership and terms


async def test_the_next_leader_takes_a_term_and_the_old_one_s_writes_are_refused(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (old, new)):
        agent = await new.desk.agent()
        await old.follow()
        task = TaskId(decode("task", await old.desk.command()))
        term, now, node = old.desk.server.picture.term, old.desk.server.now, agent.credentials.node
        assert term
        await old.membership.stop()  # gives up the lock; its store still writes
        await asyncio.to_thread(eventually, "it leads", lambda: leader_of(new), PATIENCE_S)
        assert await new.schedule() == 1
        assert task in new.state.held
        assert new.desk.server.picture.term > term
        write = old.desk.server.store.write
        assert (await write(leases.apply_plan((), term, now))).deposed
        expired = await write(leases.expire_silent(node, now, term, now))
        assert expired is leases.NotExpired.DEPOSED
        assert await write(replicas.bury([new.membership.id], term)) is None


async def test_a_server_takes_its_lock_again_when_only_the_session_is_lost(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path, 1) as (_, (only,)):
        await only.follow()
        term = only.desk.server.picture.term
        await executed(url, "SELECT pg_terminate_backend(CAST(lock_pid AS int)) FROM replicas")
        stale = only.desk.server.picture
        await asyncio.to_thread(eventually, "it noticed", lambda: stale.is_stale, PATIENCE_S)
        await asyncio.to_thread(eventually, "it leads", lambda: leader_of(only), PATIENCE_S)
        await only.schedule()
        assert only.desk.server.picture.term > term


async def test_a_silent_leader_s_session_is_ended_by_a_follower(url: str, tmp_path: Path) -> None:
    """As of a leader that is stopped or cut off: its session stays open, and only its row grows old."""
    async with replica_desks(url, tmp_path) as (clock, (old, new)):
        clock.advance(1)
        await old.follow()  # records the session of its lock
        await executed(url, "UPDATE replicas SET heard_at = 0 WHERE slot = 0")
        pids = "SELECT count(*) FROM replicas WHERE lock_pid IS NOT NULL"
        assert [tuple(row) for row in await executed(url, pids)]
        await asyncio.to_thread(
            eventually, "the session ended", lambda: old.desk.server.picture.is_stale, PATIENCE_S
        )
        await asyncio.to_thread(eventually, "one leads", lambda: leader_of(old, new), PATIENCE_S)


async def test_a_lock_that_no_replica_names_is_ended_by_a_follower(
    url: str, tmp_path: Path
) -> None:
    """As of a leader that drained while it was cut off: its row is gone, its session stays open."""
    async with replica_desks(url, tmp_path, replica_timeout_s=3.0) as (clock, (old, new)):
        clock.advance(1)
        await old.follow()
        await executed(url, "DELETE FROM replicas WHERE slot = 0")
        await asyncio.to_thread(
            eventually, "the session ended", lambda: old.desk.server.picture.is_stale, PATIENCE_S
        )
        await asyncio.to_thread(eventually, "one leads", lambda: leader_of(old, new), PATIENCE_S)


def leader_of(*replicas: ReplicaDesk) -> bool:
    return any(each.membership.leads for each in replicas)


# ---- heartbeats and deaths


async def test_the_leader_expires_only_nodes_that_no_server_hears(url: str, tmp_path: Path) -> None:
    async with replica_desks(url, tmp_path) as (clock, (leader, follower)):
        agent = await follower.desk.agent()
        task = await leader.desk.command()
        await leader.schedule()
        await follower.follow()
        [lease] = agent.leases()
        await agent.report(Started(lease.task, lease.epoch))
        for _ in range(10):  # heard by the follower alone, for several lease times
            clock.advance(LEASE_S / 3)
            await agent.send_beat(Hold(lease.task, lease.epoch))
            await follower.follow()
            await leader.follow()
            await leader.expire()
        assert await leader.status(task) == "running"
        for _ in range(4):  # control: it falls silent
            clock.advance(LEASE_S / 3)
            await follower.follow()
            await leader.follow()
            await leader.expire()
        assert await leader.status(task) == "queued"
        await follower.follow()
        assert agent.channel.closed, "its own server closes the connection"
        assert not leader.desk.server.nodes.is_connected(agent.credentials.node)


async def test_a_heartbeat_stored_since_the_leader_looked_delays_the_expiry_once(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (clock, (leader, follower)):
        agent = await follower.desk.agent()
        task = await leader.desk.command()
        await leader.schedule()
        clock.advance(LEASE_S / 3)
        await leader.follow()
        clock.advance(-5)  # the follower's clock may be behind
        await agent.send_beat()
        await executed(url, "UPDATE node_connections SET replica_id = NULL")  # and its server dies
        clock.advance(5 + LEASE_S + 1)
        await leader.expire()
        assert await leader.status(task) == "leased", "heard since the leader looked"
        clock.advance(LEASE_S + 1)
        await leader.expire()
        assert await leader.status(task) == "queued"


async def test_nodes_of_a_dead_server_have_a_full_lease_time_to_connect_elsewhere(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (clock, (leader, follower)):
        agent = await follower.desk.agent()
        task = await leader.desk.command()
        await leader.schedule()
        await follower.follow()
        [lease] = agent.leases()
        await agent.report(Started(lease.task, lease.epoch))
        clock.advance(LEASE_S - 1)
        await leader.follow()
        await executed(url, "UPDATE replicas SET heard_at = 0 WHERE slot = 1")  # as if killed
        clock.advance(1)
        await leader.follow()
        node = agent.credentials.node
        assert not leader.desk.server.nodes.is_connected(node)
        clock.advance(LEASE_S - 1)
        await leader.expire()
        assert await leader.status(task) == "running", "a full lease time after the death"
        again = agent.again(leader.desk.server)
        await again.connect(Hold(lease.task, lease.epoch))
        clock.advance(LEASE_S - 1)
        await leader.expire()
        await again.report(exited(lease))
        assert await leader.status(task) == "succeeded"


async def test_a_server_taken_for_dead_registers_again_and_lets_its_nodes_go(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (clock, (leader, follower)):
        agent = await follower.desk.agent()
        await executed(url, "UPDATE replicas SET heard_at = 0 WHERE slot = 1")
        clock.advance(1)
        await leader.follow()
        clock.advance(1)
        await follower.follow()
        assert agent.channel.closed
        [refused] = agent.frames(Refused)
        assert refused.retry
        again = agent.again()
        await again.connect()
        await leader.follow()
        assert leader.desk.server.nodes.is_connected(agent.credentials.node)


async def test_a_node_that_connects_to_another_server_leaves_the_first(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        agent = await follower.desk.agent()
        moved = agent.again(leader.desk.server)
        await moved.connect()
        await follower.follow()
        assert agent.channel.closed
        await agent.channel.close()
        await leader.follow()
        assert not moved.channel.closed, "the old connection's end leaves the new one's row alone"
        node = agent.credentials.node
        assert follower.desk.server.nodes.is_connected(node)
        late = agent.again(follower.desk.server)
        late.beat = agent.beat
        follower.desk.server.nodes.forget(node)  # as a server that never saw the node
        await late.connect()
        assert late.channel.closed, "a delayed Hello is refused by the stored one"
        assert not moved.channel.closed


async def test_ends_that_a_hello_implies_are_fenced_by_the_newest_connection(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        agent = await follower.desk.agent()
        task = await leader.desk.command()
        await leader.schedule()
        await follower.follow()
        [lease] = agent.leases()
        await agent.report(Started(lease.task, lease.epoch))
        old = NodeLink(follower.membership.id, "boot", 0)
        ended = [(agent.credentials.node, [exited(lease)])]
        node: NodeId = agent.credentials.node
        write = follower.desk.server.store.write
        nothing = await write(leases.record(ended, follower.desk.server.now, links={node: old}))
        assert not nothing.ended
        assert nothing.overtaken == (node,)
        restarted = agent.again()
        await restarted.connect()  # states no lease: the attempt is lost, on a follower too
        await leader.follow()
        assert await leader.status(task) == "queued"
        assert leader.state == follower.state


async def test_a_starting_server_knows_whether_another_one_runs(url: str, tmp_path: Path) -> None:
    """A running one has uploads in progress; after kill -9 only the row of a server is left."""
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        assert await follower.membership.others_running()
        await leader.membership.resign()
        assert await follower.membership.others_running(), "it drains"
        ends = (
            "SELECT pg_terminate_backend(CAST(lock_pid AS int), 60000) FROM replicas WHERE slot = 0"
        )
        await executed(url, ends)  # as with its process
        assert not await follower.membership.others_running()


# ---- the feed


async def test_a_transaction_that_commits_late_is_read_although_newer_ones_were(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        first = await leader.desk.command()
        second = await leader.desk.command()
        await follower.follow()
        late = await import_module("asyncpg").connect(url)
        try:
            open_ = late.transaction()
            await open_.start()
            number = decode("task", first)
            await late.execute("UPDATE tasks SET epoch = 7 WHERE id = $1", number)
            newer = "UPDATE tasks SET epoch = 5 WHERE id = (SELECT max(id) FROM tasks)"
            await executed(url, newer)
            await follower.follow()
            assert epoch_of(follower.state, second) == 5
            await open_.commit()
            await follower.follow()
            assert epoch_of(follower.state, first) == 7
        finally:
            await late.close()


def epoch_of(state: object, task: str) -> int:
    waiting = state.queue_of(TaskId(decode("task", task)))  # type: ignore[attr-defined]
    return int(waiting.queue.entry_of(TaskId(decode("task", task))).stamp & 0xFFFFFFFF)


async def test_postgresql_ends_the_transaction_of_a_stopped_leader(url: str) -> None:
    """Its shared lock on the term would keep the next leader waiting for as long as the process is stopped."""
    driver = import_module("gpool.server.store.drivers.postgres")
    connection = await driver.ReplicaWiring(7).connect(url)
    try:
        limit = await connection.fetchval("SHOW idle_in_transaction_session_timeout")
        assert limit == driver.IDLE_TRANSACTION
        assert await connection.fetchval("SHOW gpool.replica") == "7"
    finally:
        await connection.close()


async def test_a_server_does_not_read_its_own_changes_unless_it_asks_for_them(
    url: str, tmp_path: Path
) -> None:
    async with replica_desks(url, tmp_path) as (_, (leader, follower)):
        cursor = await leader.membership.horizon()
        await leader.desk.command()
        await follower.desk.command()
        others = await leader.membership.read(cursor, with_own=False)
        assert {each.replica_id for each in others.changes} == {follower.membership.id}
        both = await leader.membership.read(cursor, with_own=True)
        known = {leader.membership.id, follower.membership.id}
        assert {each.replica_id for each in both.changes} == known
