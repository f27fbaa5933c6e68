"""Checkpoints of commands: saved whole or not at all, under the lease, and laid in again."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gpool.agent.daemon import boot_clock
from gpool.agent.running.artifact_cache import ArtifactCache
from gpool.agent.running.command_executor import CommandExecutor
from gpool.agent.running.sandboxes import ExecutorContext
from gpool.agent.runtime.process import ProcessRuntime
from gpool.agent.runtime.protocol import (
    Runtime,
    SandboxExit,
)
from gpool.agent.state_machine.instructions import (
    CommandCheckpointed,
    CommandEnded,
    CommandPrinted,
    CommandReached,
    CommandStarted,
    Event,
    StartCommand,
)
from gpool.core.errors import NotFound, StaleLease, Unreachable
from gpool.core.model import (
    Allocation,
    EndReason,
    InputFile,
    Phase,
    Requirements,
    Span,
    TaskKind,
    TaskSpec,
    Tier,
)
from gpool.testing.fake_runtime import FakeRun, FakeRuntime
from gpool.transfer.requests import LeaseRef
from tests.tools.runtimes import PATIENCE_S

MS = 1_000
SECOND = 1_000_000


class Shelf:
    """The server's artifacts: what was uploaded under which lease."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.uploads: list[tuple[str, LeaseRef | None]] = []
        self.refuses: Exception | None = None

    def keep(self, path: str, data: bytes) -> InputFile:
        sha256 = hashlib.sha256(data).hexdigest()
        self.held[sha256] = data
        return InputFile(path, sha256, len(data))

    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None:
        if self.refuses is not None:
            raise self.refuses
        data = await asyncio.to_thread(file.read_bytes)
        assert (hashlib.sha256(data).hexdigest(), len(data)) == (sha256, size)
        self.held[sha256] = data
        self.uploads.append((sha256, lease))

    async def fetch(self, sha256: str, target: Path, lease: LeaseRef) -> None:
        if sha256 not in self.held:
            raise NotFound("there is no such artifact")
        await asyncio.to_thread(target.write_bytes, self.held[sha256])


@dataclass
class Bench:
    """One agent's equipment, and everything its keepers said."""

    equipment: ExecutorContext
    shelf: Shelf
    runtime: Runtime
    said: list[Event] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    def of(self, kind: type) -> list[Event]:
        return [event for event in self.said if isinstance(event, kind)]

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                self.news.clear()
                await self.news.wait()

    def start(self, spec: TaskSpec, *checkpoint: InputFile, epoch: int = 1) -> CommandExecutor:
        order = StartCommand(
            1, epoch, spec, Allocation(0, 1000, 1 << 30), True, checkpoint=checkpoint
        )
        return CommandExecutor(self.equipment, order)

    async def end(self) -> CommandEnded:
        await self.until(lambda: self.of(CommandEnded))
        (ended,) = self.of(CommandEnded)
        assert isinstance(ended, CommandEnded)
        return ended

    def saved(self) -> list[dict[str, bytes]]:
        """Each checkpoint that was told, as the server has it."""
        told = [event for event in self.said if isinstance(event, CommandCheckpointed)]
        return [{file.path: self.shelf.held[file.sha256] for file in one.files} for one in told]

    def printed(self) -> str:
        told = [event for event in self.said if isinstance(event, CommandPrinted)]
        return b"".join(event.data for event in told).decode()


@contextlib.asynccontextmanager
async def bench(
    folder: Path,
    runs: Mapping[tuple[str, ...], FakeRun] | None = None,
    runtime: Runtime | None = None,
    **doors: object,
) -> AsyncIterator[Bench]:
    for name in ("values", "scratch"):
        (folder / name).mkdir()
    shelf = Shelf()
    chosen = runtime or FakeRuntime(folder / "values", runs)
    made: list[Bench] = []

    def feed(event: Event) -> None:
        made[0].said.append(event)
        made[0].news.set()

    cache = ArtifactCache(folder / "artifacts", shelf.fetch)
    equipment = ExecutorContext(
        [chosen],
        cache,
        shelf,
        folder / "scratch",
        feed,
        boot_clock,
        **doors,  # type: ignore[arg-type]
    )
    made.append(Bench(equipment, shelf, chosen))
    try:
        yield made[0]
        if equipment.cleaning:
            await asyncio.wait(list(equipment.cleaning))
        assert os.listdir(folder / "scratch") == []
    finally:
        await chosen.close()


def spec(name: str = "work", **changes: object) -> TaskSpec:
    base = TaskSpec(TaskKind.COMMAND, name, command=(name,), checkpoint="state/")
    return replace(base, **changes)  # type: ignore[arg-type]


