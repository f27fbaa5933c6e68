"""Values that cross the network: functions and arguments pickled, results decoded into values or exceptions.

Results are data (`wire.values`). A pickle is loaded only from the caller's own node, from one of a trusted team or with
`results="pickle"`: loading runs code chosen by the node's owner.
One file because functions, arguments and results cross the network under one set of rules.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import os
import pickle
import site
import sys
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar
from urllib.parse import quote

import cloudpickle  # type: ignore[import-untyped]
import msgspec

from gpool.core.errors import (
    Cancelled,
    Forbidden,
    InternalFault,
    Invalid,
    LosesNodes,
    NotFound,
    TaskFailed,
    TimedOut,
    TooLarge,
    UntrustedResult,
)
from gpool.core.specs import gpu
from gpool.core.terminal import plain, printable
from gpool.wire.imported_classes import BadValue, MissingClass
from gpool.wire.values import (
    DATA,
    MAX_VALUE_BYTES,
    NOT_DATA,
    decode,
    reason_for_pickle,
)

T = TypeVar("T")

PROTOCOL = 5
RESULTS_AS_DATA = b"\ngpool:results=data\n"
"""After a function's pickle, where unpickling stops: the runner sends values as data (as in agent/runner/serve.py)."""

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

_PLAIN = frozenset({int, float, str, bytes, bool, type(None)})
"""Types whose pickle names no class, so the plain C pickler suffices."""

_ONE_AT_A_TIME = threading.Lock()
"""cloudpickle's register of modules by value is global to the process."""

PICKLING_ERRORS = (
    pickle.PicklingError,
    TypeError,
    AttributeError,
    ValueError,
    NotImplementedError,
    RecursionError,
    ImportError,
    OSError,
    RuntimeError,
)


class OwnModules:
    """The caller's own modules: next to the script, or editable; not installed ones."""

    def __init__(self, installed: Iterable[str] | None = None) -> None:
        self._installed = tuple(_installed_folders() if installed is None else installed)
        self._known: dict[str, bool] = {}

    def is_own(self, name: str) -> bool:
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = self._look(name)
        return known

    def _look(self, name: str) -> bool:
        if name == "__main__" or name.partition(".")[0] == "gpool":
            return False  # cloudpickle sends __main__ by value anyway; nodes have gpool
        module = sys.modules.get(name)
        if module is None:
            return False
        file = getattr(module, "__file__", None)
        if file is None:
            folders = list(getattr(module, "__path__", ()))
            if not folders:
                return False  # built in
            file = folders[0]
        real = str(Path(file).resolve())
        return not any(real.startswith(folder) for folder in self._installed)


def _installed_folders() -> set[str]:
    found = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    found |= {*site.getsitepackages(), site.getusersitepackages()}
    return {str(Path(folder).resolve()) + os.sep for folder in found if folder} | {"<frozen"}


_own = OwnModules()


def is_sent_by_value(module: str | None) -> bool:
    """Return whether functions and classes of this module are sent with their code, not by name."""
    return module is None or module == "__main__" or _own.is_own(module)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle is untyped
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=PROTOCOL)
        self.registered: list[types.ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        kind = type(obj)
        if kind is types.ModuleType:
            self._meet(obj.__name__)
        elif kind is types.FunctionType or issubclass(kind, type):
            self._meet(getattr(obj, "__module__", None))
        return super().reducer_override(obj)

    def _meet(self, name: str | None) -> None:
        if name is None or not _own.is_own(name):
            return
        if name not in cloudpickle.cloudpickle._PICKLE_BY_VALUE_MODULES:
            module = sys.modules[name]
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)


def dumps(value: object) -> bytes:
    with _ONE_AT_A_TIME, io.BytesIO() as file:
        pickler = _Pickler(file)
        try:
            pickler.dump(value)
        finally:
            for module in pickler.registered:
                cloudpickle.unregister_pickle_by_value(module)
        return file.getvalue()


def by_value(function: Callable[..., T]) -> Callable[..., T]:
    """Copy of a module's function that is sent with its code: a sandbox need not have gpool.

    It may use builtins and modules that the function imports itself, no other globals.
    """
    assert isinstance(function, types.FunctionType)
    copy = types.FunctionType(function.__code__, {"__name__": "__main__"}, function.__name__)
    copy.__module__ = "__main__"
    return copy


def dumps_function(function: Callable[..., object], name: str) -> bytes:
    """`Invalid` says why the function cannot be pickled."""
    try:
        return dumps(function)
    except PICKLING_ERRORS as exc:
        raise Invalid(
            f"the function {name} cannot be sent: {exc}. "
            "It (or a global it uses) holds something tied to this process, such as a lock, "
            "a connection or an open file; create that inside the function."
        ) from exc


