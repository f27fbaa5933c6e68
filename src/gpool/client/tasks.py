"""`@gpool.task`: a Python function that can also run in the pool. A direct call runs it locally."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, Unpack, cast, overload

from gpool.client.options import Options, TaskOptions
from gpool.client.runs import Run
from gpool.client.values import dumps_function
from gpool.core.errors import Invalid

if TYPE_CHECKING:
    from gpool.client.client import Client

P = ParamSpec("P")
R = TypeVar("R")


class Task(Generic[P, R]):
    """A function with its options. It is pickled, with its modules, at the first remote call."""

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
        self._pickled: bytes | None = None
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
        if self._pickled is None:
            _refuse_unpicklable_returns(self.function, self.label)
            self._pickled = dumps_function(self.function, self.label)
        return self._pickled

    def remote(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run in the pool and wait; return the value, or raise the exception with the remote traceback as cause.

        A value from another account's node raises `UntrustedResult`, an exception from there becomes `TaskFailed` with
        its text, unless the task has `results="pickle"`: unpickling lets that node's owner run code in this process.
        """
        return cast(R, self._client().call(self, args, kwargs))

    def submit(self, *args: P.args, **kwargs: P.kwargs) -> Run:
        """Run in the pool without waiting."""
        return self._client().submit_call(self, args, kwargs)

    def map(self, *iterables: Iterable[Any], return_exceptions: bool = False) -> Iterator[R]:
        """Run in parallel for each set of arguments; yield values in input order as soon as they are known.

        Inputs are consumed on demand and may be endless. The first exception is raised and cancels the rest; with
        `return_exceptions`, exceptions are yielded instead.
        """
        if not iterables:
            raise TypeError("map needs at least one iterable of arguments")
        found = self._client().map(self, iterables, return_exceptions=return_exceptions)
        return cast(Iterator[R], found)

    def with_options(self, **changes: Unpack[TaskOptions]) -> Task[P, R]:
        """The same function with changed options."""
        options = {
            name: getattr(self.options, name)
            for name in Options.__dataclass_fields__
            if name not in changes
        }
        other = Task(self.function, Options.of({**options, **changes}), self._client)
        other._pickled = self._pickled
        return other


def _refuse_unpicklable_returns(function: Callable[..., object], label: str) -> None:
    """Coroutines and generators cannot leave the process that created them."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(
            f"{label} is async, and a coroutine cannot be returned from the pool; use a plain function that calls asyncio.run"
        )
    if inspect.isgeneratorfunction(function):
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
        self, /, **options: Unpack[TaskOptions]
    ) -> Callable[[Callable[P, R]], Task[P, R]]: ...
    def __call__(
        self, function: Callable[P, R] | None = None, /, **options: Unpack[TaskOptions]
    ) -> Any:
        """Turn a function into a task; the options are those of `TaskOptions`, explained in docs/options.md."""
        wanted = Options.of(options)
        wanted.members()  # raises for malformed options where they are written
        if function is not None:
            return self._task(function, wanted)
        return lambda given: self._task(given, wanted)

    def _task(self, function: Callable[P, R], options: Options) -> Task[P, R]:
        return Task(_function(function), options, self._client)