def test_it_is_saved_at_its_interval_and_told_only_when_it_changed(tmp_path: Path) -> None:
    async def story() -> None:
        runs = {("work",): FakeRun(files={"state/n": b"1", "state/n.tmp": b"half"}, waits=True)}
        async with bench(tmp_path, runs) as at:
            keeper = at.start(spec(checkpoint_every=Span(5 * MS)))
            await at.until(lambda: at.saved())
            await asyncio.wait([keeper.task], timeout=0.1)
            assert at.saved() == [{"state/n": b"1"}]
            assert at.shelf.uploads == [(hashlib.sha256(b"1").hexdigest(), LeaseRef(1, 1))]
            keeper.end(EndReason.CANCELLED)
            assert (await at.end()).reason is EndReason.CANCELLED

    asyncio.run(story())


def test_what_changes_while_it_is_read_is_never_saved(tmp_path: Path) -> None:
    async def story() -> None:
        run = FakeRun(
            files={"state/a": b"1", "state/b": b"1"}, waits=True, changing=("state/b",), heeds=False
        )
        async with bench(tmp_path, {("work",): run}) as at:
            keeper = at.start(spec(checkpoint_every=Span(5 * MS)))
            await at.until(lambda: "change all the time" in at.printed())
            assert at.saved() == []
            keeper.end(EndReason.PREEMPTED, 10 * MS)
            assert (await at.end()).reason is EndReason.PREEMPTED
            (last,) = at.saved()
            assert last["state/a"] == b"1"

    asyncio.run(story())


