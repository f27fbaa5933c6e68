"""A full run with JSON logs at every level: each line is an ECS document, ids connect the hops, no secret is in it."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.tools.ecs import declared, problems
from tests.tools.processes import LONG_LEASE, PATIENCE_S, Pool, eventually

JSON_LOGS = {
    "GPOOL_SERVER_LOG_FORMAT": "json",
    "GPOOL_SERVER_LOG_LEVEL": "debug",
    "GPOOL_AGENT_LOG_FORMAT": "json",
    "GPOOL_AGENT_LOG_LEVEL": "debug",
}
PROGRAM = """
import gpool
@gpool.task
def half(number):
    return number // 2
assert list(half.map(range(20))) == [n // 2 for n in range(20)]
"""


@pytest.fixture(scope="module")
def logged(
    tmp_path_factory: pytest.TempPathFactory, require: Callable[[str], None]
) -> Iterator[Pool]:
    require("bubblewrap")
    pool = Pool(tmp_path_factory.mktemp("logged"), {**LONG_LEASE, **JSON_LOGS})
    try:
        pool.start()
        yield pool
    finally:
        pool.stop()


def lines_of(log: Path) -> list[str]:
    return log.read_text().splitlines()


def events(log: Path, **wanted: object) -> list[dict[str, Any]]:
    """Events whose fields have these values; `__` stands for a dot."""
    told = [json.loads(line) for line in lines_of(log)]
    names = {name.replace("__", "."): value for name, value in wanted.items()}
    return [each for each in told if all(each.get(n) == value for n, value in names.items())]


def test_a_request_and_its_task_are_found_in_the_logs_of_server_and_agent(logged: Pool) -> None:
    id_ = f"from-the-proxy-{secrets.token_hex(4)}"
    headers = {"Authorization": f"Bearer {logged.key}", "X-Request-Id": id_}
    answer = httpx2.post(
        f"{logged.address}/v1/tasks",
        headers=headers,
        json={"command": ["true"]},
        timeout=PATIENCE_S,
        trust_env=False,
    )
    assert answer.headers["X-Request-Id"] == id_
    [task] = answer.json()["ids"]
    logged.until_status(task, "succeeded")
    server, agent = logged.directory / "server.log", logged.directory / "first.log"
    [submitted] = events(server, http__request__id=id_, message="tasks submitted")
    assert submitted["gpool.task.id"] == [task]
    assert submitted["user.id"].startswith("u-")
    [granted] = events(server, message="leases granted", gpool__task__id=[task])
    node = granted["gpool.node.id"]
    [begun] = events(agent, message="task_begins", gpool__task__id=task)
    assert begun["gpool.node.id"] == node
    assert begun["gpool.task.epoch"] == 1
    eventually(
        "the agent logged the end",
        lambda: bool(events(agent, message="task_ended", gpool__task__id=task)),
        PATIENCE_S,
    )
    assert events(server, message="task ended", gpool__task__id=task)
    # The agent's channel is a request too: both sides name it.
    [opened] = events(agent, message="channel_open")
    assert opened["http.request.id"]


def test_every_line_of_a_full_run_is_an_ecs_document_without_secrets(
    logged: Pool, tmp_path: Path
) -> None:
    planted = [f"planted{secrets.token_hex(16)}" for _ in range(6)]
    variable, key, password, token, cookie, wrong = planted
    plain = f"plain{secrets.token_hex(16)}"
    document = {
        "command": ["sh", "-c", "echo $HF_TOKEN; no-such-program"],
        "secrets": {"HF_TOKEN": variable},
        "env": {"PLAIN": plain},
        "outputs": ["missing/"],
    }
    [task] = logged.ask("POST", "/v1/tasks", document).json()["ids"]
    logged.until_status(task, "failed")
    sleeper = logged.submit("sleep", "600")
    logged.until_status(sleeper, "running")
    logged.ask("DELETE", f"/v1/tasks/{sleeper}")
    done = tmp_path / "program.py"
    done.write_text(PROGRAM)
    ran = logged.script(done, tmp_path)
    assert ran.returncode == 0, ran.stderr
    with httpx2.Client(base_url=logged.address, timeout=PATIENCE_S, trust_env=False) as http:
        http.get("/v1/me", headers={"Authorization": f"Bearer gpk_{key}"})
        http.get("/v1/me", headers={"Authorization": f"Basic {wrong}", "Cookie": f"s={cookie}"})
        http.post("/v1/auth/password", json={"name": "nobody", "password": password})
        http.post("/v1/auth/refresh", json={"refresh_token": token})
        http.get(f"/v1/nodes?token={token}&code={key}")
        http.get(f"/join/{token}/x")
    logged.restart_server()
    logged.until_online("first")
    metrics = logged.ask("GET", "/metrics").text
    logged.stop()

    types = declared()
    logs = [logged.directory / "server.log", logged.directory / "first.log"]
    lines = [line for log in logs for line in lines_of(log)]
    assert [found for line in lines for found in problems(line, types)] == []
    assert {"gpool-server", "gpool-agent", "gpool-cli"} <= {
        json.loads(line)["service.name"] for line in lines
    }
    whole = "\n".join(lines) + metrics
    assert [value for value in planted if value in whole] == []
    assert logged.key not in whole
    assert f"/v1/tasks/{task}" in whole  # control: the search finds paths of the same requests
