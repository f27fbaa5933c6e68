"""What the MPS control program does as far as its caller sees: a socket, orders by stdin, limits it remembers."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

pipes = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
if "-f" in sys.argv:
    (pipes / "daemon.pid").write_text(f"{os.getpid()} {os.environ['CUDA_VISIBLE_DEVICES']}")
    (pipes / "started").write_text(" ".join([*sys.argv[1:], f"as {os.getuid()}"]))
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(pipes / "control"))
        signal.pause()
for order in sys.stdin.read().splitlines():
    with (pipes / "orders").open("a") as told:
        told.write(order + "\n")
    if order == "get_server_list":
        sys.stdout.write("4711\n")
    elif order.startswith("quit"):
        os.kill(int((pipes / "daemon.pid").read_text().split()[0]), signal.SIGKILL)
