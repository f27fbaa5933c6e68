"""Password guessing: what people who are signed in, agents, and the owner of the account notice of it.

    python -m bench.guessing [--seconds 60] [--quick] [--json FILE]

Server and agent are processes of their own. Guessers come from many addresses of loopback, 200 times a second: half of
them at one account, half at names that nobody has. Meanwhile a client with a token submits, reads and waits; the owner
signs in again and again from where they signed in before; and the node is asked for its last beat.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import sys
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter

import httpx2

from tests.tools.processes import Pool

PER_S = 200
ADDRESSES = 40
BEAT_S, TTL_S = 1.0, 5.0
NAME, PASSWORD = "owner", "the right password"
P99_MS = 300.0
SETTINGS = {
    "GPOOL_SERVER_TTL_S": str(TTL_S),
    "GPOOL_SERVER_MARGIN_S": "1",
    "GPOOL_SERVER_BEAT_S": str(BEAT_S),
}


@dataclass
class Guessing:
    seconds: float
    guesses: int = 0
    guesses_per_s: int = 0
    answers: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    owner_tries: int = 0
    owner_in: int = 0
    owner_p50_ms: float = 0.0
    oldest_beat_s: float = 0.0
    reconnects: int = 0
    load: float = 0.0

    def short_of(self) -> list[str]:
        said = []
        if self.p99_ms > P99_MS:
            said.append(f"p99 of signed-in requests is {self.p99_ms} ms")
        if self.oldest_beat_s > 2 * BEAT_S or self.reconnects:
            said.append(f"a beat was {self.oldest_beat_s} s old, {self.reconnects} reconnects")
        if self.owner_in < self.owner_tries:
            said.append(f"the owner got in {self.owner_in} times of {self.owner_tries}")
        if "200" in self.answers:
            said.append("a guess was right")
        if self.guesses_per_s < 0.95 * PER_S:
            said.append(f"only {self.guesses_per_s} guesses/s were made")
        return said


class Attack:
    def __init__(self, url: str, seconds: float) -> None:
        self._url = url
        self._seconds = seconds
        self._over = asyncio.Event()
        self.answers: Counter[str] = Counter()

    async def guess(self) -> None:
        """At a steady rate, whatever the answers are."""
        clients = [
            httpx2.AsyncClient(
                base_url=self._url,
                transport=httpx2.AsyncHTTPTransport(local_address=f"127.0.1.{number + 1}"),
                timeout=30,
            )
            for number in range(ADDRESSES)
        ]
        began, made = perf_counter(), 0
        waiting: set[asyncio.Task[None]] = set()
        while (passed := perf_counter() - began) < self._seconds:
            while made < passed * PER_S:
                name = NAME if made % 2 else f"nobody-{secrets.token_hex(4)}"
                task = asyncio.create_task(self._one(clients[made % ADDRESSES], name))
                waiting.add(task)
                task.add_done_callback(waiting.discard)
                made += 1
            await asyncio.sleep(0.005)
        self._over.set()
        await asyncio.gather(*waiting)
        for client in clients:
            await client.aclose()

    async def _one(self, client: httpx2.AsyncClient, name: str) -> None:
        body = {"name": name, "password": secrets.token_hex(8)}
        try:
            answer = await client.post("/v1/auth/password", json=body)
        except httpx2.TransportError as error:
            self.answers[type(error).__name__] += 1
        else:
            self.answers[str(answer.status_code)] += 1

    async def work(self, headers: dict[str, str]) -> list[float]:
        """Somebody who is signed in."""
        took = []
        async with httpx2.AsyncClient(base_url=self._url, headers=headers, timeout=30) as http:
            while not self._over.is_set():
                for method, path, body in (
                    ("GET", "/v1/me", None),
                    ("POST", "/v1/tasks", {"command": ["true"]}),
                    ("GET", "/v1/tasks?limit=20", None),
                ):
                    began = perf_counter()
                    answer = await http.request(method, path, json=body)
                    answer.raise_for_status()
                    took.append((perf_counter() - began) * 1000)
                await asyncio.sleep(0.02)
        return sorted(took)

    async def owner(self) -> tuple[int, list[float]]:
        """The owner, from where they signed in before."""
        tries, took = 0, []
        async with httpx2.AsyncClient(base_url=self._url, timeout=30) as http:
            while not self._over.is_set():
                tries += 1
                began = perf_counter()
                answer = await http.post(
                    "/v1/auth/password", json={"name": NAME, "password": PASSWORD}
                )
                if answer.status_code == 200:
                    took.append((perf_counter() - began) * 1000)
                await asyncio.sleep(2)
        return tries, sorted(took)

    async def beats(self, headers: dict[str, str]) -> float:
        """The oldest that a node's last beat ever was."""
        oldest = 0.0
        async with httpx2.AsyncClient(base_url=self._url, headers=headers, timeout=30) as http:
            while not self._over.is_set():
                for node in (await http.get("/v1/nodes")).json()["items"]:
                    seen = datetime.fromisoformat(node["last_beat_at"])
                    oldest = max(oldest, (datetime.now(UTC) - seen).total_seconds())  # noqa: TID251 - a real clock is measured
                await asyncio.sleep(0.1)
        return oldest


