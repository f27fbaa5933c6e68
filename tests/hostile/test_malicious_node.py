"""A malicious node over a real socket: no lie ends, changes or delays an honest task, and the server serves on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import httpx2
import pytest

from gpool.core.ids import encode
from gpool.core.model import GIB, EndReason, Gpu
from gpool.wire.frames import Finished, Hold, OfferChanged, Started
from tests.hostile.malicious_node import (
    LABEL,
    LIES_ABOUT_ITSELF,
    LIES_ABOUT_OTHERS,
    MaliciousNode,
    Victim,
)
from tests.server.server_desk import Live, serving
from tests.tools.nodes import a_key, joined
from tests.tools.processes import PATIENCE_S
from tests.tools.scripted_agent import ScriptedAgent, offer

GPU = "GPU-11111111-0000-4000-8000-000000000001"


@dataclass
class Stage:
    """A server, an honest node with four processors and a GPU, and a malicious one of another owner."""

    live: Live
    honest: ScriptedAgent
    malicious: MaliciousNode
    granted: int = 0
    http: httpx2.Client = field(init=False)

    def __post_init__(self) -> None:
        self.http = httpx2.Client(
            base_url=self.live.url, headers=self.live.headers, timeout=PATIENCE_S, trust_env=False
        )

    def submit(self, **members: Any) -> str:
        answer = self.http.post("/v1/tasks", json={"command": ["true"], **members})
        assert answer.status_code == 202, answer.text
        return str(answer.json()["ids"][0])

    def task(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/tasks/{name}").json()
        return found

    def run_on_honest(self) -> tuple[str, Hold]:
        name = self.submit(cpus=2)  # more than the malicious node has
        self.granted += 1
        lease = self.honest.granted(self.granted)[-1]
        hold = Hold(lease.task, lease.epoch)
        self.honest.report(Started(*pair(hold)))
        return name, hold

    def run_on_malicious(self) -> tuple[str, Hold]:
        known = {lease.task for lease in self.malicious.granted(0)}
        name = self.submit(labels=[LABEL])
        leases = self.malicious.granted(len(known) + 1)
        hold = next(Hold(each.task, each.epoch) for each in leases if each.task not in known)
        self.malicious.report(Started(*pair(hold)))
        return name, hold


def pair(hold: Hold) -> tuple[int, int]:
    return hold.task, hold.epoch


def owner_of(live: Live, name: str) -> dict[str, str]:
    account = {"name": name, "password": "correct horse battery staple"}
    with httpx2.Client(base_url=live.url, timeout=PATIENCE_S, trust_env=False) as http:
        http.post("/v1/users", json=account).raise_for_status()
        token = http.post("/v1/auth/password", json=account).json()["access_token"]
    return {"authorization": f"Bearer {token}"}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("malicious")
    with serving(folder, node_frames_per_s=0) as live:

        def join(headers: dict[str, str], number: int, name: str) -> Any:
            with httpx2.Client(
                base_url=live.url, headers=headers, timeout=PATIENCE_S, trust_env=False
            ) as http:
                return joined(
                    lambda path, body: http.post(path, json=body).raise_for_status().json(),
                    a_key(number),
                    name=name,
                )

        honest = ScriptedAgent(live.url, join(live.headers, 1, "honest"), cpus=4)
        malicious = MaliciousNode(live.url, join(owner_of(live, "mallory"), 2, "malicious"))
        made = Stage(live, honest, malicious)
        with closing(honest), closing(malicious), made.http:
            honest.connect()
            gpu = Gpu(0, GPU, "NVIDIA H200", "nvidia", 141 * GIB)
            honest.send(OfferChanged(replace(offer(4), gpus=(gpu,))))
            honest.beat()
            yield made


@pytest.mark.parametrize("lie", LIES_ABOUT_OTHERS)
def test_no_lie_about_another_node_harms_an_honest_task(stage: Stage, lie: str) -> None:
    stage.malicious.connect()
    name, hold = stage.run_on_honest()
    LIES_ABOUT_OTHERS[lie](stage.malicious, Victim(hold, GPU))
    assert stage.task(name)["status"] == "running"
    assert stage.task(name)["epoch"] == hold.epoch
    assert stage.http.get(f"/v1/tasks/{name}/logs").text.find("forged") < 0
    assert stage.honest.beat(hold).drop == ()
    gpus = stage.http.get("/v1/resources", params={"kind": "gpu"}).json()["items"]
    [mine] = [gpu for gpu in gpus if gpu["node_name"] == "honest"]
    assert (mine["status"], mine["flagged"]) == ("free", None)
    end = Finished(hold.task, hold.epoch, EndReason.EXITED, 0, duration_us=1000)
    assert stage.honest.report(end).refused == ()  # control: the lease's own node ends it
    told = stage.task(name)
    assert (told["status"], told["exit_code"]) == ("succeeded", 0)
    assert stage.http.get("/readyz").status_code == 200


@pytest.mark.parametrize("lie", LIES_ABOUT_ITSELF)
def test_a_lie_about_its_own_task_ends_that_task_and_nothing_else(stage: Stage, lie: str) -> None:
    stage.malicious.connect()
    honest, hold = stage.run_on_honest()
    stage.malicious.send(OfferChanged(stage.malicious.own_offer))
    stage.malicious.beat()
    name, own = stage.run_on_malicious()
    told = LIES_ABOUT_ITSELF[lie]
    stage.malicious.report(*told.items(own))
    found = stage.task(name)
    assert (found["status"], found["reason"]) == told.ends
    assert found["id"] == encode("task", own.task)
    assert len(found["error_text"] or "") <= 1 << 17
    stage.honest.report(Finished(hold.task, hold.epoch, EndReason.EXITED, 0))
    assert stage.task(honest)["status"] == "succeeded"
