"""The guard: a small process beside the agent that outlives it just long enough to remove its containers. Stdlib only.

`guard.py SOCKET LABEL`; says `ready` on stdout. When its stdin ends, every container with the label is killed and
removed, until none has shown up for a while (one may have been asked for just before); then images with the label that
go by no name: the agent's own. `done` on stdin: nothing is left.
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

QUIET_S = 3.0  # none seen for so long: none is coming
LOOK_EVERY_S = 0.05
MOST_S = 60.0
TIMEOUT_S = 10.0


def ask(path: str, method: str, target: str) -> bytes:
    """One request to the engine; the body of its answer. Raises OSError when it is not there."""
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
        return  # it is looked for again


def remove_all(path: str, label: str) -> None:
    quiet = spent = 0.0
    working: dict[str, threading.Thread] = {}
    while quiet < QUIET_S and spent < MOST_S:
        try:
            left = labelled(path, label)
        except (OSError, ValueError, KeyError):
            left = []  # no engine, or it is just ending: its containers end with it
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
    """One that was pulled has a name, whatever its label says."""
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
    said = b""
    while data := os.read(0, 64):
        said += data
    if not said.startswith(b"done"):
        remove_all(path, label)
        remove_images(path, label)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2]))
