"""The guard: a process beside the agent that outlives it to remove its containers. A script, standard library only.

`guard.py SOCKET LABEL`; prints `ready`. When stdin ends, every container with the label is killed and removed, until
none has appeared for `QUIET_S` (one may have been requested just before); then unnamed images with the label, which are
the agent's. `done` on stdin: nothing is left to remove.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import threading
from typing import Any
from urllib.parse import quote

QUIET_S = 3.0  # without a new container: none will appear
LOOK_EVERY_S = 0.05
MOST_S = 60.0
TIMEOUT_S = 10.0


def ask(path: str, method: str, target: str) -> bytes:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(TIMEOUT_S)
        channel.connect(path)
        head = f"{method} {target} HTTP/1.0\r\nHost: engine\r\nContent-Length: 0\r\n\r\n"
        channel.sendall(head.encode())
        parts = []
        while data := channel.recv(65536):
            parts.append(data)
    return b"".join(parts).partition(b"\r\n\r\n")[2]


def labelled(path: str, label: str) -> list[str]:
    filters = quote(json.dumps({"label": [label]}))
    found: Any = json.loads(ask(path, "GET", f"/v1.40/containers/json?all=1&filters={filters}"))
    return [str(entry["Id"]) for entry in found]


def end(path: str, container: str) -> None:
    try:
        ask(path, "POST", f"/v1.40/containers/{container}/kill?signal=KILL")
        ask(path, "DELETE", f"/v1.40/containers/{container}?force=1&v=1")
    except OSError:
        return  # retried at the next look


def remove_all(path: str, label: str) -> None:
    quiet = spent = 0.0
    working: dict[str, threading.Thread] = {}
    while quiet < QUIET_S and spent < MOST_S:
        try:
            left = labelled(path, label)
        except (OSError, ValueError, KeyError):
            left = []  # no engine, or it is ending: its containers end with it
        for container in left:
            if container not in working or not working[container].is_alive():
                working[container] = threading.Thread(target=end, args=(path, container))
                working[container].start()
        quiet = 0.0 if left else quiet + LOOK_EVERY_S
        spent += LOOK_EVERY_S
        select.select([], [], [], LOOK_EVERY_S)
    for thread in working.values():
        thread.join()


def remove_images(path: str, label: str) -> None:
    filters = quote(json.dumps({"label": [label]}))
    try:
        found: Any = json.loads(ask(path, "GET", f"/v1.40/images/json?all=1&filters={filters}"))
        for entry in found:
            names = [*(entry.get("RepoTags") or ()), *(entry.get("RepoDigests") or ())]
            if all(name.startswith("<none>") for name in names):
                ask(path, "DELETE", f"/v1.40/images/{entry['Id']}")
    except (OSError, ValueError, KeyError):
        return  # no engine: the next agent's sweep does it


def main(path: str, label: str) -> int:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    os.write(1, b"ready\n")
    message = b""
    while data := os.read(0, 64):
        message += data
    if not message.startswith(b"done"):
        remove_all(path, label)
        remove_images(path, label)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
