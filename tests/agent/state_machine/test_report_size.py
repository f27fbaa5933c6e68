"""Reports never fill more than a frame takes, whatever tasks say of themselves."""

from __future__ import annotations

from gpool.agent.runtime.work_directory import MAX_NAMES_BYTES, NAME_COST_BYTES
from gpool.agent.state_machine.instructions import CallAnswered
from gpool.agent.state_machine.lease_queues import AgentLease, GrantTerms, LeaseQueue
from gpool.agent.state_machine.leases import Leases, of_call
from gpool.agent.state_machine.outbox import Outbox
from gpool.core.model import (
    Allocation,
    EndReason,
    OutputFile,
    Requirements,
    Span,
    TaskKind,
    TaskSpec,
)
from gpool.wire.frames import MAX_FRAME_BYTES, Finished, encode

SPEC = TaskSpec(TaskKind.COMMAND, "x", Requirements(), ("true",), timeout=Span(1_000_000))


def reported(*ends: Finished) -> list[int]:
    """The sizes of the frames that carry these ends."""
    outbox = Outbox()
    leases, line = Leases(outbox), LeaseQueue(0)
    order = GrantTerms(Allocation(0, 1000, 1 << 30, ()), 1, False, SPEC)
    for end in ends:
        held = AgentLease(end.task, end.epoch, order, line, b"", "")
        leases.held[end.task] = held
        leases.finish(0, held, end)
    sizes = []
    sequence = 0
    while frames := outbox.flush(1_000_000):
        for frame in frames:
            sizes.append(len(encode(frame)))
            sequence = frame.sequence
        outbox.recorded(sequence)
    return sizes


def test_error_texts_are_counted_in_bytes_not_in_letters() -> None:
    text = "\N{GRINNING FACE}" * 64 * 1024
    ends = [of_call(CallAnswered(task, 1, True, b"", "", text, 0, ())) for task in range(1, 400)]
    assert max(reported(*ends)) < MAX_FRAME_BYTES


def test_many_outputs_with_the_longest_names_do_not_share_a_frame() -> None:
    name = "/".join(["n" * 255] * 4)[:1000]
    count = MAX_NAMES_BYTES // (len(name) + NAME_COST_BYTES)
    outputs = tuple(OutputFile(name, "0" * 64, 1, False) for _ in range(count))
    ends = [Finished(task, 1, EndReason.EXITED, 0, outputs=outputs) for task in range(1, 7)]
    assert max(reported(*ends)) < MAX_FRAME_BYTES
