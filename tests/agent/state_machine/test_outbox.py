"""What waits to be said of an attempt: its start is left out where its end says all, and kept where it does not."""

from __future__ import annotations

import pytest

from gpool.agent.state_machine.outbox import (
    LOG_CHUNK_BYTES,
    LOG_EVERY_US,
    LOG_HEAD_BYTES,
    LOG_TAIL_BYTES,
    MAX_HELD_BYTES,
    LogBuffer,
    Outbox,
)
from gpool.core.model import EndReason, Fault
from gpool.server.store.operations.tasks.progress import MAX_LOG_BYTES
from gpool.wire.frames import Finished, ReportItem, Started


def said_of(end: Finished) -> list[ReportItem]:
    outbox = Outbox()
    outbox.add_started(0, end.task, end.epoch)
    outbox.add(0, end)
    return [item for frame in outbox.flush(1_000_000) for item in frame.items]


@pytest.mark.parametrize("reason", [EndReason.RETURNED, EndReason.EXITED, EndReason.OUT_OF_MEMORY])
def test_a_start_is_not_said_once_its_end_is(reason: EndReason) -> None:
    end = Finished(1, 1, reason, 0)
    assert said_of(end) == [end]


def test_that_something_ran_is_said_before_its_sandbox_failed() -> None:
    end = Finished(1, 1, EndReason.SANDBOX_FAILED, 125)
    assert said_of(end) == [Started(1, 1), end]


def test_of_what_could_not_be_started_no_start_is_said() -> None:
    end = Finished(1, 1, EndReason.SANDBOX_FAILED, 125, fault=Fault.UNCLEAR)
    assert said_of(end) == [end]


# ---- output


def printed(buffer: LogBuffer) -> dict[int, bytes]:
    chunks = [*buffer.take(0), *buffer.take(0, ends=True)]
    assert [chunk.sequence for chunk in chunks] == list(range(len(chunks)))
    assert all(len(chunk.data) <= LOG_CHUNK_BYTES for chunk in chunks)
    found = {1: b"", 2: b""}
    for chunk in chunks:
        found[chunk.stream] += chunk.data
    return found


def test_output_within_the_limit_is_reported_whole_and_without_a_note() -> None:
    buffer = LogBuffer(1, 1)
    whole = b"x" * (LOG_HEAD_BYTES + LOG_TAIL_BYTES)
    for start in range(0, len(whole), 100_000):
        buffer.append(0, 1, whole[start : start + 100_000])
    assert printed(buffer) == {1: whole, 2: b""}


def test_of_a_flood_head_and_tail_are_kept_and_an_error_on_the_other_stream_too() -> None:
    buffer = LogBuffer(1, 1)
    buffer.append(0, 1, b"THE BEGINNING\n")
    for _ in range(30):
        buffer.append(0, 1, b"y\n" * 500_000)
    buffer.append(0, 1, b"THE END\n")
    buffer.append(0, 2, b"Traceback\n")
    for _ in range(30):
        buffer.append(0, 1, b"z\n" * 500_000)
    found = printed(buffer)
    assert found[1].startswith(b"THE BEGINNING\n")
    assert found[1].endswith(b"z\n")
    assert found[2].endswith(b"Traceback\n")
    total = 60_000_000 + len(b"THE BEGINNING\nTHE END\n")
    dropped = total - LOG_HEAD_BYTES - LOG_TAIL_BYTES
    assert f"[gpool: {dropped} bytes of output are not kept".encode() in found[2]
    assert len(found[1]) == LOG_HEAD_BYTES + LOG_TAIL_BYTES


def test_one_piece_larger_than_everything_kept_is_cut_in_its_middle() -> None:
    buffer = LogBuffer(1, 1)
    buffer.append(0, 1, b"first" + b"m" * (LOG_HEAD_BYTES * 2) + b"last")
    found = printed(buffer)[1]
    assert (found[:5], found[-4:]) == (b"first", b"last")
    assert len(found) == LOG_HEAD_BYTES + LOG_TAIL_BYTES


def test_a_begun_line_waits_once_for_its_end() -> None:
    """Between a line and its end the server would put the line of another member of the gang."""
    buffer = LogBuffer(1, 1)
    buffer.append(0, 1, b"one\ntwo")
    assert [chunk.data for chunk in buffer.take(LOG_EVERY_US)] == [b"one\n"]
    assert buffer.due_at == 2 * LOG_EVERY_US
    buffer.append(LOG_EVERY_US, 1, b"\nthree")
    assert [chunk.data for chunk in buffer.take(2 * LOG_EVERY_US)] == [b"two\n"]
    assert [chunk.data for chunk in buffer.take(3 * LOG_EVERY_US)] == [b"three"]
    assert buffer.due_at is None


def test_a_long_line_does_not_wait_for_its_end() -> None:
    buffer = LogBuffer(1, 1)
    long = b"x" * (MAX_HELD_BYTES + 1)
    buffer.append(0, 1, long)
    assert [chunk.data for chunk in buffer.take(LOG_EVERY_US)] == [long]
    assert buffer.due_at is None


def test_the_end_of_an_attempt_reports_its_begun_line() -> None:
    buffer = LogBuffer(1, 1)
    buffer.append(0, 2, b"no end")
    assert buffer.take(LOG_EVERY_US) == []
    assert [chunk.data for chunk in buffer.take(LOG_EVERY_US, ends=True)] == [b"no end"]


def test_what_is_kept_fits_into_the_servers_limit_of_a_task() -> None:
    """16 MiB, which counts each chunk as at least 16 bytes."""
    assert LOG_HEAD_BYTES + 2 * LOG_TAIL_BYTES + LOG_CHUNK_BYTES < MAX_LOG_BYTES
