"""Every error that gpool raises on purpose. `code` crosses the wire; the client raises the same class.

GpoolError
├── Invalid            400  a malformed or contradictory request
│   └── BadGpuSpec     400  a GPU requirement that does not parse; points at the character
├── NotSignedIn        401  no credentials, or unknown ones
├── Forbidden          403  authenticated, but not authorized
│   ├── StorageFull    403  the storage quota has no room; the detail says what to delete
│   └── UntrustedResult -   a pickled value from another account's node (raised by the client)
├── NotFound           404  missing, or not visible to the caller
├── Conflict           409  the object's state does not allow the request
│   ├── StaleLease     409  an effect under a lease that is no longer current
│   ├── KeyReused      409  the same Idempotency-Key with another request
│   └── AlreadyJoined  409  the machine's key belongs to a node of this pool
├── TooLarge           413  body, batch, artifact or log over its limit
├── Unprocessable      422  well-formed, but impossible on this server
├── TooMany            429  rate limit exceeded, or the queue is full
│   └── Overloaded     429  the server has too much work; others of this class of requests are refused too
├── TaskFailed         -    the task ended without success (raised by the client)
│   ├── TimedOut       -    it exceeded its time-out
│   ├── Cancelled      -    it was cancelled
│   └── LosesNodes     -    three different nodes were lost while it ran
├── Unreachable        503  no answer from the server; the only error that is retried
│   └── ReadOnly       503  an operator has made the pool read-only; reads still work
└── InternalFault      500  a bug in gpool; the detail names the log entry
"""

from __future__ import annotations

from collections.abc import Mapping


class GpoolError(Exception):
    """Base class. `detail` tells people what is wrong, the value, and the remedy."""

    code = "error"
    status = 500
    title = "Something went wrong"

    def __init__(self, detail: str, **members: object) -> None:
        super().__init__(detail)
        self.detail = detail
        self.members: Mapping[str, object] = members


class Invalid(GpoolError):
    code, status, title = "invalid", 400, "The request is not valid"


class BadGpuSpec(Invalid):
    code, title = "bad_gpu_spec", "The GPU requirement does not parse"

    def __init__(self, detail: str, *, text: str = "", position: int = 0) -> None:
        super().__init__(detail, text=text, position=position)
        self.text, self.position = text, position


class NotSignedIn(GpoolError):
    code, status, title = "not_signed_in", 401, "Not signed in"


class Forbidden(GpoolError):
    code, status, title = "forbidden", 403, "Not allowed"


class StorageFull(Forbidden):
    code, title = "storage_full", "The storage quota is full"


class UntrustedResult(Forbidden):
    code, title = "untrusted_result", "The value comes from another account's node"


class NotFound(GpoolError):
    code, status, title = "not_found", 404, "Not found"


class Conflict(GpoolError):
    code, status, title = "conflict", 409, "Not possible in this state"


class StaleLease(Conflict):
    code, title = "stale_lease", "The lease is not the current one"


class KeyReused(Conflict):
    code, title = "key_reused", "Idempotency-Key used for another request"


class AlreadyJoined(Conflict):
    code, title = "already_joined", "The machine is a node of this pool"


class TooLarge(GpoolError):
    code, status, title = "too_large", 413, "Too large"


class Unprocessable(GpoolError):
    code, status, title = "unprocessable", 422, "Cannot be done here"


class TooMany(GpoolError):
    code, status, title = "too_many", 429, "Too many requests"


class Overloaded(TooMany):
    code, title = "overloaded", "The server is overloaded"


class TaskFailed(GpoolError):
    code, title = "task_failed", "The task failed"


class TimedOut(TaskFailed):
    code, title = "timed_out", "The task ran past its time-out"


class Cancelled(TaskFailed):
    code, title = "cancelled", "The task was cancelled"


class LosesNodes(TaskFailed):
    code, title = "loses_nodes", "The task keeps losing its nodes"


class Unreachable(GpoolError):
    code, status, title = "unreachable", 503, "The server cannot be reached"


class ReadOnly(Unreachable):
    code, title = "read_only", "The pool is read-only for now"


class InternalFault(GpoolError):
    code, status, title = "internal_fault", 500, "A fault in gpool"


def _tree(root: type[GpoolError]) -> dict[str, type[GpoolError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found |= _tree(child)
    return found


BY_CODE: Mapping[str, type[GpoolError]] = _tree(GpoolError)
