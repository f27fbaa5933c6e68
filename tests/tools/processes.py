"""A pool of real processes on this machine: server, agents, command line, each with its own home.

For end-to-end tests and benchmarks. It starts what a person would start, with the same commands, and ends only what it
started, by pid. It reads no table and patches nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from gpool.transfer.node_proofs import NodeKey
from tests import leftovers
from tests.tools.nodes import joined
from tests.tools.scripted_agent import ScriptedAgent

GPOOL = (str(Path(sys.executable).with_name("gpool")),)

SHORT_LEASE: Mapping[str, str] = {
    "GPOOL_SERVER_TTL_S": "2",
    "GPOOL_SERVER_MARGIN_S": "0.5",
    "GPOOL_SERVER_BEAT_S": "0.5",
    "GPOOL_SERVER_TICK_S": "0.2",
}
"""Settings of a server whose lost nodes are noticed within a test's patience."""
LONG_LEASE: Mapping[str, str] = {
    **SHORT_LEASE,
    "GPOOL_SERVER_TTL_S": "180",
    "GPOOL_SERVER_MARGIN_S": "2",
}
"""Settings for tests that lose no node: one that stands still on a busy machine, however long, is not given up."""

LEASE_TIME_S = 2.0
PATIENCE_S = 240.0
"""For what only has to come about: so that a test ends, however busy the machine is."""
STOPPED_S = 120.0
FIRST_PORT, PORTS = 12_000, 18_000


class NeverHappened(AssertionError):
    """What a test waited for did not come about in time."""


def eventually(
    what: str, holds: Callable[[], bool], within_s: float, every_s: float = 0.02
) -> float:
    """Waits until `holds()`; returns the seconds it took, raises `NeverHappened` naming `what`."""
    pause = threading.Event()
    began = time.monotonic()
    while not holds():
        if time.monotonic() - began > within_s:
            raise NeverHappened(f"{what}: not within {within_s:g} s")
        pause.wait(every_s)
    return time.monotonic() - began


def free_port() -> int:
    """None that the kernel lends to outgoing connections: one of those could have it before the server does."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            port = FIRST_PORT + secrets.randbelow(PORTS)
            probe.bind(("127.0.0.1", port))
            return port


def alive(pid: int) -> bool:
    """Whether the process is there and not merely waiting to be reaped."""
    try:
        return _stat(pid)[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cpu_s(pid: int) -> float:
    """Processor seconds a process has used so far; 0 when it is gone."""
    try:
        user, system = _stat(pid)[11:13]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def descendants(root: int) -> list[int]:
    """The pids of everything a process started, however deep, as far as it is still beneath it."""
    parents: dict[int, list[int]] = {}
    for pid in _all_pids():
        try:
            parents.setdefault(int(_stat(pid)[1]), []).append(pid)
        except (FileNotFoundError, ProcessLookupError):
            continue
    found, new = [], [root]
    while new:
        new = [child for parent in new for child in parents.get(parent, ())]
        found += new
    return found


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the third on (state, parent, …)."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def processes_saying(mark: str) -> list[int]:
    """The pids of all processes, in any sandbox, whose command line holds the mark."""
    found = []
    for pid in _all_pids():
        if pid == os.getpid():
            continue
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if mark.encode() in line and alive(pid):
            found.append(pid)
    return found


@contextmanager
def _taking_interrupts() -> Iterator[None]:
    """What is started meanwhile takes Ctrl-C, though tests that a script runs in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass(slots=True)
class Daemon:
    """One long-running gpool process. Its output goes to `log`."""

    arguments: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    within: Sequence[str] = ()  # a command that runs it elsewhere, in its own place: `nsenter …`
    _process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                [*self.within, *GPOOL, *self.arguments],
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        if self._process is None:
            raise NeverHappened(f"gpool {self.arguments[0]} was not started")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """None while it runs; 128+n for a signal n, as a shell says it."""
        code = self._process.poll() if self._process is not None else None
        return 128 - code if code is not None and code < 0 else code

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9 of this one process: what depends on it has to notice by itself."""
        if self._process is not None and self.is_running:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """As Ctrl-C would; by force after two minutes."""
        if self._process is None:
            return
        if self.is_running:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGINT)
            try:
                self._process.wait(STOPPED_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()

    def said(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def cpu_s(self) -> float:
        """Processor seconds so far, of this process alone."""
        return cpu_s(self.pid)

    def descendants(self) -> list[int]:
        return descendants(self.pid)

    def peak_memory_bytes(self) -> int:
        """The largest resident set so far, of this process alone."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
        return int(peak[1]) * 1024 if peak else 0


