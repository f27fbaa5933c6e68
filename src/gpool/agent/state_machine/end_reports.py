"""The report of each way an attempt ends; its text is for the task's user. Pure."""

from __future__ import annotations

import msgspec

from gpool.agent.runtime.protocol import SandboxExit
from gpool.agent.state_machine.instructions import CallAnswered, CommandEnded, RunnerEnded
from gpool.agent.state_machine.lease_queues import AgentLease
from gpool.core.model import EndReason, Fault, Phase, TaskSpec
from gpool.wire.frames import Finished

MAX_ERROR_TEXT = 32 * 1024
RAISED, RETURNED = EndReason.RAISED, EndReason.RETURNED  # for each call: slow to look up
AGENT_STOPPED = "the owner stopped the agent"
ACTIVITY = {
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
        fault=event.fault,
    )


def of_call(answer: CallAnswered) -> Finished:
    reason = RAISED if answer.raised else RETURNED
    return Finished(
        answer.task,
        answer.epoch,
        answer.reason or reason,
        answer.exit_code,
        answer.value,
        answer.value_sha256,
        answer.error_text[:MAX_ERROR_TEXT],
        answer.duration_us,
        fault=answer.fault,
    )


def timed_out_in(phase: Phase, spec: TaskSpec) -> str:
    limit = spec.timeout / 1_000_000
    if phase is Phase.RUN:
        return f"it ran past its time-out of {limit:g} s"
    return f"its time-out of {limit:g} s passed while {ACTIVITY[phase]}"


def timed_out(lease: AgentLease, text: str) -> Finished:
    return _end(lease, EndReason.TIMED_OUT, text)


def preempted(lease: AgentLease, text: str) -> Finished:
    return _end(lease, EndReason.PREEMPTED, text)


def lost(lease: AgentLease) -> Finished:
    text = "the node lost contact with the server, and its lease expired"
    return _end(lease, EndReason.LOST, text)


def not_started(lease: AgentLease, event: RunnerEnded) -> Finished:
    text = f"the sandbox did not start: {event.detail}"
    if event.reason is EndReason.BAD_INPUT:
        return _end(lease, EndReason.BAD_INPUT, text, event.exit_code)
    end = _end(lease, EndReason.SANDBOX_FAILED, text, event.exit_code)
    return msgspec.structs.replace(end, fault=event.fault or Fault.UNCLEAR)


def died(lease: AgentLease, event: RunnerEnded) -> Finished:
    """The runner ended during this call. A function that exits has failed, even with exit code 0."""
    ended = SandboxExit(event.exit_code, event.reason, event.detail)
    reason, text = why_it_died(ended)
    return _end(lease, reason, text, event.exit_code or 1)


def why_it_died(ended: SandboxExit) -> tuple[EndReason, str]:
    match ended.reason:
        case EndReason.OUT_OF_MEMORY:
            text = f"the function ran out of memory: {ended.detail}".rstrip(": ")
            return EndReason.OUT_OF_MEMORY, text
        case EndReason.SANDBOX_FAILED:
            return EndReason.SANDBOX_FAILED, f"the sandbox failed: {ended.detail}".rstrip(": ")
    text = f"the function's process ended with exit code {ended.exit_code} before it returned"
    return EndReason.EXITED, text


def _end(lease: AgentLease, reason: EndReason, text: str, code: int | None = None) -> Finished:
    return Finished(lease.task, lease.epoch, reason, code, error_text=text[:MAX_ERROR_TEXT])
