"""A task that keeps a checkpoint is moved between real nodes, and ends as if nothing had happened."""

from __future__ import annotations

import pytest

from tests.tools.processes import PATIENCE_S, Pool, eventually

COUNTER = """
import hashlib, os, signal, sys, time
os.makedirs("state", exist_ok=True)
n, told, moves = 0, "", 0
if os.path.exists("state/progress"):
    n, told, moves = open("state/progress").read().split(":")
    n, moves = int(n), int(moves) + 1
    print("resumed", n, flush=True)
def keep():
    with open("state/progress.tmp", "w") as file:
        file.write(f"{n}:{told}:{moves}")
    os.rename("state/progress.tmp", "state/progress")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("under way", flush=True)
while n < 300:
    waits = n >= 100 * (moves + 1) and moves < int(os.environ["MOVES"])
    if not waits:  # until it is moved, however long that takes
        n += 1
        told = hashlib.sha256(f"{told}{n}".encode()).hexdigest()
    time.sleep(0.01)
    if asked:
        keep()
        sys.exit(0)
with open("result", "w") as file:
    file.write(told)
"""


def submitted(pool: Pool, moves: int) -> str:
    wanted = {
        "env": {"MOVES": str(moves)},
        "command": ["python", "-c", COUNTER],
        "outputs": ["result"],
        "checkpoint": "state/",
        "checkpoint_every_s": 600,
        "grace_s": 600,
    }
    task: str = pool.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
    return task


def result_of(pool: Pool, task: str) -> str:
    pool.until_status(task, "succeeded")
    (output,) = pool.ask("GET", f"/v1/tasks/{task}/result").json()["outputs"]
    return str(output["sha256"])


def printed(pool: Pool, task: str, epoch: int) -> str:
    """By the attempt with this epoch."""
    items = pool.ask("GET", f"/v1/tasks/{task}/logs").json()["items"]
    return "".join(item["text"] for item in items if item["epoch"] == epoch)


@pytest.mark.slow
def test_a_preempted_task_goes_on_elsewhere_and_ends_with_the_same_result(pool: Pool) -> None:
    undisturbed = result_of(pool, submitted(pool, moves=0))
    pool.join("other")
    task = submitted(pool, moves=2)
    seen: list[str] = []
    for round_ in range(1, 3):
        pool.until_status(task, "running")
        eventually(
            "it is under way", lambda n=round_: "under way" in printed(pool, task, n), PATIENCE_S
        )
        name = pool.status(task)["node_name"]
        seen.append(name)
        pool.set_availability(name, "paused")
        pool.ask("POST", f"/v1/tasks/{task}/preempt")
        eventually("it runs elsewhere", lambda n=round_: pool.status(task)["epoch"] > n, PATIENCE_S)
        pool.set_availability(name, "available")
    assert result_of(pool, task) == undisturbed
    assert "resumed" in printed(pool, task, 3)
    assert len(set(seen)) == 2
    document = pool.status(task)
    assert (document["epoch"], document["tries"], document["losses"]) == (3, 0, 0)
