"""Progress of a function and of commands in real sandboxes, as the API and the command line show it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from click.testing import CliRunner

import gpool
from gpool import Client
from gpool.cli.main import cli
from tests.tools.processes import PATIENCE_S, Pool, eventually

SHELL = 'echo "0.25 warm up" > "$GPOOL_PROGRESS_FILE"; sleep 600'
LINK = 'echo "0.9 secret" > other; ln -s other "$GPOOL_PROGRESS_FILE"; sleep 3; rm "$GPOOL_PROGRESS_FILE"; '
PYTHON = "import os, time, gpool; os.chdir('/'); gpool.progress(0.5, 'half'); time.sleep(600)"


def shown(pool: Pool, task: str) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def has_progress() -> bool:
        found.update(pool.status(task).get("progress") or {})
        return bool(found)

    eventually("progress is shown", has_progress, PATIENCE_S)
    pool.ask("DELETE", f"/v1/tasks/{task}")
    return found


@pytest.mark.parametrize(
    ("command", "fraction", "text"),
    [
        (["sh", "-c", SHELL], 0.25, "warm up"),
        (["sh", "-c", LINK + SHELL], 0.25, "warm up"),
        (["python", "-c", PYTHON], 0.5, "half"),
    ],
)
def test_a_command_reports_its_progress(
    pool: Pool, command: list[str], fraction: float, text: str
) -> None:
    task = pool.ask("POST", "/v1/tasks", {"command": command}).json()["ids"][0]
    found = shown(pool, task)
    assert (found["fraction"], found["text"]) == (fraction, text)
    assert found["at"]


def test_a_function_reports_its_progress(pool: Pool) -> None:
    def work() -> None:
        pause = threading.Event()
        for _ in gpool.tqdm(range(4), desc="steps"):
            pause.wait(0.1)
        for _ in range(6000):
            gpool.progress(0.4, "epoch 4")
            pause.wait(0.1)

    with Client(pool.address, pool.key) as sdk:
        run = sdk.task(work).submit()
        eventually(
            "its text is shown",
            lambda: (pool.status(run.id).get("progress") or {}).get("text") == "epoch 4",
            PATIENCE_S,
        )
        listed = CliRunner().invoke(cli, ["ps"], obj=sdk).output
        status = CliRunner().invoke(cli, ["status", run.id], obj=sdk).output
        run.cancel()
    assert "PROGRESS" in listed
    assert "40 % epoch 4" in listed
    assert "40 % epoch 4" in status
