"""How each way of ending is put into a report. Pure; the texts are for the consumer."""

from __future__ import annotations

from gpool.agent.instructions import CallAnswered, CommandEnded, RunnerEnded
from gpool.agent.lines import Held
from gpool.core.model import EndReason, Phase, TaskSpec
from gpool.wire.frames import Finished

MAX_ERROR_TEXT = 32 * 1024
AGENT_STOPPED = "the owner stopped the agent"
DOING = {
    Phase.FETCH: "its inputs were fetched",
    Phase.BUILD: "its environment was built",
    Phase.START: "its sandbox was started",
    Phase.COLLECT: "its outputs were collected",
}


def of_command(event: CommandEnded) -> Finished:
    return Finished(
        event.task,
        event.epoch,
        event.reason,
        event.exit_code,
        error_text=event.error_text[:MAX_ERROR_TEXT],
        duration_us=event.duration_us,
        outputs=event.outputs,
    )


def of_call(answer: CallAnswered) -> Finished:
    reason = EndReason.RAISED if answer.raised else EndReason.RETURNED
    return Finished(
        answer.task,
        answer.epoch,
        answer.reason or reason,
        None,
        answer.value,
        answer.value_sha256,
        answer.error_text[:MAX_ERROR_TEXT],
        answer.duration_us,
    )


def timed_out_in(phase: Phase, spec: TaskSpec) -> str:
    """Why a time-out ended it: the limit, and what it was doing."""
    limit = spec.timeout / 1_000_000
    if phase is Phase.RUN:
        return f"it ran past its time-out of {limit:g} s"
    return f"its time-out of {limit:g} s passed while {DOING[phase]}"


def timed_out(held: Held, text: str) -> Finished:
    return _end(held, EndReason.TIMED_OUT, text)


def preempted(held: Held, text: str) -> Finished:
    return _end(held, EndReason.PREEMPTED, text)


def lost(held: Held) -> Finished:
    return _end(held, EndReason.LOST, "the node lost touch with the server and let go")


def not_started(held: Held, event: RunnerEnded) -> Finished:
    text = f"the sandbox did not start: {event.detail}"
    return _end(held, EndReason.SANDBOX_FAILED, text, event.exit_code)


def died(held: Held, event: RunnerEnded) -> Finished:
    """The runner went away while this call ran. A function that exits has failed, whatever code it gives."""
    code = event.exit_code or 1
    match event.reason:
        case EndReason.OUT_OF_MEMORY:
            text = f"the function ran out of memory: {event.detail}".rstrip(": ")
            return _end(held, EndReason.OUT_OF_MEMORY, text, code)
        case EndReason.SANDBOX_FAILED:
            text = f"the sandbox failed: {event.detail}".rstrip(": ")
            return _end(held, EndReason.SANDBOX_FAILED, text, code)
    text = f"the function's process ended with exit code {event.exit_code} before it returned"
    return _end(held, EndReason.EXITED, text, code)


def _end(held: Held, reason: EndReason, text: str, code: int | None = None) -> Finished:
    return Finished(held.task, held.epoch, reason, code, error_text=text[:MAX_ERROR_TEXT])
