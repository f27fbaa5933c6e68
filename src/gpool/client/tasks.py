"""`@gpool.task`: a Python function that can also run in the pool. A direct call runs it locally."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import operator
import threading
import types
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar, Unpack, cast, overload

from gpool.client.options import FunctionOptions, Options
from gpool.client.runs import Run
from gpool.client.values import RESULTS_AS_DATA, by_value, dumps_function, is_sent_by_value
from gpool.core.errors import Invalid

if TYPE_CHECKING:
    from gpool.client.client import Client

P = ParamSpec("P")
R = TypeVar("R")
V = TypeVar("V")


class Task(Generic[P, R]):
    """A function with its options. It is pickled with the globals and modules it uses, as they are at each call."""

    def __init__(
        self, function: Callable[P, R], options: Options, client: Callable[[], Client]
    ) -> None:
        if options.nodes is not None and options.nodes != 1:
            raise Invalid(
                f"nodes is {options.nodes}, but a function runs on one node; a gang runs a command on every node: "
                'gpool.run(["python", "train.py"], nodes=2)'
            )
        self.function = function
        self.options = options
        self._client = client
        self._pickled = b""
        self._references: References | None = None
        self._pickled_check = b""
        self._check_references: References | None = None
        functools.update_wrapper(self, function)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<gpool.task {self.label}>"

    def __reduce__(self) -> tuple[Any, ...]:
        # In the sandbox a task is the plain function, so gpool need not be installed there.
        return operator.itemgetter(0), ((self.function,),)

    @property
    def label(self) -> str:
        return self.options.name or getattr(self.function, "__qualname__", "function")[:200]

    def pickled(self) -> bytes:
        """Function as the runner receives it, with the format of its results; the same object while nothing changed."""
        if self._references is None:
            _refuse_unpicklable_returns(self.function, self.label)
        elif self._references.are_unchanged():
            return self._pickled
        self._references = References(self.function)
        pickled = dumps_function(runnable(self.function), self.label)
        if not self.options.pickle_requested:
            pickled += RESULTS_AS_DATA
        if pickled != self._pickled:
            self._pickled = pickled
        return self._pickled

    def pickled_check(self) -> bytes:
        """Check function as the runner receives it, empty without one; the same object while nothing changed."""
        return self._pickled_judge(self.options.check, _run_check, "check")

    def pickled_comparator(self) -> bytes:
        """Comparator as the runner receives it, empty without one; the same object while nothing changed."""
        compare = self.options.compare
        return self._pickled_judge(
            compare if callable(compare) else None, _run_comparator, "comparator"
        )

    def _pickled_judge(
        self, check: Callable[..., object] | None, running: Callable[..., object], what: str
    ) -> bytes:
        """Pickle the check or the comparator, of which a task has one at most, to be called by `running`."""
        if check is None:
            return b""
        if self._check_references is not None and self._check_references.are_unchanged():
            return self._pickled_check
        self._check_references = References(check)
        checking = functools.partial(by_value(running), runnable(check))
        pickled = dumps_function(checking, f"{what} of {self.label}") + RESULTS_AS_DATA
        if pickled != self._pickled_check:
            self._pickled_check = pickled
        return self._pickled_check

    @overload
    def remote(self: Task[P, Coroutine[Any, Any, V]], *args: P.args, **kwargs: P.kwargs) -> V: ...
    @overload
    def remote(self, *args: P.args, **kwargs: P.kwargs) -> R: ...
    def remote(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run in the pool and wait; return the value, or raise the exception with the remote traceback as cause.

        Values are data: numbers, text, bytes, containers, dates, numpy arrays, torch tensors, and dataclasses, named
        tuples and enumerations that this program has imported. An exception is raised as the class this program has
        imported, else as `TaskFailed` with its text. Any other value is pickled, and unpickling lets the node's owner run
        code in this process: from another account's node it raises `UntrustedResult` unless the task has
        `results="pickle"`.
        """
        return self._client().call(self, args, kwargs)

    @overload
    def submit(
        self: Task[P, Coroutine[Any, Any, V]], *args: P.args, **kwargs: P.kwargs
    ) -> Run[V]: ...
    @overload
    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[R]: ...
    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run[Any]:
        """Run in the pool without waiting."""
        return self._client().submit_call(self, args, kwargs)

    @overload
    def map(
        self: Task[P, Coroutine[Any, Any, V]],
        *iterables: Iterable[Any],
        return_exceptions: bool = False,
        progress: bool = True,
    ) -> MapResults[V]: ...
    @overload
    def map(
        self, *iterables: Iterable[Any], return_exceptions: bool = False, progress: bool = True
    ) -> MapResults[R]: ...
    def map(
        self, *iterables: Iterable[Any], return_exceptions: bool = False, progress: bool = True
    ) -> MapResults[Any]:
        """Run in parallel for each set of arguments; yield values in input order as soon as they are known.

        Inputs are consumed on demand and may be endless. The first exception is raised and cancels the rest; with
        `return_exceptions`, exceptions are yielded instead. On a terminal a bar counts the calls, unless `progress` is
        False. `async for` works as `for` does.
        """
        if not iterables:
            raise TypeError("map needs at least one iterable of arguments")
        return self._client().map(
            self, iterables, return_exceptions=return_exceptions, progress=progress
        )

    def with_options(self, **changes: Unpack[FunctionOptions]) -> Task[P, R]:
        """The same function with changed options."""
        options = {
            name: getattr(self.options, name)
            for name in Options.__dataclass_fields__
            if name not in changes
        }
        return Task(self.function, Options.of({**options, **changes}), self._client)


