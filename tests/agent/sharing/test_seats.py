"""Tenancies: one after another on a card, clean between users, the card set back at the end; strangers never together."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpool.agent.app import new_loop
from gpool.agent.machine.nvml import GpuProcess
from gpool.agent.runtime.bubblewrap.launcher_client import Launcher
from gpool.agent.runtime.protocol import GpuShare, PartFailed, SandboxFailed
from gpool.agent.services import GpuSharing
from gpool.agent.sharing import memory, modes
from gpool.agent.sharing.memory import Watchdog, Watched
from gpool.agent.sharing.plan import Abilities, MpsLimits, profiles_of
from gpool.agent.sharing.shares import GpuShares
from gpool.core.model import GIB, Gpu, Sharing, Slice
from gpool.testing.fake_nvml import H200_PROFILES, FakeNvml, h200
from gpool.testing.fake_runtime import FakeRun, FakeRuntime
from tests.tools.processes import alive

SCRUBBER = ("python3", "-I", "-c", memory.SCRIPT.read_text())
CLEAN = FakeRun(((1, b'{"free": 1000, "scrubbed": 998, "wrong": 0}\n'),))
DIRTY = FakeRun(((1, b'{"free": 1000, "scrubbed": 998, "wrong": 2}\n'),))
WHOLE = Slice(0, 140 * GIB, 1000)
PART = Slice(0, 6 * GIB, 42)
CUT = (Slice(0, 16 * GIB, 142, "1g.18gb", 6), Slice(0, 16 * GIB, 142, "1g.18gb", 5))


class House:
    """Seats over a fake card; the scrubber's runs are counted."""

    def __init__(
        self, folder: Path, sharing: Sharing, run: FakeRun = CLEAN, free_within_s: float = 60
    ) -> None:
        self.nvml = FakeNvml(h200())
        self.nvml.open()
        self.uuid = self.nvml.uuids()[0]
        self.runtime = FakeRuntime(folder, {SCRUBBER: run})
        self.scrubs: list[GpuShare | None] = []
        start = self.runtime.start_command

        async def counted(job):  # type: ignore[no-untyped-def]
            self.scrubs.append(job.gpu_share)
            return await start(job)

        self.runtime.start_command = counted  # type: ignore[method-assign]
        program = folder / "mps"
        program.write_text(
            f"#!{sys.executable}\n" + Path(__file__).with_name("mps_stand_in.py").read_text()
        )
        program.chmod(0o755)
        self.folder = folder
        self.launcher = Launcher(place="", binds=(), seccomp=b"")
        self.records = modes.Records(folder / "cards")
        self.seats = GpuShares(
            self.nvml,
            self.runtime,
            self.records,
            mps=modes.MpsPrograms(str(program), "", self.launcher, folder / "pipes"),
            nodes_of=lambda *numbers: tuple(f"/dev/cap{number}" for number in numbers),
            linger_s=3600,
            free_within_s=free_within_s,
        )
        profiles = profiles_of(H200_PROFILES)
        self.seats.use_gpus(
            [Gpu(0, self.uuid, "H200", "nvidia", 140 * GIB, sharing=sharing, profiles=profiles)]
        )


