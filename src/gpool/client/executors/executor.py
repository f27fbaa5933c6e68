"""`gpool.Executor`: a `concurrent.futures.Executor` whose calls run in the pool.

`submit` pickles the call; one thread per executor sends calls to one open batch and sets the futures from the batch's
result stream. The thread holds no reference to the executor, so an abandoned executor ends after its last call.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import operator
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor as StandardExecutor
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, ParamSpec, TypeVar, Unpack

from gpool.client import mapping
from gpool.client.client import Client, default_client, rendered_call, submit_calls
from gpool.client.options import Options, TaskOptions
from gpool.client.runs import Run, echo_log
from gpool.client.tasks import Task, runnable
from gpool.client.values import Raised, Result, by_value, outcome
from gpool.core.errors import GpoolError, TooMany

P = ParamSpec("P")
T = TypeVar("T")

_CLOSED = "cannot schedule new futures after shutdown"
_LARGEST_CHUNK = 1000
"""Calls of one request."""

_RETRY_S = 1.0
"""Pause before calls that a quota refused are sent again, unless a result comes before."""


class PoolFuture(Future[T], Generic[T]):
    """A future whose call runs in the pool. `run` is the submitted task; None while the call waits in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.run: Run | None = None
        self._cancelling = threading.Lock()

    def cancel(self) -> bool:
        """Cancel the call unless it runs or has ended; return whether it is cancelled.

        Sends requests if the call waits in the pool. `future.run.cancel()` stops a running call too.
        """
        if self.running():
            return False
        with self._cancelling:
            is_new = not self.cancelled()
            if not super().cancel():
                return False
            if is_new:
                self.set_running_or_notify_cancel()  # tells `wait` and `as_completed`
        # Last: the result stream may report the cancelled task before this request returns.
        if is_new and self.run is not None:
            with contextlib.suppress(GpoolError):
                self.run.cancel()
        return True

    def running(self) -> bool:
        """Return whether the call runs; asks the server about a call that waits in the pool."""
        if super().running() or self.done() or self.run is None:
            return super().running()
        return self.run.status in ("leased", "running") and not self.done()

    def is_waiting(self) -> bool:
        """Return whether the call has neither begun nor ended in this process."""
        return not (super().running() or self.done())

    def has_begun(self) -> bool:
        return super().running()

    def begin(self) -> bool:
        """Count as running from now on; return False if the call is cancelled."""
        with self._cancelling:
            return not self.cancelled() and self.set_running_or_notify_cancel()


@dataclass(frozen=True, slots=True)
class PendingCall:
    rendered: bytes
    future: PoolFuture[Any]


class CallDispatcher:
    """Sends calls and receives results, in a thread of its own that ends after the last call of a closed executor."""

    def __init__(self, client: Client, options: Options, max_workers: int | None) -> None:
        self._client = client
        self._idle = max_workers
        self._task: Task[..., Any] = Task(operator.call, options, lambda: client)
        self._echo = mapping.MapEcho(lambda id_: echo_log(client, id_), options.echoes)
        self._pending: deque[PendingCall] = deque()
        self._sending: list[PendingCall] = []
        self._sent: dict[int, PoolFuture[Any]] = {}
        self._inbox: mapping.ResultInbox = SimpleQueue()
        self._reader: mapping.ResultReader | None = None
        self._batch: str | None = None
        # Reentrant: the garbage collector may call `close` in the thread that holds the lock.
        self._lock, self._is_closed = threading.RLock(), False
        self.thread: threading.Thread | None = None

    def submit(self, function: Callable[..., T], args: Any, kwargs: Any) -> PoolFuture[T]:
        future: PoolFuture[T] = PoolFuture()
        with self._lock:
            if self._is_closed:
                raise RuntimeError(_CLOSED)
        try:
            rendered = rendered_call(self._client, self._task, (runnable(function), *args), kwargs)
        except GpoolError as error:  # as in ProcessPoolExecutor: what cannot be sent fails there
            future.set_exception(error)
            return future
        with self._lock:
            if self._is_closed:
                raise RuntimeError(_CLOSED)
            # Begun calls are the head of the queue: one behind a waiting call would hold a worker idle.
            if self._idle and (not self._pending or self._pending[-1].future.has_begun()):
                self._idle -= 1
                future.begin()
            self._pending.append(PendingCall(rendered, future))
            if self.thread is None:
                self.thread = threading.Thread(
                    target=self._work, name="gpool executor", daemon=True
                )
                _dispatchers.add(self)
                self.thread.start()
        self._inbox.put(None)
        return future

    def close(self, *, cancel: bool = False) -> None:
        with self._lock:
            self._is_closed = True
            waiting = [*self._sending, *self._pending] if cancel else []
            sent = list(self._sent.values()) if cancel else []
        for future in [*(call.future for call in reversed(waiting)), *reversed(sent)]:
            future.cancel()
        self._inbox.put(None)

    def join(self) -> None:
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join()

    def _work(self) -> None:
        try:
            while not self._is_finished():
                is_refused = self._send()
                self._receive(_RETRY_S if is_refused else None)
        except GpoolError as error:
            self._fail(error)
        finally:
            if self._reader is not None:
                self._reader.stop()
            if self._batch is not None:
                with contextlib.suppress(GpoolError):
                    submit_calls(self._client, self._task, [], self._batch, more=False)

    def _is_finished(self) -> bool:
        with self._lock:
            return self._is_closed and not self._pending and not self._sent

    def _chunk(self, most: int) -> list[PendingCall]:
        """Calls to send now, each with a worker if their number is limited; a cancelled one is dropped."""
        with self._lock:
            chunk: list[PendingCall] = []
            size_bytes = 0
            while self._pending and len(chunk) < most and size_bytes < mapping.CHUNK_BYTES:
                future = self._pending[0].future
                if self._idle is not None and future.is_waiting():
                    if not self._idle:
                        break
                    self._idle -= future.begin()
                call = self._pending.popleft()
                if not future.cancelled():
                    chunk.append(call)
                    size_bytes += len(call.rendered)
            self._sending = chunk
            return chunk

    def _send(self) -> bool:
        """Send what may be sent; return whether a quota refused a call that can be sent later."""
        most = _LARGEST_CHUNK
        while chunk := self._chunk(most):
            try:
                accepted = submit_calls(
                    self._client,
                    self._task,
                    [call.rendered for call in chunk],
                    self._batch,
                    more=True,
                )
            except TooMany as error:
                if len(chunk) == 1 and not self._sent:
                    self._end(chunk[0].future, Raised(error))
                    continue
                with self._lock:
                    self._pending.extendleft(reversed(chunk))
                if len(chunk) == 1:
                    return True
                most = len(chunk) // 2
                continue
            except GpoolError as error:
                for call in chunk:
                    self._end(call.future, Raised(error))
                continue
            with self._lock:
                for number, (call, id_) in enumerate(zip(chunk, accepted.ids, strict=True)):
                    call.future.run = self._run(id_)
                    self._sent[accepted.first_position + number] = call.future
            if self._batch is None:
                self._batch = accepted.batch
                self._reader = mapping.ResultReader(self._client.api, self._batch, self._inbox)
            for call in chunk:
                if call.future.cancelled():  # between the choice of the chunk and its submission
                    with contextlib.suppress(GpoolError):
                        assert call.future.run is not None
                        call.future.run.cancel()
        return False

    def _run(self, id_: str) -> Run:
        options = self._task.options
        pickle_requested = options.pickle_requested
        return Run(self._client, id_, function=True, own=True, pickle_requested=pickle_requested)

    def _receive(self, within_s: float | None) -> None:
        try:
            got = self._inbox.get(timeout=within_s)
        except Empty:
            return
        if isinstance(got, mapping.ReaderFailure):
            raise got.error
        for result in got or ():
            with self._lock:
                future = self._sent.pop(result.position, None)
            if future is not None:
                self._end(future, None if future.cancelled() else self._outcome(result))
            del future

    def _outcome(self, result: Result) -> object:
        try:
            self._echo.show(result)
            return outcome(
                result,
                self._client.artifacts.get,
                pickle_requested=self._task.options.pickle_requested,
                rules=self._client.rules,
            )
        except Exception as error:  # noqa: BLE001 - unpickling runs any code; the future reports it
            return Raised(error)

    def _fail(self, error: GpoolError) -> None:
        """The result stream is lost: no future would ever end."""
        with self._lock:
            self._is_closed = True
            futures = [*self._sent.values(), *(call.future for call in self._pending)]
            self._sent.clear()
            self._pending.clear()
        for future in futures:
            self._end(future, Raised(error))

    def _end(self, future: PoolFuture[Any], value: object) -> None:
        with self._lock:
            if self._idle is not None and future.has_begun():
                self._idle += 1
        with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
            if type(value) is Raised:
                future.set_exception(value.exception)
            else:
                future.set_result(value)


