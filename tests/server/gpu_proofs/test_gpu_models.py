"""The table of GPU models is data: packaged rows, an operator's file, and the default of the verification."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.model_row import row_of
from gpool.core.errors import Invalid
from gpool.core.gpu_verification import Make, MeasuredSpeed, make_of, terms_for
from gpool.core.model import GIB, SECOND, Gpu, Offer, Permission
from gpool.server.nodes.gpu_models import models_from, models_with, packaged_models
from gpool.server.nodes.gpu_verifier import VerificationSettings
from gpool.server.settings import Settings
from tests.server.gpu_proofs.test_trials import with_gpu
from tests.server.server_desk import StoppedClock, an_offer, open_desk

NEW = """
[[model]]
name = "RTX 9090"
int8_teraops = 2000
memory_gb_per_s = 3000
memory_gib = 64

[[model]]
name = "H200"
int8_teraops = 2100
memory_gb_per_s = 4900
memory_gib = 150
"""


def test_every_packaged_row_sets_a_deadline_of_half_a_minute_at_most() -> None:
    for make in packaged_models().values():
        terms = terms_for(make.memory_gib * GIB, make)
        assert terms.commit_within <= 30 * SECOND


def test_an_operators_file_adds_and_replaces_rows(tmp_path: Path) -> None:
    file = tmp_path / "models.toml"
    file.write_text(NEW)
    found = models_with(file)
    assert found["RTX9090"] == Make(2000, 3000, 64)
    assert found["H200"] == Make(2100, 4900, 150)
    assert found["H100"] == packaged_models()["H100"]
    assert models_with(None) == packaged_models()
    assert make_of("NVIDIA GeForce RTX 9090", 64 * GIB, found) == Make(2000, 3000, 64)
    assert make_of("NVIDIA GeForce RTX 9090", 64 * GIB, packaged_models()) is None
    settings = Settings(data=tmp_path, gpu_models=file)
    assert "RTX9090" in VerificationSettings.of(settings).models


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[[model]", "no table"),
        ("[[model]]\nname = 'X'", "int8_teraops"),
        ("[[model]]\nname='X'\nint8_teraops=0\nmemory_gb_per_s=1\nmemory_gib=1", "int8_teraops"),
        (NEW + NEW, "twice"),
        (NEW.replace("RTX 9090", "-"), "no model name"),
        ("[[modell]]\nname = 'X'", "modell"),
    ],
)
def test_a_bad_file_stops_the_server_with_its_fault(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match=why):
        models_from(text, "models.toml")
    with pytest.raises(Invalid, match="cannot be read"):
        models_with(tmp_path / "none.toml")


def test_the_row_that_the_bench_prints_is_read_by_the_server() -> None:
    """Rates measured on an H200 give nearly the packaged row (docs/measurements/gpu-proof.md)."""
    measured = MeasuredSpeed(40_100, 152_000, 305_000, 651_000, 3_980_000_000_000, 55_000_000_000)
    printed = row_of("NVIDIA H200", 143_771 << 20, measured)
    found, packaged = models_from(printed, "printed")["H200"], packaged_models()["H200"]
    assert found.memory_gib == packaged.memory_gib
    assert abs(found.teraops / packaged.teraops - 1) < 0.02
    assert abs(found.gigabytes_per_s / packaged.gigabytes_per_s - 1) < 0.02


@pytest.mark.parametrize(
    ("given", "verifies"),
    [
        ({}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "10.0.0.1"}, True),
        ({"public_url": "https://pool.example"}, True),  # a proxy on the same machine
        ({"examine_gpus": True}, True),
        ({"host": "0.0.0.0", "examine_gpus": False}, False),
    ],
)
def test_verification_is_on_by_default_beyond_loopback(
    given: dict[str, Any], verifies: bool, tmp_path: Path
) -> None:
    assert VerificationSettings.of(Settings(data=tmp_path, **given)).examine is verifies


@pytest.mark.anyio
async def test_beyond_loopback_models_without_a_row_serve_their_owner_only(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), host="0.0.0.0", plain_http=True)
    gpu = Gpu(0, "GPU-new", "NVIDIA NeverHeardOf", "nvidia", 8 << 30)
    agent = await desk.agent(offer=_with(gpu))
    [shown] = (await desk.get("/v1/resources?kind=gpu")).json()["items"]
    assert "no row for this model" in shown["unproven"]
    assert (shown["flagged"], shown["verified"], shown["available"]) == (None, False, True)
    [problem] = (await desk.get(f"/v1/nodes/{shown['node']}")).json()["problems"]
    assert "serves you, your teams" in problem
    stranger = await desk.person("stranger", Permission.CONSUMER)
    task = await desk.command(headers=stranger, gpu="1")
    await desk.schedule()
    told = (await desk.get(f"/v1/tasks/{task}/explain", headers=stranger)).json()
    assert (agent.leases(), told["code"]) == ([], "unproven")
    await desk.command(gpu="1")
    await desk.schedule()
    assert len(agent.leases()) == 1
    page = (await desk.get("/v1/admin/gpu-models")).json()
    assert (page["verifies"], page["unknown"]) == (True, ["NVIDIA NeverHeardOf"])
    assert {"name": "T4", "int8_teraops": 130, "memory_gb_per_s": 320, "memory_gib": 16} in page[
        "items"
    ]
    admitted = await desk.http.patch(f"/v1/resources/{shown['id']}", json={"flagged": None})
    assert admitted.json()["unproven"] is None
    again = agent.again()
    await again.connect()
    [shown] = (await desk.get("/v1/resources?kind=gpu")).json()["items"]
    assert shown["unproven"] is None, "an operator's decision outlives a connection"
    await desk.server.store.close()


@pytest.mark.anyio
async def test_naming_the_owner_accepts_an_unproven_gpu(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), host="0.0.0.0", plain_http=True)
    agent = await desk.agent(offer=with_gpu(simulated=True))
    stranger = await desk.person("stranger", Permission.CONSUMER)
    await desk.command(headers=stranger, gpu="1", on="user:operator")
    await desk.schedule()
    assert len(agent.leases()) == 1
    await desk.server.store.close()


@pytest.mark.anyio
async def test_a_node_without_gpus_takes_tasks_beyond_loopback_at_once(data: Path) -> None:
    desk = await open_desk(data, StoppedClock(), host="0.0.0.0", plain_http=True)
    agent = await desk.agent(offer=an_offer())
    await desk.command(headers=await desk.person("stranger", Permission.CONSUMER))
    await desk.schedule()
    assert len(agent.leases()) == 1
    await desk.server.store.close()


def _with(gpu: Gpu) -> Offer:
    return replace(an_offer(), gpus=(gpu,))