def dumps_call(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> bytes:
    """`Invalid` names the argument that cannot be pickled."""
    for value in args:
        if type(value) not in _PLAIN:
            break
    else:
        if not kwargs:
            return pickle.dumps((args, {}), PROTOCOL)
    try:
        return dumps((tuple(args), dict(kwargs)))
    except PICKLING_ERRORS as exc:
        raise Invalid(_which_argument(function, args, kwargs) or f"arguments: {exc}") from exc


def _which_argument(
    function: Callable[..., object], args: Sequence[object], kwargs: Mapping[str, object]
) -> str:
    name = getattr(function, "__name__", "the function")
    labels = [f"number {position + 1}" for position in range(len(args))]
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    for position, parameter in enumerate(parameters[: len(args)]):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            break
        labels[position] = repr(parameter.name)
    labels += [repr(keyword) for keyword in kwargs]
    for label, value in zip(labels, [*args, *kwargs.values()], strict=True):
        try:
            dumps(value)
        except PICKLING_ERRORS as exc:
            return (
                f"argument {label} of {name} cannot be sent: "
                f"a {type(value).__module__}.{type(value).__qualname__} ({exc})"
            )
    return ""


def loads(content: bytes | bytearray | memoryview) -> Any:
    """Unpickle a value from a trusted node only."""
    return pickle.loads(content)


class Fetch(Protocol):
    """Return a whole artifact by its hash; `TooLarge` if it has more than `most_bytes`."""

    def __call__(self, sha256: str, most_bytes: int | None = None) -> bytes | bytearray: ...


class OutputArtifact(msgspec.Struct, frozen=True):
    path: str
    sha256: str
    size_bytes: int
    executable: bool = False


class Result(msgspec.Struct, frozen=True):
    """`wire.documents.ResultDocument`, decoded by msgspec: a map reads thousands per second.

    The node or its owner wrote `error_text` and `node_name`: control characters are replaced here, before any use.
    """

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
    printed: bool = False  # it has output

    def __post_init__(self) -> None:
        if self.error_text:
            msgspec.structs.force_setattr(self, "error_text", plain(self.error_text))
        if self.node_name and not self.node_name.isprintable():
            msgspec.structs.force_setattr(self, "node_name", printable(self.node_name))


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


class TrustedTeams:
    """Teams whose members' nodes may send pickles, compared by the ids of users. None is trusted by default.

    Teams and members are read when a pickle arrives and kept for `KEPT_S`: a member who left is not trusted after that.
    """

    KEPT_S = 30.0

    def __init__(
        self,
        names: Sequence[str],
        get_json: Callable[[str], Any],
        team_id: Callable[[str], str],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`names`: as `team:NAME`. `team_id`: id of one of the caller's teams; `NotFound` if it is in none of that name."""
        self.names = tuple(names)
        self._get_json, self._team_id, self._monotonic = get_json, team_id, monotonic
        self._lock, self._read_at = threading.Lock(), 0.0
        self._members: frozenset[str] | None = None
        self._owners: dict[str, str] = {}

    def include_owner_of(self, node: str | None) -> bool:
        """Return whether the present owner of the node is a member; a removed node has none."""
        if not self.names or node is None:
            return False
        with self._lock:
            now = self._monotonic()
            if self._members is None or now - self._read_at > self.KEPT_S:
                self._members, self._read_at = self._read_members(), now
                self._owners.clear()
            owner = self._owners.get(node)
            if owner is None:
                owner = self._owners[node] = self._owner(node)
            return owner in self._members

    def _read_members(self) -> frozenset[str]:
        ids = [self._team_id(name.removeprefix("team:")) for name in self.names]
        pages = [self._get_json(f"/v1/teams/{quote(id_, safe='')}/members") for id_ in ids]
        return frozenset(str(one["user"]) for page in pages for one in page["items"])

    def _owner(self, node: str) -> str:
        try:
            return str(self._get_json(f"/v1/nodes/{quote(node, safe='')}")["owner"])
        except NotFound:
            return ""


@dataclass(frozen=True, slots=True)
class ReadingRules:
    """Rules for values from nodes of other accounts."""

    max_value_bytes: int = MAX_VALUE_BYTES
    is_trusted_node: Callable[[str | None], bool] = lambda _: False


DEFAULT_RULES = ReadingRules()


def outcome(
    result: Result,
    fetch: Fetch,
    *,
    pickle_requested: bool,
    is_own_task: bool = True,
    rules: ReadingRules = DEFAULT_RULES,
) -> object:
    """Value or `Raised`.

    `pickle_requested`: also load pickles of other accounts' nodes. `is_own_task`: the function is this program's, so
    its pickles may be loaded at all.
    """
    is_own = pickle_requested or (result.own_node and is_own_task)
    reader = ResultReading(result, fetch, rules, is_own, is_own_task)
    if result.reason == "returned" and result.status == "succeeded":
        try:
            content = reader.content()
            if content[:1] == DATA:
                return decode(content, filter_errors=not is_own)
            reason, pickled = "", memoryview(content)
            if content[:1] == NOT_DATA:
                reason, pickled = reason_for_pickle(content)
        except BadValue as exc:
            return Raised(_undecodable(result, exc))
        except TaskFailed as exc:  # too large
            return Raised(exc)
        if not reader.is_trusted():
            return Raised(_untrusted(result, reason, is_own_task))
        return loads(pickled)
    if result.reason == "raised":
        return Raised(_raised(result, reader))
    return Raised(failure(result))


class ResultReading(msgspec.Struct, frozen=True):
    """One result and the rules for it. `is_own`: from the caller's node, or pickles were requested."""

    result: Result
    fetch: Fetch
    rules: ReadingRules
    is_own: bool
    is_own_task: bool

    def is_trusted(self) -> bool:
        """Return whether a pickle may be loaded; asks the server about trusted teams, so only where it matters."""
        return self.is_own or (self.is_own_task and self.rules.is_trusted_node(self.result.node))

    def content(self) -> bytes | bytearray:
        """Bytes of the value; `TaskFailed` if they are too many."""
        inline, limit = self.result.value, self.rules.max_value_bytes
        if inline and (self.is_own or len(inline) <= limit or self.is_trusted()):
            return inline
        if inline:
            raise self._too_large()
        return self._fetched()

    def _fetched(self) -> bytes | bytearray:
        result = self.result
        if not result.value_sha256:
            raise InternalFault(
                f"the value of task {result.id} is missing from the server's response"
            )
        most_bytes = None if self.is_trusted() else self.rules.max_value_bytes
        try:
            content = self.fetch(result.value_sha256, most_bytes)
        except TooLarge as exc:
            raise self._too_large() from exc
        if hashlib.sha256(content).hexdigest() != result.value_sha256:
            raise InternalFault(
                f"the value of task {result.id} does not match its hash; fetch it again"
            )
        return content

    def _too_large(self) -> TaskFailed:
        limit = self.rules.max_value_bytes
        return TaskFailed(
            f"the value of task {self.result.id}, from {_where(self.result)}, has more than {size_text(limit)}; "
            "return less per call; or accept more with GPOOL_MAX_VALUE, max_value in the profile or "
            f"gpool.Client(max_value={gpu.typed_size(4 * limit)!r}), in twice as much memory, and read it again with "
            f"client.get({self.result.id!r}).result()",
            id=self.result.id,
            node=self.result.node,
        )


def size_text(size_bytes: int) -> str:
    return f"{size_bytes >> 20} MiB" if not size_bytes % (1 << 20) else f"{size_bytes:,} bytes"


def _where(result: Result) -> str:
    if result.node is None:
        return "a node whose owner the server does not report (it may be older than this client)"
    # the owner chose the name: no control character of it may reach a terminal
    name = printable(result.node_name or "")
    node = f"{name} ({result.node})" if name else result.node
    if result.own_node:
        return f"your node {node}"
    return f"node {node}, which belongs to another account or was removed"


def _undecodable(result: Result, bad: BadValue) -> TaskFailed:
    text = f"the value of task {result.id}, from {_where(result)}, cannot be decoded: {bad}"
    if isinstance(bad, MissingClass):
        text += f". The value is kept: client.get({result.id!r}).result() reads it again"
    return TaskFailed(text, id=result.id, node=result.node)


def _untrusted(result: Result, reason: str, is_own_task: bool) -> Forbidden:
    if not is_own_task and result.own_node:
        return Forbidden(
            f"task {result.id} was not submitted by this program, so its pickled value is not loaded; "
            "use client.get(id, trust=True) if the function is yours"
        )
    returned = f"{printable(reason)}, which is sent pickled," if reason else "a pickled value"
    return UntrustedResult(
        f"task {result.id} returned {returned} from {_where(result)}. It was not unpickled: unpickling would let "
        "that node's owner run code on this machine. Return numbers, text, lists, dicts, dataclasses, numpy arrays "
        'or torch tensors; or, if you trust the owner, use @gpool.task(results="pickle"), or '
        f'client.get({result.id!r}, results="pickle") for this value; or, if the owner is in a team whose members you '
        'all trust, gpool.Client(trust=["team:NAME"]) or GPOOL_TRUST=team:NAME',
        id=result.id,
        node=result.node,
    )


def _raised(result: Result, reader: ResultReading) -> BaseException:
    """The exception, or `TaskFailed` with the text if it cannot be rebuilt; the remote traceback is the cause."""
    exception: object = None
    reason = ""
    try:
        if result.value or result.value_sha256:
            exception = _exception(reader)
    except (*PICKLING_ERRORS, EOFError, KeyError, IndexError, BadValue, TaskFailed) as exc:
        reason = f"; its exception could not be rebuilt here: {exc}"
    if not isinstance(exception, Exception) or type(exception) is TaskFailed:
        last = result.error_text.strip().rpartition("\n")[2] or "it raised an exception"
        exception = TaskFailed(f"task {result.id} failed: {last}{reason}", id=result.id)
    if result.error_text:
        exception.__cause__ = RemoteTraceback(result.error_text)
    return exception


def _exception(reader: ResultReading) -> object:
    content = reader.content()
    if content[:1] == DATA:
        return decode(content, filter_errors=not reader.is_own)
    return loads(content) if reader.is_trusted() else None


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
        "bad_output": "ran out of disk; ask for more with --disk, or disk="
        if "disk limit" in text
        else "did not write its outputs",
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