async def attack(pool: Pool, seconds: float) -> Guessing:
    async with httpx2.AsyncClient(base_url=pool.address, timeout=30) as http:
        body = {"name": NAME, "password": PASSWORD}
        (await http.post("/v1/users", json=body)).raise_for_status()
        token = (await http.post("/v1/auth/password", json=body)).json()["access_token"]
    headers = {"authorization": f"Bearer {token}"}
    run = Attack(pool.address, seconds)
    _, took, (tries, got_in), oldest = await asyncio.gather(
        run.guess(), run.work(headers), run.owner(), run.beats(headers)
    )
    guesses = sum(run.answers.values())
    return Guessing(
        seconds=seconds,
        guesses=guesses,
        guesses_per_s=round(guesses / seconds),
        answers=dict(run.answers),
        requests=len(took),
        p50_ms=_quantile(took, 0.5),
        p99_ms=_quantile(took, 0.99),
        owner_tries=tries,
        owner_in=len(got_in),
        owner_p50_ms=_quantile(got_in, 0.5),
        oldest_beat_s=round(oldest, 2),
        reconnects=pool.agents["first"].said().count("channel_open") - 1,
        load=round(os.getloadavg()[0], 1),
    )


def _quantile(ordered: list[float], share: float) -> float:
    if not ordered:
        return 0.0
    return round(ordered[min(len(ordered) - 1, int(len(ordered) * share))], 2)


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--seconds", type=float, default=60)
    asked.add_argument("--quick", action="store_true", help="10 seconds")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), SETTINGS) as pool:
        found = asyncio.run(attack(pool, 10 if options.quick else options.seconds))
    print(
        f"{found.guesses} guesses in {found.seconds:g} s from {ADDRESSES} addresses (load {found.load})\n"
    )
    print("| | measured | promised |\n|---|---|---|")
    print(f"| guesses/s | {found.guesses_per_s} | {PER_S} |")
    print(f"| their answers | {found.answers} | never 200 |")
    print(
        f"| signed-in requests, p50 · p99 ms | {found.p50_ms} · {found.p99_ms} | p99 ≤ {P99_MS:g} |"
    )
    print(f"| the node's oldest beat, s | {found.oldest_beat_s} | ≤ {2 * BEAT_S:g} |")
    print(f"| the agent's reconnects | {found.reconnects} | 0 |")
    owner = f"{found.owner_in} of {found.owner_tries}, p50 {found.owner_p50_ms} ms"
    print(f"| the owner's sign-ins | {owner} | all |")
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=2) + "\n")
    short = found.short_of()
    for said in short:
        print(f"falls short: {said}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
