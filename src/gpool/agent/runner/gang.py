"""Starts one member of a gang by its engine, inside the sandbox and by whatever Python the task's environment has.

It is handed over as text (`python -c`), so that images and environments need nothing of ours; stdlib only, for any
Python from 3.8 on. torchrun takes its place. For Ray, the first member starts the head, waits at a gate until the
others are in, runs the command and ends the cluster by ending; the others start once the head answers, and leave
when the gate closes.
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
LOOK_S = 1.0
BACKLOG = 1024
IN = b"in\n"
MODULES = {"torchrun": "torch", "ray": "ray"}


def say(text: str) -> None:
    sys.stderr.write(f"gpool: {text}\n")
    sys.stderr.flush()


def lacks(engine: str) -> str:
    """What is missing for the engine, in a sentence; empty when nothing is."""
    module = MODULES[engine]
    if importlib.util.find_spec(module) is not None:
        return ""
    return (
        f"engine {engine} needs the package {module!r} in the task's environment, and it is not there; "
        f"add --pip {module}, or an --image that has it"
    )


def start_ray(words: list[str]) -> None:
    """Ray's own processes of this member; what they say is shown only when they fail."""
    done = subprocess.run(
        [sys.executable, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        sys.stderr.write(done.stdout.decode("utf-8", "replace"))
        say(f"Ray did not start here (code {done.returncode})")
        sys.exit(ENGINE_FAULT)


def kept(connection: socket.socket) -> socket.socket:
    """A peer that vanished without a word is noticed within half a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return connection


def wait_for(gate: socket.socket, others: int) -> list[socket.socket]:
    """Until every other member has said that it is in; their connections, to be held until the end.

    One that leaves before would be waited for in vain: this member ends too, and with it the gang.
    """
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
                if not heard(one):
                    say(
                        "another member ended before Ray had started there; what it printed says why"
                    )
                    sys.exit(ENGINE_FAULT)
                found.append(one)
    return found


def heard(one: socket.socket) -> bool:
    """Whether it said that it is in; otherwise it is gone."""
    try:
        return bool(one.recv(len(IN)))
    except OSError:
        return False


def lead(words: list[str], command: list[str], nodes: int, at: tuple[str, int], ray: str) -> int:
    """The first member: the head, and the command once all are in. Its exit code."""
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

    for each in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # first: a command may be warned as soon as it runs
        signal.signal(each, pass_on)
    try:
        child = subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": ray})
    except OSError as error:
        say(f"{command[0]}: {error.strerror}")
        return MISSING
    for number in early:
        child.send_signal(number)
    code = child.wait()
    for connection in others:
        connection.close()
    return 128 - code if code < 0 else code


def raylets() -> list[int]:
    """The processes of ours that make this member a node of the cluster."""
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
    """A connection, as soon as somebody listens there."""
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
    """Any other member: in once the head is there, out once it is gone."""
    gate = dialled(*at)
    host, _, port = ray.rpartition(":")
    dialled(host, int(port)).close()
    start_ray(words)
    mine = raylets()
    try:
        gate.sendall(IN)
        while True:
            if select.select([gate], [], [], LOOK_S)[0] and not gate.recv(1):
                return 0
            if mine and not all(os.path.exists(f"/proc/{pid}") for pid in mine):
                say("Ray's raylet ended here")
                return ENGINE_FAULT
    except OSError:  # the head vanished
        return 0


def main(plan: dict[str, object], command: list[str]) -> int:
    engine, words = str(plan["engine"]), plan["words"]
    assert isinstance(words, list)
    lack = lacks(engine)
    if lack:
        say(lack)
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
