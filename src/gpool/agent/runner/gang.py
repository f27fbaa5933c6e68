"""Starts one member of a gang with its engine (torchrun, Ray), inside the sandbox, under the environment's Python.

Passed as text (`python -c`), so that images and environments need no gpool; stdlib only, Python 3.8 or later. torchrun
replaces this process. For Ray, the first member starts the head, waits for the others, runs the command, and ends the
cluster by exiting; the others start once the head answers, and exit when their connection to it closes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import threading

MISSING = 127
ENGINE_FAULT = 125
RETRY_S = 0.2
POLL_S = 1.0
BACKLOG = 1024
IN = b"in\n"
MODULES = {"torchrun": "torch", "ray": "ray"}


def report(text: str) -> None:
    sys.stderr.write(f"gpool: {text}\n")
    sys.stderr.flush()


def lacks(engine: str) -> str:
    module = MODULES[engine]
    if importlib.util.find_spec(module) is not None:
        return ""
    return (
        f"engine {engine} needs the package {module!r}, which the task's environment does not have; "
        f"add --pip {module}, or an --image that has it"
    )


def start_ray(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stdout.decode("utf-8", "replace"))
        report(f"Ray did not start here (code {done.returncode})")
        sys.exit(ENGINE_FAULT)


def kept(connection: socket.socket) -> socket.socket:
    """Set keep-alive: a vanished peer is noticed within 30 s."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def wait_for(gate: socket.socket, others: int) -> list[socket.socket]:
    """Return the connections of all other members, open until the end. Exits, which ends the gang, if one leaves early."""
    found: list[socket.socket] = []
    with selectors.DefaultSelector() as waiting:
        waiting.register(gate, selectors.EVENT_READ)
        while len(found) < others:
            for key, _ in waiting.select():
                if key.fileobj is gate:
                    waiting.register(kept(gate.accept()[0]), selectors.EVENT_READ)
                    continue
                one = key.fileobj
                assert isinstance(one, socket.socket)
                waiting.unregister(one)
                if not has_joined(one):
                    report("another member ended before Ray had started there; its output says why")
                    sys.exit(ENGINE_FAULT)
                found.append(one)
    return found


def has_joined(one: socket.socket) -> bool:
    try:
        return bool(one.recv(len(IN)))
    except OSError:
        return False


def lead(words: list[str], command: list[str], nodes: int, at: tuple[str, int], ray: str) -> int:
    gate = socket.create_server(at, backlog=BACKLOG)
    start_ray(words)
    others = wait_for(gate, nodes - 1)
    child: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def pass_on(number: int, _frame: object) -> None:
        if child is None:
            early.append(number)
        else:
            child.send_signal(number)

    for each in (signal.SIGTERM, signal.SIGINT):  # before the start: a warning may come at once
        signal.signal(each, pass_on)
    try:
        child = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": ray})
    except OSError as error:
        report(f"{command[0]}: {error.strerror}")
        return MISSING
    for number in early:
        child.send_signal(number)
    code = child.wait()
    for connection in others:
        connection.close()
    return 128 - code if code < 0 else code


def raylets() -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/cmdline", "rb") as file:
                program = file.read().split(b"\0", 1)[0]
        except OSError:
            continue
        if program.endswith(b"/raylet"):
            found.append(int(entry))
    return found


def dialled(host: str, port: int) -> socket.socket:
    pause = threading.Event()
    while True:
        try:
            connection = kept(socket.create_connection((host, port), timeout=5))
        except OSError:
            pause.wait(RETRY_S)
        else:
            connection.settimeout(None)
            return connection


def follow(words: list[str], at: tuple[str, int], ray: str) -> int:
    gate = dialled(*at)
    host, _, port = ray.rpartition(":")
    dialled(host, int(port)).close()
    start_ray(words)
    mine = raylets()
    try:
        gate.sendall(IN)
        while True:
            if select.select([gate], [], [], POLL_S)[0] and not gate.recv(1):
                return 0
            if mine and not all(os.path.exists(f"/proc/{pid}") for pid in mine):
                report("Ray's raylet ended here")
                return ENGINE_FAULT
    except OSError:  # the head is gone
        return 0


def main(plan: dict[str, object], command: list[str]) -> int:
    engine, words = str(plan["engine"]), plan["words"]
    assert isinstance(words, list)
    lack = lacks(engine)
    if lack:
        report(lack)
        return MISSING
    if engine == "torchrun":
        os.execv(sys.executable, [sys.executable, *words, *command])
    host, port, ray = str(plan["head"]), plan["gate"], str(plan["ray"])
    assert isinstance(port, int)
    if plan["rank"] == 0:
        nodes = plan["nodes"]
        assert isinstance(nodes, int)
        return lead(words, command, nodes, (host, port), ray)
    return follow(words, (host, port), ray)


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), sys.argv[2:]))
