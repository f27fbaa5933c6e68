"""joblib's backend `gpool`: batches of `joblib.Parallel` run in the pool, through `gpool.Executor`.

Imports joblib, which gpool does not install; `import gpool.joblib` registers the backend.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from joblib.parallel import (  # type: ignore[import-untyped]
    ParallelBackendBase,
    register_parallel_backend,
)

from gpool.client.client import Client
from gpool.client.executors.executor import Executor

ALL_WORKERS = 256
"""Calls in the pool at once for `n_jobs=-1`; its scheduler decides how many of them run."""


class JoblibBackend(ParallelBackendBase):  # type: ignore[misc]  # joblib is untyped
    """`parallel_config(backend="gpool", gpu=1, pip=["scikit-learn"])`; other options are those of `@gpool.task`."""

    supports_retrieve_callback = True
    supports_sharedmem = False
    uses_threads = False

    def __init__(
        self,
        nesting_level: int | None = None,
        inner_max_num_threads: int | None = None,
        client: Client | None = None,
        **options: Any,
    ) -> None:
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        self._client, self._options = client, options
        self._executor: Executor | None = None
        self._workers = 1

    def __reduce__(self) -> tuple[Any, ...]:
        """A nested backend travels with the calls; this one, with its client, does not."""
        raise TypeError("the gpool backend of joblib cannot be sent to the pool")

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        if n_jobs is None:
            return 1
        return ALL_WORKERS if n_jobs < 0 else n_jobs

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_others: Any) -> int:
        self.parallel = parallel
        self._workers = self.effective_n_jobs(n_jobs)
        self._open()
        return self._workers

    def submit(self, func: Callable[[], Any], callback: Any = None) -> Future[Any]:
        assert self._executor is not None
        future = self._executor.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def apply_async(self, func: Callable[[], Any], callback: Any = None) -> Future[Any]:
        """`submit` under its name before joblib 1.5."""
        return self.submit(func, callback)

    def retrieve_result_callback(self, out: Future[Any]) -> Any:
        return out.result()

    def terminate(self) -> None:
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def abort_everything(self, ensure_ready: bool = True) -> None:
        self.terminate()
        if ensure_ready:
            self._open()

    def _open(self) -> None:
        if self._executor is None:
            self._executor = Executor(self._workers, client=self._client, **self._options)


def register() -> None:
    """Make `gpool` known to `joblib.parallel_config`."""
    register_parallel_backend("gpool", JoblibBackend)
