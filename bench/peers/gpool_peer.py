"""gpool as a peer of the shared harness. Imported there as `peers.gpool_peer`, see `bench/peers.py`.

Server and agent are processes of their own, as everybody's; the client is the SDK in the harness's process. W1 goes through
`.map`, W2 through `.remote` (submitted when waited for: one request each), commands and backlogs through one call a batch.
A sandboxed task cannot write the host's marks file: a thread writes it, a line for each accepted result as it comes (so that
the harness kills in the middle of the work, not when thousands of logs have been fetched), and at the end a line for each
further execution (task, epoch) that the log of a task with more than one lease shows. What ran and was never reported
(the machine died) leaves no trace here: attempts happen at least once, effects exactly once.
"""

from __future__ import annotations

import binascii
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import tasks
from common import Proc, child_env, wait_until
from peers.base import Peer

import gpool
from gpool.client.client import Client
from gpool.client.mapping import ReaderFailure, ResultReader
from gpool.client.values import PYTHON, Result, dumps_call

SOURCE = Path(gpool.__file__).parents[1]
"""Server and agent run the gpool that this process has imported."""

PORT = 28_470
CHUNK = 4000


def mark(index: int) -> None:
    print(index)


@dataclass(frozen=True)
class Mapped:
    """Calls that `.map` (several) or `.remote` (one) makes while it is waited for."""

    count: int

    def __len__(self) -> int:
        return self.count


@dataclass(frozen=True)
class Submitted:
    """Tasks the server has acknowledged."""

    batch: str
    count: int

    def __len__(self) -> int:
        return self.count


class P(Peer):  # type: ignore[misc]  # the harness is untyped
    name = "gpool"
    durability = "fsync before the acknowledgement"
    unit = "python function, sandboxed"

    # ---- processes

    def __init__(self, base: str, variant: str = "default") -> None:
        super().__init__(base, variant)
        self.url = f"http://127.0.0.1:{PORT}"
        self.client: Client | None = None
        self.link = ""

    def _env(self, home: str) -> dict[str, str]:
        folder = self.base / "data" / f"gpool-{home}"
        folder.mkdir(parents=True, exist_ok=True)
        environment: dict[str, str] = child_env(GPOOL_HOME=folder, PYTHONPATH=SOURCE)
        return environment

    def start_server(self) -> None:
        data = self.base / "data" / "gpool"
        argv = [self.bin / "gpool", "server", "--port", PORT, "--data", data]
        self.server = Proc(argv, self.log("server"), env=self._env("server"))
        assert wait_until(self._ready, 30), "gpool did not get ready"

    def _ready(self) -> bool:
        try:
            return httpx2.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except httpx2.TransportError:
            return False

    def connect(self) -> None:
        key = (self.base / "data" / "gpool" / "operator.key").read_text().strip()
        self.client = Client(self.url, key)
        self.noop, self.each = self.client.task(tasks.noop), self.client.task(_ignore)
        self.mark = self.client.task(mark)
        self.link = self._api.send_json("POST", "/v1/nodes/invites", {})["link"]

    @property
    def _api(self) -> Any:
        assert self.client is not None
        return self.client.api

    def start_worker(self, slots: int = 2) -> None:
        argv = [self.bin / "gpool", "join", self.link, "--slots", slots]
        self.worker = Proc(argv, self.log("agent"), env=self._env("agent"))

    def stop(self) -> None:
        if self.client is not None:
            self.client.close()
            self.client = None
        super().stop()

    # ---- what the workloads ask for

    def submit(self, n: int, deadline: float | None = None) -> Mapped | Submitted:
        """With a worker: for `.map`. Without one (W4): a backlog, acknowledged before this returns."""
        if self.worker is not None:
            return Mapped(n)
        return self._calls(self.noop, itertools.repeat((), n), deadline)

    def submit_true(self, n: int, deadline: float | None = None) -> Submitted:
        answer = self._api.send_json("POST", "/v1/tasks", {"command": ["/bin/true"], "copies": n})
        return Submitted(answer["batch"], len(answer["ids"]))

    def submit_mark(self, n: int, path: str) -> Submitted:
        submitted = self._calls(self.mark, ((index,) for index in range(n)), None)
        arguments = (submitted, Path(path))
        threading.Thread(target=self._write_marks, args=arguments, daemon=True).start()
        return submitted

    def wait(self, handles: Mapped | Submitted, timeout: float) -> int:
        assert self.client is not None
        if isinstance(handles, Submitted):
            done = self._results(handles, timeout)
            return sum(result.status == "succeeded" for results in done for result in results)
        if handles.count == 1:
            self.noop.remote()
            return 1
        calls = [itertools.repeat(None, handles.count)]
        return sum(1 for _ in self.client.map(self.each, calls))

    # ---- batches

    def _calls(
        self, task: Any, arguments: Iterator[tuple[Any, ...]], deadline: float | None
    ) -> Submitted:
        assert self.client is not None
        function = {"sha256": self.client.artifacts.put(task.pickled()), "python": PYTHON}
        batch, count = None, 0
        chunk = list(itertools.islice(arguments, CHUNK))
        while chunk:
            following = list(itertools.islice(arguments, CHUNK))
            if deadline and time.monotonic() > deadline:
                following = []
            calls = [_text(dumps_call(task.function, given, {})) for given in chunk]
            document = {
                "function": function,
                "calls": calls,
                "batch": batch,
                "more": bool(following),
            }
            answer = self._api.send_json("POST", "/v1/tasks", document)
            batch, count, chunk = answer["batch"], count + len(calls), following
        assert batch is not None
        return Submitted(batch, count)

    def _results(self, submitted: Submitted, timeout: float) -> Iterator[list[Result]]:
        """Each result once, in order of acceptance, across restarts of the server; ends early after `timeout`."""
        reader = ResultReader(self._api, submitted.batch)
        alarm = threading.Timer(timeout, lambda: reader.inbox.put([]))
        alarm.daemon = True
        alarm.start()
        try:
            seen = 0
            while seen < submitted.count:
                found = reader.inbox.get()
                if isinstance(found, ReaderFailure):
                    raise found.error
                if not found:
                    return
                seen += len(found)
                yield found
        finally:
            alarm.cancel()
            reader.stop()

    def _write_marks(self, submitted: Submitted, path: Path) -> None:
        with path.open("a") as file:
            for results in self._results(submitted, timeout=600):
                done = [result for result in results if result.status == "succeeded"]
                file.writelines(f"{result.position}\n" for result in done)
                file.flush()
            for task in self.client.listing("tasks"):  # type: ignore[union-attr]
                if task["batch"] == submitted.batch and task["epoch"] > 1:
                    page = self._api.get_json(f"/v1/tasks/{task['id']}/logs")
                    said = {(item["epoch"], item["text"].strip()) for item in page["items"]}
                    file.writelines(f"{index}\n" for _, index in sorted(said)[1:])


def _ignore(_: None) -> None:
    """The no-op of `.map`, which hands each call an argument."""


def _text(pickled: bytes) -> str:
    return binascii.b2a_base64(pickled, newline=False).decode("ascii")
