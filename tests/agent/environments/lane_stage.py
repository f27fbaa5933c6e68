"""A node and its package index in namespaces of their own; run as root, as a script. Prints what a build reached as JSON.

The world beyond the node is one namespace with four machines: an index, the place where it keeps its files, a proxy, a
stranger. A source package tries all of them, directly and by the proxy, and the node itself: while it is built, and once
without a sandbox.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import http.server
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2

from gpool.agent.environments import Environments, Indexes, UvBuilder, find_uv
from gpool.agent.environments.egress_targets import IndexLanes, asking
from gpool.agent.environments.interpreters import own_interpreter
from gpool.agent.network.policy import EgressPolicy
from gpool.agent.network.root_networks import RootNetworks
from gpool.agent.runtime.bubblewrap.runtime import BubblewrapRuntime
from gpool.agent.runtime.protocol import CommandJob
from gpool.core.specs.fields import environment_name, recipe
from tests.tools.packages import PackageIndex
from tests.tools.runtimes import LIMITS

CLONE_NEWNET = 0x40000000
NODE, GATEWAY = "192.168.77.10", "192.168.77.1"
INDEX, FILES, STRANGER = "11.22.33.44", "11.22.33.45", "11.22.33.46"
PROXY, PROXY_PORT = "11.22.33.47", 3128
TAG = "e57a6"
libc = ctypes.CDLL(None, use_errno=True)

TRIES = """
import json, os, socket
def reached(address, within_s):
    try:
        socket.create_connection(address, within_s).close()
        return True
    except OSError:
        return False
def look():
    found = {name: reached(tuple(address), 2) for name, address in TARGETS.items()}
    variables = {name: value for name, value in os.environ.items() if name.upper().endswith("_PROXY")}
    return json.dumps(found | {"proxy's variables": bool(variables)})
