"""What waits to be said of an attempt: its start is left out where its end says all, and kept where it does not."""

from __future__ import annotations

import pytest

from gpool.agent.state_machine.outbox import Outbox
from gpool.core.model import EndReason, Fault
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