@dataclass(slots=True)
class Pool:
    """A server and its agents beneath one directory. `start()` it, or use it as a context manager."""

    directory: Path
    settings: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    agents: dict[str, Daemon] = field(default_factory=dict)
    host: str = (
        "127.0.0.1"  # where agents on other (pretended) machines reach it: plain HTTP there too
    )
    _server: Daemon | None = None
    _http: httpx2.Client = field(
        default_factory=lambda: httpx2.Client(timeout=PATIENCE_S, trust_env=False, verify=False)
    )

    # ---- processes

    def environment(self, home: str) -> dict[str, str]:
        """What a process of this pool sees: its own home, nothing of the caller's gpool configuration."""
        folder = self.directory / home
        folder.mkdir(parents=True, exist_ok=True)
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("GPOOL_")}
        return inherited | {"HOME": str(folder), "GPOOL_HOME": str(folder)} | dict(self.settings)

    def consumer(self) -> dict[str, str]:
        """What the operator's own commands and programs see, on a machine that is neither server nor node."""
        told = {"GPOOL_URL": self.address, "GPOOL_KEY": self.key}
        if self._is_away:
            told["GPOOL_PLAIN_HTTP"] = "1"
        return self.environment("consumer") | told

    @property
    def _is_away(self) -> bool:
        return self.host != "127.0.0.1"

    @property
    def key(self) -> str:
        return (self.directory / "data" / "operator.key").read_text().strip()

    @property
    def address(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def server(self) -> Daemon:
        if self._server is None:
            arguments = ["server", "--port", str(self.port), "--data", str(self.directory / "data")]
            if self._is_away:
                arguments += ["--host", self.host, "--behind-proxy", "127.0.0.1"]
            log = self.directory / "server.log"
            self._server = Daemon(arguments, self.environment("server"), log)
        return self._server

    def start(self, agents: Sequence[str] = ("first",)) -> None:
        self.start_server()
        for name in agents:
            self.join(name)

    def start_server(self) -> float:
        """Starts it, or starts it again on the same data; returns the seconds until it was ready."""
        self.server.start()

        def ready() -> bool:
            if not self.server.is_running:
                raise NeverHappened(f"the server ended by itself:\n{self.server.said()[-4000:]}")
            try:
                return self._http.get(f"{self.address}/readyz").status_code == 200
            except httpx2.TransportError:
                return False

        return eventually("the server is ready", ready, PATIENCE_S)

    def restart_server(self, **settings: str) -> None:
        """On the same data, under further settings."""
        self.server.stop()
        self.server.environment = {**self.server.environment, **settings}
        self.start_server()

    def join(self, name: str, *options: str, within: Sequence[str] = ()) -> Daemon:
        """A further machine: its own home, joined by its own link; returns once the server sees it."""
        agent = self.joining(name, *options, within=within)
        self.until_online(name)
        return agent

    def joining(self, name: str, *options: str, within: Sequence[str] = ()) -> Daemon:
        """The same without waiting."""
        link = self.ask("POST", "/v1/nodes/invites", {}).json()["link"]
        arguments = ["join", link, "--name", name, *options]
        if self._is_away:
            arguments.append("--plain-http")
        log = self.directory / f"{name}.log"
        self.agents[name] = agent = Daemon(arguments, self.environment(name), log, within)
        agent.start()
        return agent

    def until_online(self, name: str) -> None:
        eventually(f"node {name} is online", lambda: name in self.online(), PATIENCE_S)

    def scripted(self, name: str, cpus: int) -> ScriptedAgent:
        """A further node, known to the server and not connected: it does what the test says."""
        key = NodeKey(hashlib.sha256(name.encode()).digest())
        badge = joined(lambda path, told: self.ask("POST", path, told).json(), key, name=name)
        return ScriptedAgent(self.address, badge, cpus)

    def online(self) -> list[str]:
        return [
            n["name"]
            for n in self.ask("GET", "/v1/nodes").json()["items"]
            if n["status"] == "online"
        ]

    def stop(self) -> None:
        with contextlib.ExitStack() as stack:  # in the opposite order, whatever one of them raises
            stack.callback(self._http.close)
            stack.callback(self._clear_after_killed_agents)
            for daemon in ([self._server] if self._server else []) + [*self.agents.values()]:
                stack.callback(daemon.stop)

    def _clear_after_killed_agents(self) -> None:
        """The groups of a killed agent stay until its next start, which never comes here."""
        if any(agent.exit_code == 128 + signal.SIGKILL for agent in self.agents.values()):
            leftovers.clear(leftovers.RunPaths(self.directory))

    def __enter__(self) -> Pool:
        with contextlib.ExitStack() as stack:
            stack.callback(self.stop)
            self.start()
            stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def story(self) -> str:
        """Every log's end, for a failing test."""
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(
            f"--- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs
        )

    # ---- the consumer's side

    def gpool(
        self, *arguments: str, timeout_s: float = PATIENCE_S
    ) -> subprocess.CompletedProcess[str]:
        """One command of a consumer; the caller looks at its exit code."""
        return subprocess.run(
            [*GPOOL, *arguments],
            env=self.consumer(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    @contextmanager
    def command(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """A command of a consumer while it runs, its output in pipes; killed if it is still there in the end."""
        with _taking_interrupts():
            process = subprocess.Popen(
                [*GPOOL, *arguments],
                env=self.consumer(),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        with process:
            try:
                yield process
            finally:
                process.kill()

    def script(self, path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
        """A consumer's program in a file, run in that folder."""
        return subprocess.run(
            [sys.executable, str(path)],
            env=self.consumer(),
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    def json(self, *arguments: str) -> Any:
        done = self.gpool(*arguments, "--json")
        if done.returncode:
            raise NeverHappened(f"gpool {' '.join(arguments)}: {done.stderr or done.stdout}")
        return json.loads(done.stdout)

    def ask(self, method: str, path: str, document: object = None) -> httpx2.Response:
        """A request with the operator's key: where a command would be too slow, or shows less than is wanted."""
        headers = {"Authorization": f"Bearer {self.key}"}
        answer = self._http.request(method, self.address + path, headers=headers, json=document)
        return answer.raise_for_status()

    def submit(self, *command: str, outputs: Sequence[str] = ()) -> str:
        """A command's id."""
        wanted = {"command": command, "outputs": outputs}
        task: str = self.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
        return task

    def status(self, task: str) -> dict[str, Any]:
        document: dict[str, Any] = self.ask("GET", f"/v1/tasks/{task}").json()
        return document

    def set_availability(self, name: str, availability: str) -> None:
        nodes = self.ask("GET", "/v1/nodes").json()["items"]
        [node] = [found["id"] for found in nodes if found["name"] == name]
        self.ask("PATCH", f"/v1/nodes/{node}", {"availability": availability})

    def until_status(self, task: str, status: str, within_s: float = PATIENCE_S) -> float:
        return eventually(
            f"{task} is {status}", lambda: self.status(task)["status"] == status, within_s
        )

    def results(self, batch: str) -> list[dict[str, Any]]:
        """Every result of a finished batch, in the order the server accepted them."""
        answer = self.ask("GET", f"/v1/batches/{batch}/results")
        return [json.loads(line) for line in answer.iter_lines() if line]

    def program(self, source: str) -> Generator[str, None, None]:
        """Runs a consumer's Python program and gives its lines as it prints them."""
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", source],
            env=self.consumer(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None
        tail: list[str] = []
        try:
            for line in process.stdout:
                tail = [*tail[-40:], line]
                yield line.rstrip("\n")
            if process.wait():
                raise NeverHappened("the consumer's program failed:\n" + "".join(tail))
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