class MapResults(Generic[R]):
    """Values of a map in input order, for `for` and `async for`. `close` cancels the calls that have not ended."""

    def __init__(self, values: Generator[R, None, None], stopped: threading.Event) -> None:
        """`stopped` ends `values` at its next wait, from any thread."""
        self._values, self._stopped = values, stopped

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> R:
        return next(self._values)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> R:
        waiting = asyncio.create_task(asyncio.to_thread(next, self._values, _MISSING))
        try:
            value = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            self._stopped.set()
            raise
        if value is _MISSING:
            raise StopAsyncIteration
        return cast(R, value)

    def close(self) -> None:
        self._stopped.set()
        with contextlib.suppress(ValueError):  # a thread waits in it, and notices `stopped`
            self._values.close()

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        await asyncio.to_thread(self.close)


_MISSING = object()
_CONSTANTS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, type(...), types.BuiltinFunctionType}
)


class References:
    """Objects that a function reads by name, to notice a change without pickling the function again.

    Constants, functions and installed modules can change only by being replaced, which is noticed by comparing
    identities. Of anything else (a list, an array, a class or module of the caller's) only a new pickle tells.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._globals: list[tuple[dict[str, Any], str, object]] = []
        self._cells: list[tuple[types.CellType, object]] = []
        self._seen: set[int] = set()
        self._are_comparable = self._is_comparable(function)

    def are_unchanged(self) -> bool:
        return (
            self._are_comparable
            and all(names.get(name, _MISSING) is value for names, name, value in self._globals)
            and all(_content(cell) is value for cell, value in self._cells)
        )

    def _is_comparable(self, value: object) -> bool:
        if isinstance(value, Task):
            value = value.function
        if type(value) in _CONSTANTS or id(value) in self._seen:
            return True
        if type(value) is tuple:
            return all(map(self._is_comparable, value))
        if isinstance(value, types.ModuleType):
            return not is_sent_by_value(value.__name__)
        if isinstance(value, type):
            return not is_sent_by_value(value.__module__) and "<locals>" not in value.__qualname__
        if type(value) is not types.FunctionType:
            return False
        if not is_sent_by_value(value.__module__) and "<locals>" not in value.__qualname__:
            return True
        self._seen.add(id(value))
        return self._reads_comparable(value)

    def _reads_comparable(self, function: types.FunctionType) -> bool:
        found: list[object] = [function.__defaults__, *(function.__kwdefaults__ or {}).values()]
        for name in _names(function.__code__):
            value = function.__globals__.get(name, _MISSING)
            self._globals.append((function.__globals__, name, value))
            found.append(None if value is _MISSING else value)
        for cell in function.__closure__ or ():
            self._cells.append((cell, _content(cell)))
            found.append(_content(cell))
        return not function.__dict__ and all(map(self._is_comparable, found))


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that the code and the functions within it may read from the module's globals."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def runnable(function: Callable[P, Any]) -> Callable[P, Any]:
    """The function as a sandbox runs it: an async one is run to its end in an event loop of its own."""
    if isinstance(function, Task):
        function = function.function
    if inspect.iscoroutinefunction(function):
        return functools.partial(by_value(_run_coroutine), function)
    return function


def _run_coroutine(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    import asyncio  # noqa: PLC0415 - it runs in the sandbox, without this module's globals

    return asyncio.run(function(*args, **kwargs))


def _run_check(check: Callable[..., object], result: object, arguments: bytes) -> bool:
    """Run a check function with a result that the server decoded and the call's own pickled arguments."""
    import pickle  # noqa: PLC0415 - it runs in the sandbox, without this module's globals

    args, kwargs = pickle.loads(arguments)
    return bool(check(result, *args, **kwargs))