@pytest.fixture
def walkable() -> Iterator[Path]:
    """A directory that any uid reaches; pytest's own are ours alone."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


Play = Callable[[House], Awaitable[None]]


def play(
    folder: Path, sharing: Sharing, what: Play, run: FakeRun = CLEAN, free_within_s: float = 60
) -> House:
    async def all_of_it() -> House:
        house = House(folder, sharing, run, free_within_s)
        before = modes.record(house.nvml, house.uuid)
        await house.seats.start()
        try:
            await what(house)
        finally:
            await house.seats.close()
        assert modes.record(house.nvml, house.uuid) == before
        assert house.seats.tenancies == frozenset()
        assert {uuid for uuid, _ in house.records.left()} == set(house.seats.unclean)
        return house

    with asyncio.Runner(loop_factory=new_loop) as runner:  # the agent's own, which forks otherwise
        return runner.run(all_of_it())


def test_a_whole_gpu_is_seen_by_its_uuid_and_cleaned_before_a_stranger_comes(
    tmp_path: Path,
) -> None:
    async def two_users(house: House) -> None:
        for _ in range(2):
            async with house.seats.seat(1, [WHOLE]) as seat:
                assert seat is not None
                assert ("CUDA_VISIBLE_DEVICES", house.uuid) in seat.variables
                assert house.scrubs == []
        async with house.seats.seat(2, [WHOLE]):
            assert len(house.scrubs) == 1

    house = play(tmp_path, Sharing.EXCLUSIVE, two_users)
    assert len(house.scrubs) == 2


def test_a_card_that_could_not_be_cleaned_takes_nobody_and_says_why(tmp_path: Path) -> None:
    async def two_users(house: House) -> None:
        async with house.seats.seat(1, [WHOLE]):
            pass
        with pytest.raises(PartFailed, match="2 samples"):
            async with house.seats.seat(2, [WHOLE]):
                pytest.fail("a stranger got memory that was not clean")
        sharing = GpuSharing(house.nvml, house.seats, Abilities(True, True, True), None)
        (gpu,) = sharing.describe([Gpu(0, house.uuid, "H200", "nvidia", 140 * GIB)])
        assert "2 samples" in gpu.closed

    play(tmp_path, Sharing.EXCLUSIVE, two_users, DIRTY)


def test_a_card_that_a_killed_agent_had_in_use_is_cleaned_before_anybody_gets_it(
    tmp_path: Path,
) -> None:
    async def all_of_it() -> None:
        house = House(tmp_path, Sharing.EXCLUSIVE)
        house.records.keep(house.uuid, modes.record(house.nvml, house.uuid))
        house.nvml.set_compute_mode(house.uuid, "prohibited")
        await house.seats.start()
        with pytest.raises(PartFailed, match="before it had cleaned it"):
            async with house.seats.seat(1, [WHOLE]):
                pytest.fail("somebody's memory was not cleaned")
        while house.seats.unclean:  # noqa: ASYNC110 - the loop goes on meanwhile
            await asyncio.sleep(0)
        async with house.seats.seat(1, [WHOLE]):
            assert len(house.scrubs) == 1
            assert house.nvml.compute_mode(house.uuid) == "default"
        await house.seats.close()
        assert list(house.records.left()) == []

    asyncio.run(all_of_it())


def test_who_is_called_off_while_a_card_is_cleaned_leaves_it_clean(tmp_path: Path) -> None:
    async def called_off(house: House) -> None:
        async with house.seats.seat(1, [WHOLE]):
            pass
        coming = asyncio.create_task(house.seats.seat(2, [WHOLE]).__aenter__())
        while not house.scrubs:  # noqa: ASYNC110
            await asyncio.sleep(0)
        coming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await coming
        assert house.seats.tenancies == frozenset()
        async with house.seats.seat(3, [WHOLE]):
            assert len(house.scrubs) == 1

    play(tmp_path, Sharing.EXCLUSIVE, called_off)


def test_a_stranger_never_gets_a_gpu_that_is_in_use(tmp_path: Path) -> None:
    async def two_users(house: House) -> None:
        async with house.seats.seat(1, [PART]):
            async with house.seats.seat(1, [PART]):
                pass  # the control: one's own tasks do share it
            with pytest.raises(PartFailed, match="still in use"):
                async with house.seats.seat(2, [PART]):
                    pytest.fail("strangers share a GPU")

    play(tmp_path, Sharing.TIMESLICE, two_users)


def test_instances_are_made_for_leases_used_by_strangers_and_unmade(tmp_path: Path) -> None:
    async def two_users(house: House) -> None:
        async with house.seats.seat(1, [CUT[0]]) as one, house.seats.seat(2, [CUT[1]]) as two:
            assert one is not None
            assert two is not None
            made = {each.start: each for each in house.nvml.mig_instances(house.uuid)}
            assert set(made) == {5, 6}
            assert ("CUDA_VISIBLE_DEVICES", made[6].uuid) in one.variables
            assert ("CUDA_VISIBLE_DEVICES", made[5].uuid) in two.variables
            assert f"/dev/cap{made[6].id}" in one.nodes
            assert f"/dev/cap{made[5].id}" not in one.nodes
        async with house.seats.seat(3, [WHOLE]):
            assert house.nvml.mig_instances(house.uuid) == ()
            assert house.nvml.card(house.uuid).mig is False
            assert len(house.scrubs) == 2

    house = play(tmp_path, Sharing.MIG, two_users)
    seen = [seat.variables[0][1][:4] for seat in house.scrubs if seat is not None]
    assert seen == ["MIG-", "MIG-", "GPU-"]


def test_an_owners_mig_card_is_mig_again_after_a_whole_lease(tmp_path: Path) -> None:
    async def whole(house: House) -> None:
        async with house.seats.seat(1, [WHOLE]):
            assert house.nvml.card(house.uuid).mig is False
            sharing = GpuSharing(house.nvml, house.seats, Abilities(True, True, True), None)
            (gpu,) = sharing.describe([Gpu(0, house.uuid, "H200", "nvidia", 140 * GIB)])
            assert gpu.sharing is Sharing.MIG, "what we changed for a while changes no offer"

    async def all_of_it() -> None:
        house = House(tmp_path, Sharing.MIG)
        house.nvml.set_mig(house.uuid, True)
        await whole(house)
        await house.seats.close()
        assert house.nvml.card(house.uuid).mig is True

    asyncio.run(all_of_it())


def test_a_place_on_the_card_that_the_owner_uses_is_refused_and_nothing_left(
    tmp_path: Path,
) -> None:
    async def taken(house: House) -> None:
        house.nvml.set_mig(house.uuid, True)
        owners = house.nvml.make_mig(house.uuid, 19, 6)
        with pytest.raises(PartFailed, match="could not be prepared"):
            async with house.seats.seat(1, [CUT[0]]):
                pytest.fail("two instances in one place")
        assert house.nvml.mig_instances(house.uuid) == (owners,)
        assert house.seats.unclean == {}
        house.nvml.unmake_mig(house.uuid, owners.id)
        house.nvml.set_mig(house.uuid, False)

    play(tmp_path, Sharing.MIG, taken)


def orders(house: House) -> list[str]:
    (file,) = house.folder.glob("pipes/*/pipe/orders")
    return file.read_text().splitlines()


def test_one_users_tasks_share_one_mps_daemon_with_limits_outside_their_reach(
    tmp_path: Path,
) -> None:
    async def two_tasks(house: House) -> None:
        async with house.seats.seat(1, [PART]) as one:
            assert one is not None
            assert house.nvml.compute_mode(house.uuid) == "exclusive_process"
            (inside, socket), *more = one.binds
            assert (inside, more) == ("/tmp/nvidia-mps/control", [])  # nothing else of it
            assert socket.is_socket()
            assert ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=6144M") in one.variables
            assert "set_default_device_pinned_mem_limit 0 6144M" in orders(house)
            async with house.seats.seat(1, [Slice(0, 20 * GIB, 250)]) as two:
                assert two is not None
                assert two.binds == one.binds
                assert "set_device_pinned_mem_limit 4711 0 20480M" in orders(house)
                assert "set_active_thread_percentage 4711 25" in orders(house)
        pid = int((socket.parent / "daemon.pid").read_text().split()[0])
        assert alive(pid)
        async with house.seats.seat(2, [PART]) as strangers:
            assert strangers is not None
            assert strangers.binds != one.binds
            assert not alive(pid)
            assert len(house.scrubs) == 1

    house = play(tmp_path, Sharing.MPS, two_tasks)
    assert list((house.folder / "pipes").iterdir()) == []


def test_mps_begins_once_the_card_is_free_of_another_agents_scrubber(tmp_path: Path) -> None:
    async def leaving(house: House) -> None:
        card = house.nvml.cards[house.uuid]
        card.processes = (GpuProcess(4711), GpuProcess(12, computes=False))
        coming = asyncio.create_task(house.seats.seat(1, [PART]).__aenter__())
        seen = house.nvml.calls
        while house.nvml.calls < seen + 12:  # noqa: ASYNC110 - it looks again and again
            await asyncio.sleep(0.01)
        assert house.nvml.compute_mode(house.uuid) == "default"
        card.processes = (GpuProcess(12, computes=False),)  # a desktop is no obstacle
        assert await coming is not None
        assert house.nvml.compute_mode(house.uuid) == "exclusive_process"

    play(tmp_path, Sharing.MPS, leaving)


def test_mps_on_a_card_that_another_program_keeps_is_refused_and_the_task_not_blamed(
    tmp_path: Path,
) -> None:
    async def kept(house: House) -> None:
        house.nvml.cards[house.uuid].processes = (GpuProcess(4711),)
        with pytest.raises(PartFailed, match="process 4711 of another program"):
            async with house.seats.seat(1, [PART]):
                pytest.fail("the card is in use")
        assert house.seats.unclean == {}
        assert house.nvml.compute_mode(house.uuid) == "default"

    play(tmp_path, Sharing.MPS, kept, free_within_s=0.2)


def test_a_tenancy_that_began_for_nobody_ends_by_itself(tmp_path: Path) -> None:
    async def called_off(house: House) -> None:
        coming = asyncio.create_task(house.seats.seat(1, [PART]).__aenter__())
        while house.nvml.compute_mode(house.uuid) == "default":  # noqa: ASYNC110
            await asyncio.sleep(0)
        coming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await coming
        assert len(house.seats.tenancies) == 1  # it lingers, as after a last task

    play(tmp_path, Sharing.MPS, called_off)


def test_a_daemon_that_does_not_come_up_leaves_nothing_and_no_reproach(tmp_path: Path) -> None:
    async def failing(house: House) -> None:
        (house.folder / "mps").write_text("#!/bin/sh\nexit 3\n")
        with pytest.raises(SandboxFailed, match="exited at once"):
            async with house.seats.seat(1, [PART]):
                pytest.fail("there is no daemon")
        assert house.seats.unclean == {}
        assert house.nvml.compute_mode(house.uuid) == "default"

    play(tmp_path, Sharing.MPS, failing)


def test_a_fault_of_ours_leaves_the_card_as_it_was(tmp_path: Path) -> None:
    async def failing(house: House) -> None:
        def broken(*_: object) -> tuple[str, ...]:
            raise TypeError("a bug")

        seats = GpuShares(house.nvml, house.runtime, house.records, nodes_of=broken)
        profiles = profiles_of(H200_PROFILES)
        gpu = Gpu(0, house.uuid, "H200", "nvidia", 140 * GIB, False, profiles=profiles)
        seats.use_gpus([gpu])
        with pytest.raises(TypeError):
            async with seats.seat(1, [CUT[0]]):
                pytest.fail("there is no instance")
        await seats.close()

    play(tmp_path, Sharing.MIG, failing)


def test_simulated_gpus_and_other_vendors_get_no_seat(tmp_path: Path) -> None:
    async def none(house: House) -> None:
        gpu = Gpu(0, "GPU-0", "MI300X", "amd", 192 * GIB)
        for each in (gpu, replace(gpu, vendor="nvidia", simulated=True)):
            house.seats.use_gpus([each])
            async with house.seats.seat(1, [WHOLE]) as seat:
                assert seat is None

    play(tmp_path, Sharing.EXCLUSIVE, none)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has uids to drop")
def test_a_roots_daemon_is_root_to_itself_and_nobody_to_the_host(walkable: Path) -> None:
    program = walkable / "mps"
    script = Path(__file__).with_name("mps_stand_in.py").read_text()
    program.write_text(f"#!/usr/bin/python3\n{script}")
    program.chmod(0o755)
    uid = 2_000_500_000

    async def started() -> None:
        launcher = Launcher(place="", binds=(), seccomp=b"")
        means = modes.MpsPrograms(
            str(program), modes.find_program("unshare"), launcher, walkable / "pipes"
        )
        daemon = modes.MpsDaemon(means, "GPU-0", uid)
        await daemon.start()
        pid = int((daemon.socket.parent / "daemon.pid").read_text().split()[0])
        facts = Path(f"/proc/{pid}/status").read_text().splitlines()  # noqa: ASYNC240
        assert f"Uid:\t{uid}\t{uid}\t{uid}\t{uid}" in facts
        assert (daemon.socket.parent / "started").read_text() == "-f --multiuser-server as 0"
        await daemon.limit(MpsLimits(GIB, 50))
        told = (daemon.socket.parent / "orders").read_text().splitlines()
        assert told[0] == "set_default_device_pinned_mem_limit 0 1024M"
        await daemon.stop()
        assert not alive(pid)
        await launcher.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(started())


# ---- the watchdog


class Sandbox:
    def __init__(self, *pids: int) -> None:
        self.pids = pids
        self.killed = asyncio.Event()
        self.seat = GpuShare()
        self.seat.watch(lambda pid: pid in self.pids, self._kill)

    async def _kill(self) -> None:
        self.killed.set()


def test_the_one_over_its_slice_is_ended_with_a_reason_and_never_its_neighbour() -> None:
    async def look() -> None:
        nvml = FakeNvml(h200())
        nvml.open()
        uuid = nvml.uuids()[0]
        dog = Watchdog(nvml.processes)
        greedy, modest = Sandbox(11, 12), Sandbox(13)
        for each in (greedy, modest):
            dog.begin(Watched(uuid, 6 * GIB, each.seat))
        nvml.cards[uuid].processes = (GpuProcess(11, 4 * GIB), GpuProcess(13, 6 * GIB))
        await dog.look()
        assert greedy.seat.exceeded == ""  # the control: within its slice nothing happens
        nvml.cards[uuid].processes += (GpuProcess(12, 3 * GIB), GpuProcess(99, 80 * GIB))
        await dog.look()
        await greedy.killed.wait()
        assert "7.00 GiB" in greedy.seat.exceeded
        assert "GPU memory slice of 6.00 GiB" in greedy.seat.exceeded
        assert modest.seat.exceeded == ""
        assert not modest.killed.is_set()
        nvml.cards[uuid].lost = True
        await dog.look()  # a card that is gone ends nobody
        await dog.close()

    asyncio.run(look())


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b'{"free": 100, "scrubbed": 99, "wrong": 0}\n', ""),
        (b'{"free": 100, "scrubbed": 50, "wrong": 0}', "only 50 of 100"),
        (b'{"free": 0, "scrubbed": 0, "wrong": 0}', "only 0 of 0"),
        (b'{"free": 100, "scrubbed": 99, "wrong": 1}', "1 samples"),
        (b'{"refused": "cuInit: CUDA_ERROR_NO_DEVICE"}', "CUDA_ERROR_NO_DEVICE"),
        (b"Traceback ...\nboom", "boom"),
        (b"", "nothing"),
    ],
)
def test_memory_counts_as_clean_only_when_the_scrubber_says_so(said: bytes, why: str) -> None:
    found = memory.fault(memory.read(said))
    assert why in found
    assert bool(found) == bool(why)