"""
BACKEND = """
import io, os, zipfile
about = "looks-1.0.dist-info"
def build_wheel(directory, settings=None, metadata=None):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as archive:
        archive.writestr("looks.py", "FOUND = " + repr(look()))
        archive.writestr(about + "/METADATA", "Metadata-Version: 2.2\\nName: looks\\nVersion: 1.0\\n")
        archive.writestr(about + "/WHEEL", "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        archive.writestr(about + "/RECORD", "looks.py,,\\n")
    with open(os.path.join(directory, "looks-1.0-py3-none-any.whl"), "wb") as file:
        file.write(held.getvalue())
    return "looks-1.0-py3-none-any.whl"
"""


def unshare() -> None:
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def second_namespace() -> tuple[int, Callable[[Callable[[], Any]], Any]]:
    """The world, and a way to do things in it."""
    orders: list[Callable[[], Any]] = []
    results: list[Any] = []
    asked, done = threading.Semaphore(0), threading.Semaphore(0)
    opened: list[int] = []

    def live() -> None:
        unshare()
        opened.append(os.open("/proc/thread-self/ns/net", os.O_RDONLY))
        done.release()
        while True:
            asked.acquire()
            results.append(orders.pop()())
            done.release()

    threading.Thread(target=live, daemon=True).start()
    done.acquire()

    def do(work: Callable[[], Any]) -> Any:
        orders.append(work)
        asked.release()
        done.acquire()
        return results.pop()

    return opened[0], do


def ip(line: str, namespace: int | None = None) -> None:
    inside = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{namespace}"] if namespace else []
    subprocess.run([*inside, "ip", *line.split()], check=True)


class Pages(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return


def serve(folder: Path, address: str) -> None:
    handler = functools.partial(Pages, directory=str(folder))
    server = http.server.ThreadingHTTPServer((address, 80), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()


class Forwarding(http.server.BaseHTTPRequestHandler):
    """A proxy that fetches any plain address for anybody."""

    def do_GET(self) -> None:
        self.forward("GET")

    def do_HEAD(self) -> None:
        self.forward("HEAD")

    def forward(self, method: str) -> None:
        answer = httpx2.request(method, self.path, trust_env=False)
        self.send_response(answer.status_code)
        for name in ("Content-Type", "Content-Length"):
            self.send_header(name, answer.headers.get(name, ""))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *_: object) -> None:
        return


def serve_proxy() -> None:
    server = http.server.ThreadingHTTPServer((PROXY, PROXY_PORT), Forwarding)
    threading.Thread(target=server.serve_forever, daemon=True).start()


def lay_packages(folder: Path) -> tuple[PackageIndex, str]:
    index = PackageIndex(folder / "index")
    targets = {
        "index": (INDEX, 80),
        "files": (FILES, 80),
        "stranger": (STRANGER, 80),
        "gateway": (GATEWAY, 80),
        "node": (NODE, 80),
        "proxy": (PROXY, PROXY_PORT),
    }
    tries = f"TARGETS = {targets!r}\n{TRIES}"
    index.sdist("looks", tries + BACKEND)
    index.wheel("pip")
    index.wheel("inner")
    for page in index.pages.glob("*/index.html"):
        page.write_text(page.read_text().replace("../../files/", f"http://{FILES}/files/"))
    return index, tries


async def built(folder: Path, proxies: tuple[tuple[str, str], ...] = ()) -> dict[str, bool]:
    runtime = BubblewrapRuntime(folder / "data")
    networks = RootNetworks(EgressPolicy(), TAG)
    await networks.start()
    uv, own = find_uv(), own_interpreter()
    assert uv is not None
    indexes = Indexes(f"http://{INDEX}/simple", proxies=proxies)
    lanes = IndexLanes(networks, "", asking(indexes))
    place = folder / "data" / "environments"
    environments = Environments(
        place,
        UvBuilder(runtime, place, uv, indexes, lanes.open),
        interpreters={own.minor: own},
        own=own.minor,
        clock=lambda: time.monotonic_ns() // 1000,
    )
    wanted = recipe(packages=("looks", "inner"))
    try:
        kept = environments.prepare(environment_name(wanted), wanted, lambda _: None, LIMITS)
        async with kept as prepared:
            code = "import looks; print(looks.FOUND)"
            job = CommandJob(("python", "-c", code), (), (), (), LIMITS, environment=prepared)
            sandbox = await runtime.start_command(job)
            text = b"".join([data async for _, data in sandbox.output()])
            await sandbox.remove()
        found: dict[str, bool] = json.loads(text)
        return found
    finally:
        await environments.close()
        await runtime.close()
        await networks.close()


def main() -> None:
    unshare()  # from here on this process is the node
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        index, tries = lay_packages(folder)
        world, do = second_namespace()
        ip(f"link add world type veth peer name uplink netns {os.getpid()}", world)
        for address in (GATEWAY, INDEX, FILES, STRANGER, PROXY):
            prefix = 24 if address == GATEWAY else 32
            ip(f"addr add {address}/{prefix} dev world", world)
        ip("link set world up", world)
        ip("link set lo up", world)
        ip("link set lo up")
        ip(f"addr add {NODE}/24 dev uplink")
        ip("link set uplink up")
        ip(f"route add default via {GATEWAY}")
        do(serve_proxy)
        for address in (GATEWAY, INDEX, FILES, STRANGER):
            do(functools.partial(serve, index.folder, address))
        serve(folder, NODE)
        control = subprocess.run(
            [sys.executable, "-c", f"{tries}\nprint(look())"],
            env={**os.environ, "HTTP_PROXY": "x"},
            capture_output=True,
            check=True,
        ).stdout
        direct = asyncio.run(built(folder / "direct"))
        proxies = (("HTTP_PROXY", f"http://{PROXY}:{PROXY_PORT}"),)
        proxied = asyncio.run(built(folder / "proxied", proxies))
    told = {"control": json.loads(control), "direct": direct, "proxied": proxied}
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main()
