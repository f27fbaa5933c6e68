"""Cost of events: no-op calls (W1) of ten users, with one of them subscribed and with none, in alternating rounds.

python -m bench.events [--calls 10000] [--rounds 5] [--quick] [--json FILE]

Two pools of real processes, each with an agent of two slots and ten users who call at the same time. In one pool a
user has a webhook, whose receiver runs here. The ratio is that of the medians; below 0.9 the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from threading import Thread
from typing import Any

import httpx2

from gpool.client.client import Client
from tests.tools.processes import Pool

QUICK = {"calls": 2000, "rounds": 1}
NAMES = {False: "nobody", True: "subscribed"}
USERS = 10
LEAST = 0.9
PASSWORD = "a long enough password"


class _Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    received = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        _Receiver.received += 1
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def ignore(_: object) -> None:
    """The call of W1: returns nothing."""


def key_of(pool: Pool, name: str) -> str:
    """API key of a new user."""
    with httpx2.Client(base_url=pool.address) as http:
        http.post("/v1/users", json={"name": name, "password": PASSWORD}).raise_for_status()
        signed = http.post("/v1/auth/password", json={"name": name, "password": PASSWORD})
        headers = {"authorization": f"Bearer {signed.raise_for_status().json()['access_token']}"}
        scopes = ["tasks:read", "tasks:write", "webhooks", "account:read"]
        made = http.post("/v1/keys", json={"name": "bench", "scopes": scopes}, headers=headers)
        key: str = made.raise_for_status().json()["key"]
        return key


def one_round(pool: Pool, clients: list[Client], calls: int) -> dict[str, float]:
    each = calls // len(clients)

    def work(client: Client) -> int:
        return sum(1 for _ in client.map(client.task(ignore), [itertools.repeat(None, each)]))

    used, began = pool.server.cpu_s(), time.perf_counter()
    with ThreadPoolExecutor(len(clients)) as threads:
        done = sum(threads.map(work, clients))
    took, used = time.perf_counter() - began, pool.server.cpu_s() - used
    assert done == each * len(clients)
    return {"tasks_per_s": done / took, "server_cpu_us": used / done * 1e6}


def measured(calls: int, rounds: int) -> dict[str, Any]:
    found: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    with ExitStack() as stack:
        receiver = ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
        Thread(target=receiver.serve_forever, daemon=True).start()
        stack.callback(receiver.shutdown)
        pools: dict[bool, tuple[Pool, list[Client]]] = {}
        for is_on in (False, True):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            pool = Pool(folder, {"GPOOL_SERVER_WEBHOOK_NETWORKS": "127.0.0.0/8"})
            stack.callback(pool.stop)
            pool.start_server()
            pool.join("first", "--slots", "2")
            keys = [key_of(pool, f"user{number}") for number in range(USERS)]
            clients = [Client(pool.address, key) for key in keys]
            for client in clients:
                stack.callback(client.close)
            if is_on:
                url = f"http://127.0.0.1:{receiver.server_port}/"
                clients[0].api.send_json("POST", "/v1/webhooks", {"url": url})
            one_round(pool, clients, min(calls, 500))  # warm-up
            pools[is_on] = (pool, clients)
        for number in range(rounds):
            order = (False, True) if number % 2 == 0 else (True, False)
            for is_on in order:
                found[is_on].append(one_round(*pools[is_on], calls))
    result: dict[str, Any] = {
        NAMES[is_on]: {name: median(one[name] for one in got) for name in got[0]}
        for is_on, got in found.items()
    }
    result["rounds"] = {NAMES[is_on]: got for is_on, got in found.items()}
    plain, subscribed = result["nobody"], result["subscribed"]
    result["ratio"] = {name: subscribed[name] / plain[name] for name in plain}
    result["delivered"] = _Receiver.received
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="2,000 calls, one round")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    asked = parser.parse_args()
    calls, rounds = (
        (QUICK["calls"], QUICK["rounds"]) if asked.quick else (asked.calls, asked.rounds)
    )
    found = measured(calls, rounds)
    print(f"W1, {calls} calls of {USERS} users, median of {rounds} rounds in alternating order")
    print("| pool | tasks/s | µs server CPU a task |\n|---|---|---|")
    for name in ("nobody", "subscribed", "ratio"):
        row = found[name]
        print(f"| {name} | {row['tasks_per_s']:.3f} | {row['server_cpu_us']:.3f} |")
    print(f"\n{found['delivered']} deliveries while it ran")
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1))
    return 0 if found["ratio"]["tasks_per_s"] >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