def _run_comparator(compare: Callable[..., object], values: list[tuple[object, ...]]) -> str:
    """Compare every pair of values; return a letter T or F for each. An empty tuple stands for a value that is no data.

    A pair for which the comparator raises differs: one malformed value must not end the comparison of the others. Its
    exception is raised if it cannot compare any value even with itself.
    """
    import itertools  # noqa: PLC0415 - it runs in the sandbox, without this module's globals

    error: Exception | None = None
    for one in filter(None, values):
        try:
            compare(one[0], one[0])
        except Exception as raised:  # noqa: BLE001 - of the consumer's function; raised below
            error = raised
        else:
            break
    else:
        raise error or ValueError("no value to compare")
    letters = ""
    for one, other in itertools.combinations(values, 2):
        try:
            letters += "T" if one and other and compare(one[0], other[0]) else "F"
        except Exception:  # noqa: BLE001 - of the consumer's function: these two differ
            letters += "F"
    return letters


def _refuse_unpicklable_returns(function: Callable[..., object], label: str) -> None:
    """Generators cannot leave the process that created them."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{label} is a generator, which cannot be returned from the pool; return a list"
        )


def _function(given: Any) -> Callable[..., Any]:
    """Unwrap the decorated function; `TypeError` for classes and methods says what to write instead."""
    if isinstance(given, staticmethod):
        return _function(given.__func__)
    is_method = isinstance(given, classmethod)
    function = given.__func__ if is_method else given
    name = getattr(function, "__qualname__", "").rpartition("<locals>.")[2]
    is_class = inspect.isclass(function) and function.__module__ != "builtins"  # `int` will do
    if is_class:
        raise TypeError(
            f"{name} is a class; @gpool.task takes a function: write one that creates and uses the object, "
            "and pass its inputs as arguments"
        )
    if is_method or ("." in name and _first_parameter(function) in ("self", "cls")):
        raise TypeError(
            f"{name} is a method; @gpool.task takes a function: write one outside the class, "
            "and pass the needed attributes as arguments"
        )
    if not callable(function):
        raise TypeError(f"@gpool.task takes options by name and a function, not {function!r}")
    return cast(Callable[..., Any], function)


def _first_parameter(function: object) -> str:
    code = function.__code__ if inspect.isfunction(function) else None
    return code.co_varnames[0] if code is not None and code.co_argcount else ""


class Decorator:
    """`@task` and `@task(gpu=...)`; `client` is called at the first remote call."""

    def __init__(self, client: Callable[[], Client]) -> None:
        self._client = client

    @overload
    def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...
    @overload
    def __call__(
        self, /, **options: Unpack[FunctionOptions]
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...
    def __call__(
        self, function: Callable[P, R] | None = None, /, **options: Unpack[FunctionOptions]
    ) -> Any:
        """Turn a function into a task; the options are those of `FunctionOptions`, explained in docs/options.md."""
        wanted = Options.of(options)
        wanted.members()  # raises for malformed options where they are written
        if function is not None:
            return self._task(function, wanted)
        return lambda given: self._task(given, wanted)

    def _task(self, function: Callable[P, R], options: Options) -> Task[P, R]:
        return Task(_function(function), options, self._client)
