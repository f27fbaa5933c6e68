"""A task that keeps a checkpoint is moved between real nodes, and ends as if nothing had happened."""

from __future__ import annotations

import pytest

from gpool.testing.processes import Pool, eventually

COUNTER = """
import hashlib, os, signal, sys, time
os.makedirs("state", exist_ok=True)
n, told = 0, ""
if os.path.exists("state/progress"):
    n, told = open("state/progress").read().split(":")
    n = int(n)
    print("resumed", n, flush=True)
def keep():
    with open("state/progress.tmp", "w") as file:
        file.write(f"{n}:{told}")
    os.rename("state/progress.tmp", "state/progress")
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
while n < 300:
    n += 1
    told = hashlib.sha256(f"{told}{n}".encode()).hexdigest()
    if n % 20 == 0:
        print("at", n, flush=True)
    time.sleep(0.01)
    if asked:
        keep()
        sys.exit(0)
with open("result", "w") as file:
    file.write(told)
"""


def submitted(pool: Pool) -> str:
    wanted = {
        "command": ["python", "-c", COUNTER],
        "outputs": ["result"],
        "checkpoint": "state/",
        "checkpoint_every_s": 600,
        "grace_s": 5,
    }
    task: str = pool.ask("POST", "/v1/tasks", wanted).json()["ids"][0]
    return task


def result_of(pool: Pool, task: str) -> str:
    pool.until_status(task, "succeeded", within_s=60)
    (output,) = pool.ask("GET", f"/v1/tasks/{task}/result").json()["outputs"]
    return str(output["sha256"])


def printed(pool: Pool, task: str) -> str:
    """By the attempt there is."""
    items = pool.ask("GET", f"/v1/tasks/{task}/logs").json()["items"]
    return "".join(item["text"] for item in items)


@pytest.mark.slow
def test_a_preempted_task_goes_on_elsewhere_and_ends_with_the_same_result(pool: Pool) -> None:
    undisturbed = result_of(pool, submitted(pool))
    pool.join("other")
    task = submitted(pool)
    seen: list[str] = []
    for round_ in range(1, 3):
        pool.until_status(task, "running")
        eventually("it is under way", lambda: "at " in printed(pool, task), within_s=30)
        name = pool.status(task)["node_name"]
        seen.append(name)
        pool.set_availability(name, "paused")
        pool.ask("POST", f"/v1/tasks/{task}/preempt")
        eventually(
            "it runs elsewhere", lambda n=round_: pool.status(task)["epoch"] > n, within_s=30
        )
        pool.set_availability(name, "available")
    assert result_of(pool, task) == undisturbed
    assert "resumed" in printed(pool, task)
    assert len(set(seen)) == 2
    document = pool.status(task)
    assert (document["epoch"], document["tries"], document["losses"]) == (3, 0, 0)