_dispatchers: weakref.WeakSet[CallDispatcher] = weakref.WeakSet()


@atexit.register
def _finish_calls() -> None:
    """Wait for the calls of all executors at the interpreter's exit, as the standard executors do."""
    for dispatcher in list(_dispatchers):
        dispatcher.close()
    for dispatcher in list(_dispatchers):
        dispatcher.join()


class Executor(StandardExecutor):
    """`concurrent.futures.Executor` over a pool: `submit`, `map`, `shutdown`, and a context manager.

    With `max_workers` at most that many calls are in the pool at once, and a call counts as running from its submission
    on. Without it all calls are submitted at once, and a call counts as running once it is placed on a node.
    """

    def __init__(
        self,
        max_workers: int | None = None,
        *,
        client: Client | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        """`options`: of every call, as of `@gpool.task`. `client`: default the configured pool's."""
        if max_workers is not None and max_workers <= 0:
            raise ValueError("max_workers must be greater than 0")
        wanted = Options.of(options)
        wanted.members()
        self._dispatcher = CallDispatcher(client or default_client(), wanted, max_workers)
        weakref.finalize(self, self._dispatcher.close).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> PoolFuture[T]:
        """Run `fn(*args, **kwargs)` in the pool. Arguments are sent as they are now."""
        return self._dispatcher.submit(fn, args, kwargs)

    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
    ) -> Iterator[T]:
        """`map(fn, *iterables)` in the pool, in order; `chunksize` calls form one task.

        All inputs are read at once, as in the standard library; `Task.map` reads them on demand.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if chunksize == 1:
            return super().map(fn, *iterables, timeout=timeout)
        chunks = _chunks(zip(*iterables), chunksize)  # noqa: B905 - as builtin map
        call = partial(by_value(_call_each), runnable(fn))
        return _chained(super().map(call, chunks, timeout=timeout))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accept no more calls; with `cancel_futures`, cancel those that do not run; with `wait`, wait for the rest."""
        self._dispatcher.close(cancel=cancel_futures)
        if wait:
            self._dispatcher.join()


def _call_each(function: Callable[..., T], calls: list[tuple[Any, ...]]) -> list[T]:
    return [function(*args) for args in calls]


def _chunks(calls: Iterator[tuple[Any, ...]], size: int) -> Iterator[list[tuple[Any, ...]]]:
    while chunk := list(itertools.islice(calls, size)):
        yield chunk


def _chained(lists: Iterator[list[T]]) -> Iterator[T]:
    """Items of the lists; keeps no reference to an item that was yielded."""
    for found in lists:
        found.reverse()
        while found:
            yield found.pop()
