"""kill -9 and SIGSTOP against a real pool: what was lost, what was accepted twice, how long until it went on.

python bench/faults.py [--tasks 5000] [--kills 20] [--freezes 100] [--agent-kills 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import signal
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from gpool.testing.processes import (
    LEASE_TIME_S,
    SHORT_LEASE,
    Pool,
    alive,
    eventually,
    processes_saying,
)

SQUARES = """
import time
import gpool

@gpool.task
def square(n):
    time.sleep(0.004)
    return n * n

for n, value in enumerate(square.map(range({tasks}))):
    print(n, value)
"""


@dataclass(frozen=True, slots=True)
class ServerKills:
    """`lost`: acknowledged and never answered. `twice`: accepted more than once, or answered wrongly."""

    tasks: int
    kills: int
    lost: int
    twice: int
    slowest_ready_s: float


@dataclass(frozen=True, slots=True)
class AgentKill:
    """How long anything of the task survived its agent, and when the other task was done elsewhere."""

    survived_s: float
    finished_elsewhere_s: float
    moved_to: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """What the pool shows after the frozen agent has thawed and said everything it had to say."""

    node: str
    epoch: int
    log_epochs: tuple[int, ...]

    @property
    def late_reports_refused(self) -> bool:
        return self.node == "second" and self.epoch == 2 and set(self.log_epochs) == {2}


def kill_server(pool: Pool, tasks: int, kills: int) -> ServerKills:
    """A consumer maps a function over `tasks` numbers while the server is killed `kills` times, evenly spread."""
    due = {tasks * (kill + 1) // (kills + 1) for kill in range(kills)}
    answers: list[str] = []
    slowest = 0.0
    for line in pool.program(SQUARES.format(tasks=tasks)):
        answers.append(line)
        if len(answers) in due:
            pool.server.kill()
            slowest = max(slowest, pool.start_server())
    wrong = sum(answer != f"{n} {n * n}" for n, answer in enumerate(answers))
    [task] = pool.json("ps", "--limit", "1")
    results = pool.results(task["batch"])
    accepted = {result["id"] for result in results if result["status"] == "succeeded"}
    in_order = [result["sequence"] for result in results] == list(range(1, len(results) + 1))
    return ServerKills(
        tasks=tasks,
        kills=kills,
        lost=tasks - len(accepted),
        twice=len(results) - len(accepted) + wrong + (not in_order),
        slowest_ready_s=round(slowest, 2),
    )


def kill_agent(pool: Pool, mark: str) -> AgentKill:
    """Two tasks run on `first`, which is killed; `second` has to finish what can be finished."""
    both_on_first(pool)
    endless = pool.submit("python", "-c", f"import time; time.sleep(600)  # {mark}")
    short = pool.submit("sleep", "1")
    for task in (endless, short):
        pool.until_status(task, "running")
    pool.set_availability("second", "available")
    of_the_task = processes_saying(mark)
    assert of_the_task, "nothing of the marked task is seen"

    pool.agents["first"].kill()
    survived = eventually(
        "nothing of the task is left", lambda: not any(map(alive, of_the_task)), within_s=10
    )
    elsewhere = survived + pool.until_status(short, "succeeded", within_s=10 * LEASE_TIME_S)
    moved_to = pool.status(short)["node_name"]
    pool.gpool("cancel", endless)
    pool.agents["first"].start()
    eventually("first is back", lambda: "first" in pool.online(), 30)
    return AgentKill(round(survived, 2), round(elsewhere, 2), moved_to)


def freeze_agent(pool: Pool) -> Freeze:
    """`first` is stopped until its lease went to `second`, then thawed with a finished attempt in its hands."""
    both_on_first(pool)
    agent = pool.agents["first"]
    task = pool.submit("sh", "-c", "sleep 2; echo late; echo kept > out", outputs=["out"])
    pool.until_status(task, "running")
    pool.set_availability("second", "available")

    agent.signal(signal.SIGSTOP)
    pool.until_status(task, "succeeded", within_s=10 * LEASE_TIME_S)
    agent.signal(signal.SIGCONT)

    # What `first` held back is sent, in order, before it does anything new: a task done there proves it was said.
    both_on_first(pool)
    after = pool.submit("true")
    pool.until_status(after, "succeeded")
    now = pool.status(task)
    logs = pool.ask("GET", f"/v1/tasks/{task}/logs").json()["items"]
    return Freeze(now["node_name"], now["epoch"], tuple(item["epoch"] for item in logs))


def both_on_first(pool: Pool) -> None:
    """`first` takes what comes, `second` is there and waits."""
    if "second" not in pool.agents:
        pool.join("second")
    pool.set_availability("second", "paused")
    eventually("first is online", lambda: "first" in pool.online(), 30)


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--tasks", type=int, default=5000)
    asked.add_argument("--kills", type=int, default=20)
    asked.add_argument("--freezes", type=int, default=100)
    asked.add_argument("--agent-kills", type=int, default=5)
    asked.add_argument("--quick", action="store_true", help="the sizes of make test")
    asked.add_argument("--json", type=Path)
    options = asked.parse_args()
    if options.quick:
        options.tasks, options.kills, options.freezes, options.agent_kills = 1500, 3, 3, 1

    with tempfile.TemporaryDirectory() as folder, Pool(Path(folder), SHORT_LEASE) as pool:
        server = kill_server(pool, options.tasks, options.kills)
        agents = [kill_agent(pool, f"gpool-fault-{n}") for n in range(options.agent_kills)]
        freezes = [freeze_agent(pool) for _ in range(options.freezes)]

    refused = sum(freeze.late_reports_refused for freeze in freezes)
    print("| fault | times | outcome |\n|---|---|---|")
    print(
        f"| kill -9 server, {server.tasks} tasks | {server.kills} | {server.lost} lost, "
        f"{server.twice} twice, ready again within {server.slowest_ready_s} s |"
    )
    if agents:
        survived = max(kill.survived_s for kill in agents)
        elsewhere = max(kill.finished_elsewhere_s for kill in agents)
        print(
            f"| kill -9 agent | {len(agents)} | processes gone within {survived} s, done elsewhere "
            f"within {elsewhere} s ({elsewhere / LEASE_TIME_S:.1f} lease times) |"
        )
    print(
        f"| agent frozen past its lease | {len(freezes)} | late reports refused {refused} times |"
    )
    if options.json:
        rows = {
            "server_kills": asdict(server),
            "agent_kills": [asdict(kill) for kill in agents],
            "freezes": {"times": len(freezes), "refused": refused},
        }
        options.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
