"""What a consumer asks for besides a command: an environment, the network, a checkpoint. Refusals name what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpool.core.model import Network, Recipe, TaskSpec, Tier
from gpool.server.actions.tasks.specs import spec_of
from gpool.wire.documents import TaskRequest
from gpool.wire.frames import Grants
from tests.server.server_desk import FUNCTION_SHA256, Desk, an_offer

pytestmark = pytest.mark.anyio
FUNCTION = {"sha256": FUNCTION_SHA256, "python": "3.11"}


def spec(**members: Any) -> TaskSpec:
    if "function" not in members:
        members.setdefault("command", ["true"])
    return spec_of(TaskRequest(**members))


def test_packages_name_an_environment_however_they_are_written() -> None:
    one = spec(recipe={"packages": ["NumPy >= 2", "x_y"], "python": "3.12"})
    two = spec(recipe={"packages": ["x-y", "numpy>=2"], "python": "3.12"})
    assert one == two
    assert one.recipe == Recipe("3.12", ("numpy>=2", "x-y"))
    assert one.environment.startswith("pip:")
    assert one.requirements.python == "3.12"


def test_a_python_alone_is_where_it_may_run_and_no_environment() -> None:
    made = spec(recipe={"python": "3.12"})
    assert (made.environment, made.requirements.python) == ("default", "3.12")
    assert spec(recipe={}) == spec()


def test_an_image_brings_its_own_python() -> None:
    made = spec(recipe={"image": "debian@sha256:" + "0" * 64})
    assert made.environment == "image:debian@sha256:" + "0" * 64
    assert made.requirements.python is None
    function = spec(function=FUNCTION, calls=["eA=="], recipe={"image": "debian"})
    assert function.requirements.python is None


def test_packages_for_a_function_are_built_for_its_own_python() -> None:
    made = spec(function=FUNCTION, calls=["eA=="], recipe={"packages": ["numpy"]})
    assert made.recipe == Recipe("3.11", ("numpy",))
    assert made == spec(
        function=FUNCTION, calls=["eA=="], recipe={"packages": ["numpy"], "python": "3.11"}
    )
    plain = spec(function=FUNCTION, calls=["eA=="])
    assert plain == spec(function=FUNCTION, calls=["eA=="], recipe={"python": "3.11"})
    assert plain.recipe is None


def test_a_checkpoint_is_a_directory() -> None:
    made = spec(checkpoint="state", checkpoint_every_s=60, grace_s=30, network="egress")
    assert (made.checkpoint, made.checkpoint_every, made.grace) == (
        "state/",
        60_000_000,
        30_000_000,
    )
    assert made.requirements.network is Network.EGRESS
    assert spec(checkpoint="deep/state/").checkpoint == "deep/state/"


def test_modules_to_preload_are_named_once() -> None:
    made = spec(function=FUNCTION, calls=["eA=="], preload=["torch", "numpy.linalg", "torch"])
    assert made.preload == ("torch", "numpy.linalg")


def test_a_virtual_machine_without_gpu_image_and_network_is_accepted() -> None:
    assert spec(tier="vm", recipe={"packages": ["numpy"]}).requirements.tier is Tier.VM
    assert spec(tier="vm", network="egress").requirements.network is Network.EGRESS
    assert spec(tier="container", gpu=1, network="egress").requirements.tier is Tier.CONTAINER


REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"recipe": {"python": "3"}}, "is not a minor version"),
    ({"recipe": {"packages": ["./here"]}}, "is not a package requirement"),
    ({"recipe": {"packages": ["x @ https://example.org/x.whl"]}}, "names an address"),
    ({"recipe": {"image": "debian", "packages": ["numpy"]}}, "an image brings its own Python"),
    ({"recipe": {"packages": ["numpy"]}, "environment": "lab"}, "not both"),
    ({"environment": "pip:" + "0" * 64}, "with 'recipe'"),
    ({"environment": "image:debian"}, "with 'recipe'"),
    ({"recipe": {"packages": ["x"] * 501}}, "packages"),
    ({"network": "lan"}, "network"),
    ({"preload": ["numpy"]}, "'preload' applies to functions"),
    ({"tier": "vm", "vram": "4GB"}, "'tier' is 'vm' together with 'vram'"),
    ({"tier": "vm", "recipe": {"image": "debian"}}, "'tier' is 'vm' together with an image"),
    ({"checkpoint": "/state"}, "'checkpoint': path '/state' is absolute"),
    ({"checkpoint": "a/../b"}, "'checkpoint'"),
    ({"checkpoint": ""}, "checkpoint"),
    ({"checkpoint_every_s": 0}, "checkpoint_every_s"),
    ({"grace_s": -1}, "grace_s"),
]


@pytest.mark.parametrize(("members", "said"), REFUSALS)
async def test_what_cannot_be_is_refused_with_what_to_change(
    desk: Desk, members: dict[str, Any], said: str
) -> None:
    answer = await desk.post("/v1/tasks", {"command": ["true"], **members})
    assert answer.status_code in (400, 422), answer.text
    assert said in answer.text


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"recipe": {"python": "3.12"}}, "wants Python 3.12 and the function was made with 3.11"),
        ({"checkpoint": "state/"}, "'checkpoint' applies to commands"),
        ({"preload": ["os; import sys"]}, "name modules"),
        ({"outputs": ["model/"]}, "'outputs' applies to commands"),
        (
            {"inputs": [{"path": "a", "sha256": "0" * 64, "size_bytes": 1}]},
            "'inputs' applies to commands",
        ),
    ],
)
async def test_what_a_function_cannot_have_is_refused(
    desk: Desk, members: dict[str, Any], said: str
) -> None:
    answer = await desk.calls(1, **members)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["detail"]


async def test_what_was_asked_for_reaches_the_node_and_is_shown(desk: Desk) -> None:
    offer = replace(
        an_offer(),
        builds=frozenset({"pip"}),
        networks=frozenset({Network.NONE, Network.EGRESS}),
    )
    agent = await desk.agent(offer=offer)
    members = {
        "recipe": {"packages": ["numpy"]},
        "network": "egress",
        "checkpoint": "state/",
    }
    task = await desk.command(**members)
    assert await desk.schedule() == 1
    [grants] = agent.frames(Grants)
    [(_, told)] = grants.specs
    assert told.recipe == Recipe(None, ("numpy",))
    shown = (await desk.get(f"/v1/tasks/{task}")).json()
    assert shown["environment"] == told.environment
    assert (shown["network"], shown["preemptible"], shown["checkpoint"]) == ("egress", True, None)


WAITS: list[tuple[dict[str, Any], str]] = [
    ({"recipe": {"packages": ["numpy"]}}, "No node builds environments from packages"),
    ({"recipe": {"image": "debian"}}, "No node runs images"),
    ({"recipe": {"python": "3.9"}}, "No node has Python 3.9"),
    ({"network": "egress"}, "No node gives the network 'egress'"),
    ({"tier": "vm"}, "No node isolates as strongly as 'vm'"),
]


@pytest.mark.parametrize(("members", "said"), WAITS)
async def test_a_task_no_node_can_run_says_what_they_lack(
    desk: Desk, members: dict[str, Any], said: str
) -> None:
    await desk.agent()
    task = await desk.command(**members)
    assert await desk.schedule() == 0
    assert said in (await desk.get(f"/v1/tasks/{task}/explain")).json()["sentence"]


async def test_a_node_that_is_closed_by_its_owners_rules_says_why(desk: Desk) -> None:
    await desk.agent(offer=replace(an_offer(), closed="outside its hours, 22:00 to 06:00"))
    task = await desk.command()
    assert await desk.schedule() == 0
    sentence = (await desk.get(f"/v1/tasks/{task}/explain")).json()["sentence"]
    assert "outside its hours" in sentence
