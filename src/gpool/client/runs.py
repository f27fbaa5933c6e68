"""`Run`: a submitted task to follow, wait for or cancel.

Unpickles only values of functions this program submitted, from the caller's own nodes unless requested otherwise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload
from urllib.parse import quote

from gpool.client import logs
from gpool.client.logs import OnProgress, Printed
from gpool.client.results import Raised, Result, decode_result, failure, outcome
from gpool.core.errors import Forbidden, GpoolError

if TYPE_CHECKING:
    from gpool.client.client import Client

log = logging.getLogger(__name__)

EXPLAINED_AFTER_S = 20.0
"""Waiting time for a task to start after which the reason is logged."""

LONGEST_WAIT_S = 30
"""Longest wait of one request for a task's end; a longer wait repeats the request."""


class Run:
    """A submitted task. Each property sends a request until the task's end is known."""

    def __init__(
        self,
        client: Client,
        task: str,
        *,
        function: bool,
        own: bool,
        pickle_requested: bool = False,
    ) -> None:
        self._client, self.id = client, task
        self._function, self._own = function, own
        self._pickle_requested = pickle_requested
        self._known: Result | None = None

    def __repr__(self) -> str:
        return f"Run({self.id!r})"

    @property
    def status(self) -> str:
        """`queued`, `leased`, `running`, `succeeded`, `failed` or `cancelled`."""
        return str(self.document()["status"]) if self._known is None else self._known.status

    @property
    def cost(self) -> None:
        """None: this version charges nothing."""
        return

    def document(self) -> dict[str, Any]:
        found = self._client.api.get_json(f"/v1/tasks/{quote(self.id, safe='')}")
        assert isinstance(found, dict)
        return found

    @overload
    def logs(self, follow: Literal[False] = False) -> str: ...
    @overload
    def logs(self, follow: Literal[True]) -> Iterator[str]: ...
    def logs(self, follow: bool = False) -> str | Iterator[str]:
        """Output so far (stdout and stderr interleaved); with `follow`, an iterator until the end."""
        if follow:
            return (piece.text for piece in self.printed(follow=True))
        return "".join(piece.text for piece in self.printed())

    def printed(
        self, *, follow: bool = False, on_progress: OnProgress | None = None
    ) -> Iterator[Printed]:
        """Output with the stream of each piece; `on_progress` is called for changes of status while following."""
        return logs.printed(self.log_documents(follow=follow, on_progress=on_progress))

    def log_documents(
        self, *, follow: bool = False, on_progress: OnProgress | None = None
    ) -> Iterator[dict[str, Any]]:
        api, task = self._client.api, quote(self.id, safe="")
        if follow:
            return logs.follow(api, task, on_progress=on_progress)
        return logs.pages(api, task)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the task's end; `TimeoutError` after `timeout` seconds."""
        if self._known is None:
            self._known = wait_for(self._client, self.id, timeout)
        return self._known

    def result(self, timeout: float | None = None) -> Any:
        """Return a function's value or raise its exception with the remote traceback; None for a successful command.

        `UntrustedResult` if another account's node returned the value; see `Task.remote`.
        """
        result = self.wait(timeout)
        if not self._function:
            if result.status != "succeeded":
                raise failure(result)
            return None
        if not self._own:
            raise Forbidden(
                f"task {self.id} was not submitted by this program, so its value is not unpickled; "
                "use client.get(id, trust=True) if the function is yours"
            )
        value = outcome(result, self._client.artifacts.get, pickle_requested=self._pickle_requested)
        if type(value) is Raised:
            raise value.exception
        return value

    def fetch(self, into: str | Path = ".") -> list[Path]:
        """Wait for the end and write the outputs beneath `into`."""
        return self._client.artifacts.fetch(self.wait().outputs, Path(into))

    def cancel(self) -> None:
        """Cancel the task; no effect after its end."""
        self._client.cancel(self.id)

    def explain(self) -> str:
        """One sentence on why the task waits or what it does."""
        return str(self._client.explain(self.id)["sentence"])


def wait_for(
    client: Client,
    task: str,
    timeout: float | None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Result:
    """After `EXPLAINED_AFTER_S`, log why the task waits: it may never start."""
    path = f"/v1/tasks/{quote(task, safe='')}/result"
    began, is_explained = monotonic(), False
    ends = None if timeout is None else began + timeout
    while True:
        left = LONGEST_WAIT_S if ends is None else min(LONGEST_WAIT_S, ends - monotonic())
        wait = max(0.0, left)
        reply = client.api.send("GET", f"{path}?wait={wait:.6g}", read_s=wait + 30)
        if reply.status == 200:
            return decode_result(reply.body)
        now = monotonic()
        if not is_explained and now - began >= EXPLAINED_AFTER_S:
            is_explained = _explained(client, task, reply.json())
        if ends is not None and now >= ends:
            raise TimeoutError(f"task {task} has not ended within {timeout} s; it continues")


def _explained(client: Client, task: str, document: dict[str, Any]) -> bool:
    if document.get("status") != "queued":
        return False
    try:
        sentence = client.explain(task)["sentence"]
    except GpoolError:  # the explanation is optional
        return False
    # the sentence may hold names other users chose: no control character may reach a terminal
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in sentence)
    log.warning("task %s waits: %s", task, shown)
    return True
