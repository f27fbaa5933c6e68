"""A submitted task, to be watched, waited for, cancelled.

It unpickles only values of functions its own program submitted, from the caller's own nodes (law 6).
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
"""How long somebody waits for a task that does not start before they are told why."""

LONGEST_WAIT_S = 30
"""How long one request may wait for a task's end; a longer wait asks again."""


class Run:
    """One task. Its properties ask the server each time."""

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
        """None: nothing is charged yet in this version."""
        return

    def document(self) -> dict[str, Any]:
        """The task as the server describes it (a `TaskDocument`)."""
        found = self._client.api.get_json(f"/v1/tasks/{quote(self.id, safe='')}")
        assert isinstance(found, dict)
        return found

    @overload
    def logs(self, follow: Literal[False] = False) -> str: ...
    @overload
    def logs(self, follow: Literal[True]) -> Iterator[str]: ...
    def logs(self, follow: bool = False) -> str | Iterator[str]:
        """What it printed so far (standard output and error as they came); with `follow`, pieces as they come."""
        if follow:
            return (piece.text for piece in self.printed(follow=True))
        return "".join(piece.text for piece in self.printed())

    def printed(
        self, *, follow: bool = False, on_progress: OnProgress | None = None
    ) -> Iterator[Printed]:
        """The pieces of output with the stream each went to; `on_progress` is told of each change while following."""
        return logs.printed(self.log_documents(follow=follow, on_progress=on_progress))

    def log_documents(
        self, *, follow: bool = False, on_progress: OnProgress | None = None
    ) -> Iterator[dict[str, Any]]:
        """The pieces of output as the server describes them (`LogDocument`s)."""
        api, task = self._client.api, quote(self.id, safe="")
        if follow:
            return logs.follow(api, task, on_progress=on_progress)
        return logs.pages(api, task)

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for the end, however it ends; `TimeoutError` when it has not ended by then."""
        if self._known is None:
            self._known = wait_for(self._client, self.id, timeout)
        return self._known

    def result(self, timeout: float | None = None) -> Any:
        """A function's value, or the exception it raised with its remote traceback; None for a command that succeeded.

        `UntrustedResult`: another account's node returned the value; see `Task.remote`.
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
        """Write its outputs beneath `into`; waits for the end."""
        return self._client.artifacts.fetch(self.wait().outputs, Path(into))

    def cancel(self) -> None:
        """Ask for its end; one that has ended stays as it is."""
        self._client.cancel(self.id)

    def explain(self) -> str:
        """Why it waits, or what it does, in one sentence."""
        return str(self._client.explain(self.id)["sentence"])


def wait_for(
    client: Client,
    task: str,
    timeout: float | None,
    monotonic: Callable[[], float] = time.monotonic,
) -> Result:
    """Ask until the task has ended. Once it has been waited for in vain, the log says why: it may never start."""
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
            raise TimeoutError(f"task {task} has not ended within {timeout} s; it goes on")


def _explained(client: Client, task: str, document: dict[str, Any]) -> bool:
    """Whether it was said why it waits; one that does not is left alone."""
    if document.get("status") != "queued":
        return False
    try:
        sentence = client.explain(task)["sentence"]
    except GpoolError:  # only a courtesy
        return False
    # it may name what strangers named: nothing in it is for a terminal to obey
    shown = "".join(letter if letter.isprintable() else "\ufffd" for letter in sentence)
    log.warning("task %s waits: %s", task, shown)
    return True
