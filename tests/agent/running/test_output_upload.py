"""Outputs wait on the node while their owner's storage quota is full, for a bounded time."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpool.agent.running.output_upload import RoomWait, upload_output
from gpool.core.errors import Forbidden, StorageFull
from gpool.transfer.requests import LeaseRef

pytestmark = pytest.mark.anyio
LEASE = LeaseRef(7, 1)
FILE = (Path("out"), "a" * 64, 3)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Receiver:
    """Refuses as often as it is told to."""

    def __init__(self, *refusals: Exception) -> None:
        self.refusals = list(refusals)
        self.received: list[str] = []

    async def upload(
        self, file: Path, sha256: str, size: int, lease: LeaseRef | None = None
    ) -> None:
        assert (file, size, lease) == (FILE[0], FILE[2], LEASE)
        if self.refusals:
            raise self.refusals.pop(0)
        self.received.append(sha256)


async def test_an_upload_is_repeated_until_there_is_room_and_the_task_is_told_once() -> None:
    receiver, notes = Receiver(StorageFull("delete"), StorageFull("delete")), list[str]()
    await upload_output(receiver, FILE, LEASE, notes.append, RoomWait(600, 0))
    assert receiver.received == [FILE[1]]
    assert notes == ["the outputs wait on the node for up to 600 s: delete"]


async def test_the_wait_is_bounded() -> None:
    receiver = Receiver(StorageFull("full"), StorageFull("full"))
    with pytest.raises(StorageFull):
        await upload_output(receiver, FILE, LEASE, lambda _: None, RoomWait(0, 0))
    assert receiver.received == []


async def test_other_refusals_are_not_waited_for() -> None:
    with pytest.raises(Forbidden):
        await upload_output(
            Receiver(Forbidden("no")), FILE, LEASE, lambda _: None, RoomWait(600, 0)
        )
