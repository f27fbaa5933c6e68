"""Results of finished tasks, decoded into Python values or exceptions.

A pickle is loaded only from the caller's own node or with `results="pickle"`: loading runs code chosen by the node's
owner.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from gpool.client.pickling import PICKLING_ERRORS, loads
from gpool.core.errors import (
    Cancelled,
    InternalFault,
    LosesNodes,
    TaskFailed,
    TimedOut,
    UntrustedResult,
)

Fetch = Callable[[str], bytes]
"""Returns a whole artifact by its hash."""


class OutputArtifact(msgspec.Struct, frozen=True):
    path: str
    sha256: str
    size_bytes: int
    executable: bool = False


class Result(msgspec.Struct, frozen=True):
    """`wire.documents.ResultDocument`, decoded by msgspec: a map reads thousands per second."""

    id: str
    position: int
    sequence: int
    status: str
    reason: str | None = None
    exit_code: int | None = None
    value: bytes = b""
    value_sha256: str = ""
    error_text: str = ""
    outputs: list[OutputArtifact] = []
    node: str | None = None
    node_name: str | None = None
    own_node: bool = False  # an older server does not send it


@dataclass(frozen=True, slots=True)
class Completed:
    id: str
    exit_code: int
    status: str
    stdout: str
    stderr: str
    outputs: tuple[Path, ...] = ()


class SubmittedBatch(msgspec.Struct, frozen=True):
    batch: str
    ids: list[str]
    first_position: int = 0


decode_result = msgspec.json.Decoder(Result).decode
decode_results = msgspec.json.Decoder(list[Result]).decode
decode_lines = msgspec.json.Decoder(Result).decode_lines
decode_submitted = msgspec.json.Decoder(SubmittedBatch).decode


class RemoteTraceback(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text.rstrip()}\n"


class Raised(msgspec.Struct, frozen=True):
    exception: BaseException


def outcome(result: Result, fetch: Fetch, *, pickle_requested: bool) -> object:
    """Value or `Raised`. `pickle_requested`: also load pickles of other accounts' nodes."""
    is_trusted = result.own_node or pickle_requested
    if result.reason == "returned" and result.status == "succeeded":
        if not is_trusted:
            return Raised(_untrusted(result))
        content = result.value or _fetched(result, fetch)
        return loads(content)
    if result.reason == "raised":
        return Raised(_raised(result, fetch, is_trusted=is_trusted))
    return Raised(failure(result))


def _untrusted(result: Result) -> UntrustedResult:
    if result.node is None:
        where = "a node whose owner the server does not report (it may be older than this client)"
    else:
        # the owner chose the name: no control character of it may reach a terminal
        name = "".join(c if c.isprintable() else "\ufffd" for c in result.node_name or "")
        node = f"{name} ({result.node})" if name else result.node
        where = f"node {node}, which belongs to another account or was removed"
    return UntrustedResult(
        f"task {result.id} returned a pickled value from {where}. It was not unpickled: unpickling would let that "
        'node\'s owner run code on this machine. If you trust the owner, use @gpool.task(results="pickle"), or '
        f'client.get({result.id!r}, results="pickle") for this value',
        id=result.id,
        node=result.node,
    )


def _fetched(result: Result, fetch: Fetch) -> bytes:
    if not result.value_sha256:
        raise InternalFault(f"the value of task {result.id} is missing from the server's response")
    content = fetch(result.value_sha256)
    if hashlib.sha256(content).hexdigest() != result.value_sha256:
        raise InternalFault(
            f"the value of task {result.id} does not match its hash; fetch it again"
        )
    return content


def _raised(result: Result, fetch: Fetch, *, is_trusted: bool) -> BaseException:
    """`TaskFailed` with the text if the pickle is not trusted; the remote traceback is the cause."""
    exception: object = None
    if is_trusted and (result.value or result.value_sha256):
        try:
            exception = loads(result.value or _fetched(result, fetch))
        except (*PICKLING_ERRORS, EOFError, KeyError, IndexError) as exc:
            exception = None
            reason = f"; its exception could not be rebuilt here: {exc}"
        else:
            reason = ""
    else:
        reason = ""
    if not isinstance(exception, BaseException):
        last = result.error_text.strip().rpartition("\n")[2] or "it raised an exception"
        exception = TaskFailed(f"task {result.id} failed: {last}{reason}", id=result.id)
    if result.error_text:
        exception.__cause__ = RemoteTraceback(result.error_text)
    return exception


def failure(result: Result) -> TaskFailed:
    """Error of a task that raised none itself."""
    text = f": {result.error_text.strip()}" if result.error_text.strip() else ""
    task = f"task {result.id}"
    if result.reason == "timed_out":
        return TimedOut(f"{task}{text or ' ran past its time-out'}", id=result.id)
    if result.status == "cancelled" or result.reason == "cancelled":
        return Cancelled(f"{task} was cancelled{text}", id=result.id)
    if result.reason == "loses_nodes":
        return LosesNodes(f"{task} was lost with three different nodes{text}", id=result.id)
    if result.reason == "exited":
        return TaskFailed(
            f"{task} exited with code {result.exit_code}{text}",
            id=result.id,
            exit_code=result.exit_code,
        )
    memory = (
        ("GPU memory", "--vram, or vram=")
        if "GPU memory" in text
        else ("memory", "--memory, or memory=")
    )
    why = {
        "out_of_memory": "ran out of {}; ask for more with {}".format(*memory),
        "bad_input": "could not be prepared",  # its inputs, its environment, its checkpoint
        "bad_output": "did not write its outputs",
        "lost": "lost one of its nodes",
        "sandbox_failed": "failed on its node: the sandbox did not start or broke",
        "node_failed": "failed on its node, which could not start it",
    }.get(result.reason or "", "failed")
    advice = ""
    if result.reason in ("sandbox_failed", "node_failed"):
        advice = (
            f". Your program is not the cause. For the attempts see: gpool explain {result.id}. "
            "Try another --tier or --image, or report this to the pool's operator"
        )
    return TaskFailed(f"{task} {why}{text}{advice}", id=result.id, reason=result.reason)


def exit_code(result: Result) -> int:
    """Exit code of the task, or a conventional one for its end reason."""
    if result.reason == "timed_out":
        return 124
    if result.status == "cancelled" or result.reason == "cancelled":
        return 130
    if result.status == "succeeded":
        return 0
    if result.reason == "exited" and result.exit_code is not None:
        return result.exit_code if 0 < result.exit_code < 256 else 1
    if result.reason in ("sandbox_failed", "node_failed", "loses_nodes", "lost"):
        return 125
    return 137 if result.reason == "out_of_memory" else 1
