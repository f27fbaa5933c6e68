"""How long a lane takes to open and close: prepared ahead, made on the spot, and with a list; descriptors and interfaces left.

python -m bench.egress [--json FILE] [--lanes 100]     as root: in network namespaces of its own
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import uvloop

from gpool.agent.network.policy import Egress, EgressPolicy, Only, Wants, parse_target
from gpool.agent.network.root_networks import RootNetworks

CLONE_NEWNET = 0x40000000
HOST = """link set lo up
link add up0 type veth peer name w0
addr add 192.168.77.10/24 dev up0
link set up0 up
link set w0 up
route add default via 192.168.77.1
"""


def row(times_ms: list[float]) -> dict[str, float]:
    ordered = sorted(times_ms)
    return {
        "p50_ms": round(statistics.median(ordered), 2),
        "p99_ms": round(ordered[int(len(ordered) * 0.99)], 2),
    }


async def measured(ahead: int, wants: Wants, count: int) -> dict[str, dict[str, float]]:
    several = RootNetworks(EgressPolicy(), "be9c4", ahead=ahead)
    await several.start()
    opening, closing = [], []
    for _ in range(count):
        began = time.perf_counter()
        lane = await several.open(wants)
        opening.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.02)  # a task runs; meanwhile the next lane is prepared
        began = time.perf_counter()
        await lane.close()
        closing.append((time.perf_counter() - began) * 1e3)
    await several.close()
    return {"open": row(opening), "close": row(closing)}


async def main(count: int) -> dict[str, object]:
    listed = Only((parse_target("10.9.9.9:443"),))
    await measured(2, Egress(), 3)  # the loop and the threads have what they need
    before = (len(os.listdir("/proc/self/fd")), len(socket.if_nameindex()))
    told: dict[str, object] = {
        "prepared": await measured(2, Egress(), count),
        "on the spot": await measured(0, Egress(), count),
        "with a list": await measured(0, listed, count),
    }
    after = (len(os.listdir("/proc/self/fd")), len(socket.if_nameindex()))
    told["left"] = {"descriptors": after[0] - before[0], "interfaces": after[1] - before[1]}
    return told


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--lanes", type=int, default=100)
    given = parser.parse_args()
    if ctypes.CDLL(None).unshare(CLONE_NEWNET) != 0:
        sys.exit("this needs root")
    subprocess.run(["ip", "-batch", "-"], input=HOST, text=True, check=True)
    found = uvloop.run(main(given.lanes))
    for name, value in found.items():
        print(f"{name:12} {value}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))