def test_after_the_warning_it_has_its_grace_and_is_saved_before_the_end_is_told(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        run = FakeRun(files={"state/n": b"1"}, waits=True, warned={"state/n": b"7"})
        async with bench(tmp_path, {("work",): run}) as at:
            keeper = at.start(spec())
            await at.until(lambda: at.of(CommandStarted))
            keeper.end(EndReason.PREEMPTED, 20 * SECOND)
            ended = await at.end()
            assert (ended.reason, ended.outputs) == (EndReason.PREEMPTED, ())
            assert at.saved() == [{"state/n": b"7"}]
            assert isinstance(at.said[-1], CommandEnded)

    asyncio.run(story())


def test_one_that_does_not_heed_the_warning_is_killed_after_its_grace(tmp_path: Path) -> None:
    async def story() -> None:
        run = FakeRun(files={"state/n": b"1"}, waits=True, heeds=False)
        async with bench(tmp_path, {("work",): run}) as at:
            keeper = at.start(spec())
            await at.until(lambda: at.of(CommandStarted))
            keeper.end(EndReason.PREEMPTED, 50 * MS)
            keeper.end(EndReason.PREEMPTED, 50 * MS)
            assert (await at.end()).reason is EndReason.PREEMPTED
            assert at.saved() == [{"state/n": b"1"}]

    asyncio.run(story())


@pytest.mark.parametrize("reason", [EndReason.CANCELLED, EndReason.LOST])
def test_a_lease_that_is_gone_ends_a_farewell_at_once_and_saves_nothing(
    tmp_path: Path, reason: EndReason
) -> None:
    async def story() -> None:
        run = FakeRun(files={"state/n": b"1"}, waits=True, heeds=False)
        async with bench(tmp_path, {("work",): run}) as at:
            keeper = at.start(spec())
            await at.until(lambda: at.of(CommandStarted))
            keeper.end(EndReason.PREEMPTED, 3600 * SECOND)
            keeper.end(reason)
            assert (await at.end()).reason is reason
            assert at.saved() == []

    asyncio.run(story())


@pytest.mark.parametrize(
    ("run", "saves"),
    [
        (FakeRun(files={"state/n": b"1"}), False),  # it is done
        (FakeRun(files={"state/n": b"1"}, exit_code=3), True),
        (FakeRun(files={"state/n": b"1"}, ended=SandboxExit(137, EndReason.OUT_OF_MEMORY)), True),
        (FakeRun(files={"elsewhere": b"1"}, exit_code=3), False),
        (FakeRun(files={"state/n.tmp": b"1"}, exit_code=3), False),
    ],
)
def test_a_failed_attempt_is_saved_for_its_retry(tmp_path: Path, run: FakeRun, saves: bool) -> None:
    async def story() -> None:
        async with bench(tmp_path, {("work",): run}) as at:
            at.start(spec())
            ended = await at.end()
            assert ended.exit_code == (run.ended or SandboxExit(run.exit_code)).exit_code
            assert at.saved() == ([{"state/n": b"1"}] if saves else [])

    asyncio.run(story())


def test_a_time_out_saves_what_is_there(tmp_path: Path) -> None:
    async def story() -> None:
        run = FakeRun(files={"state/n": b"1"}, waits=True, heeds=False)
        async with bench(tmp_path, {("work",): run}) as at:
            keeper = at.start(spec())
            await at.until(lambda: at.of(CommandStarted))
            keeper.end(EndReason.TIMED_OUT)
            assert (await at.end()).reason is EndReason.TIMED_OUT
            assert at.saved() == [{"state/n": b"1"}]

    asyncio.run(story())


def test_it_is_laid_in_over_the_inputs_and_not_sent_again_unchanged(tmp_path: Path) -> None:
    async def story() -> None:
        async with bench(tmp_path, {("work",): FakeRun(exit_code=1)}) as at:
            given = at.shelf.keep("state/n", b"from the consumer")
            other = at.shelf.keep("data", b"d")
            kept = at.shelf.keep("state/n", b"from the last attempt")
            at.start(spec(inputs=(given, other), outputs=("state/n", "data")), kept, epoch=2)
            ended = await at.end()
            found = {file.path: at.shelf.held[file.sha256] for file in ended.outputs}
            assert found == {"state/n": b"from the last attempt", "data": b"d"}
            assert at.saved() == []
            told = [e.phase for e in at.said if isinstance(e, CommandReached)]
            assert told == [Phase.FETCH, Phase.START, Phase.COLLECT, Phase.COLLECT]

    asyncio.run(story())


def test_one_that_cannot_be_fetched_fails_the_attempt_and_never_starts_from_nothing(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with bench(tmp_path, {("work",): FakeRun()}) as at:
            at.start(spec(), InputFile("state/n", "0" * 64, 3), epoch=2)
            ended = await at.end()
            assert ended.reason is EndReason.BAD_INPUT
            assert "checkpoint state/n" in ended.error_text
            assert at.of(CommandStarted) == []

    asyncio.run(story())


@pytest.mark.parametrize(
    ("error", "told"), [(Unreachable("no route"), "no route"), (StaleLease("over"), "")]
)
def test_one_that_cannot_be_uploaded_is_not_told(
    tmp_path: Path, error: Exception, told: str
) -> None:
    async def story() -> None:
        run = FakeRun(files={"state/n": b"1"}, exit_code=3)
        async with bench(tmp_path, {("work",): run}) as at:
            at.shelf.refuses = error
            at.start(spec())
            assert (await at.end()).exit_code == 3
            assert at.saved() == []
            assert (told in at.printed()) if told else at.printed() == ""

    asyncio.run(story())


def test_one_that_had_exited_by_itself_is_not_preempted_any_more(tmp_path: Path) -> None:
    class Slow(Shelf):
        def __init__(self) -> None:
            super().__init__()
            self.asked, self.go = asyncio.Event(), asyncio.Event()

        async def upload(
            self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
        ) -> None:
            self.asked.set()
            await self.go.wait()
            await super().upload(file, sha256, size, lease)

    async def story() -> None:
        async with bench(tmp_path, {("work",): FakeRun(files={"out": b"x"})}) as at:
            slow = Slow()
            at.equipment = replace(at.equipment, uploader=slow)
            keeper = at.start(spec(outputs=("out",)))
            await slow.asked.wait()
            keeper.end(EndReason.PREEMPTED, SECOND)
            slow.go.set()
            ended = await at.end()
            assert (ended.reason, ended.exit_code) == (EndReason.EXITED, 0)
            assert len(ended.outputs) == 1

    asyncio.run(story())


COUNTER = """
import os, signal, sys, time
os.makedirs("state", exist_ok=True)
n = int(open("state/n").read()) if os.path.exists("state/n") else 0
def keep(*_):
    with open("state/n.tmp", "w") as file:
        file.write(str(n))
    os.rename("state/n.tmp", "state/n")
def leave(*_):
    keep()
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
until = int(sys.argv[1])
while n != until:
    n += 1
    keep()
    time.sleep(0.002)
with open("result", "w") as file:
    file.write(str(n))
"""


def test_a_real_task_goes_on_from_where_it_was_and_ends_as_if_undisturbed(tmp_path: Path) -> None:
    async def story() -> None:
        (tmp_path / "data").mkdir()
        async with bench(tmp_path, runtime=ProcessRuntime(tmp_path / "data")) as at:
            words = (sys.executable, "-c", COUNTER)
            counter = spec(
                command=(*words, "-1"),  # for ever, or it would be done while we stand still
                requirements=Requirements(tier=Tier.NONE),
                checkpoint_every=Span(20 * MS),
                outputs=("result",),
            )
            kept: tuple[InputFile, ...] = ()
            reached = [0]
            for epoch in range(1, 5):
                if epoch == 4:
                    counter = replace(counter, command=(*words, str(reached[-1] + 200)))
                keeper = at.start(counter, *kept, epoch=epoch)
                await at.until(lambda: at.of(CommandStarted))
                if epoch < 4:
                    before = len(at.of(CommandCheckpointed))
                    await at.until(lambda n=before: len(at.of(CommandCheckpointed)) > n + 2)
                    keeper.end(EndReason.PREEMPTED, 3600 * SECOND)
                ended = await at.end()
                told = [e.files for e in at.said if isinstance(e, CommandCheckpointed)]
                kept = tuple(InputFile(f.path, f.sha256, f.size_bytes) for f in (told or [()])[-1])
                reached += [int(files["state/n"]) for files in at.saved()]
                assert reached == sorted(reached), "progress went back"
                at.said.clear()
            assert ended.reason is EndReason.EXITED
            assert at.shelf.held[ended.outputs[0].sha256] == counter.command[-1].encode()
            assert len(set(reached)) > 8

    asyncio.run(story())
