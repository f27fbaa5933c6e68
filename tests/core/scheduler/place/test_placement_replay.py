"""The replay of traces: every policy gets the same tasks, none gives out more than there is, and gpool's leaves least idle."""

from __future__ import annotations

import gzip
from pathlib import Path
from random import Random

import pytest
from bench.experience import Flaky, Warm, flaky, warm
from bench.openb import arrivals, as_nodes, read_machines, read_pods
from bench.placement import Run, learnt, measure
from bench.placement_references import REFERENCES

NODES = "sn,cpu_milli,memory_mib,gpu,model\n" + "".join(
    f"n{n},{96000 if n % 3 else 104000},{393216},{8 if n % 3 else 2},{'G2' if n % 3 else 'T4'}\n"
    for n in range(12)
)
KINDS = ["8000,16384,1,1000,", "6000,12288,1,810,", "8000,12288,1,470,", "4000,8192,0,0,"]
KINDS += ["16000,32768,1,1000,T4", "64000,131072,8,1000,", "4000,8192,1,320,G2|T4"]
PODS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n" + "".join(
    f"p{n:03},{KINDS[(n * n + n // 7) % 7]}\n" for n in range(140)
)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    nodes, pods = tmp_path / "nodes.csv", tmp_path / "pods.csv.gz"
    nodes.write_text(NODES)
    with gzip.open(pods, "wt") as file:
        file.write(PODS)
    machines, tasks = read_machines(nodes), read_pods(pods)
    return Run("small", "fill", 7, as_nodes(machines, Random(7)), tasks, learnt(machines, tasks))


def test_a_run_asks_for_130_percent_and_depends_on_its_seed_alone(run: Run) -> None:
    capacity = 1000 * sum(len(node.offer.gpus) for node in run.nodes)
    order = arrivals(run.pods, capacity, Random(7))
    assert order == arrivals(run.pods, capacity, Random(7))
    assert order != arrivals(run.pods, capacity, Random(8))
    assert 1.2 * capacity < sum(pod.gpu_milli for pod in order) <= 1.3 * capacity


@pytest.mark.parametrize("mode", ["fill", "churn"])
def test_gpool_leaves_no_more_idle_than_any_reference(run: Run, mode: str) -> None:
    asked = Run(run.workload, mode, run.seed, run.nodes, run.pods, run.pricing, 600)
    rows = {name: measure(name, asked) for name in ("gpool", *REFERENCES)}
    idle = {name: float(str(row["unallocated_pct"])) for name, row in rows.items()}
    assert all(0 <= each <= 100 for each in idle.values())
    assert idle["gpool"] <= min(idle.values()) + 1
    assert idle["gpool"] < idle["Random"]
    assert {"policy", "workload", "seed", "unallocated_pct", "decisions_per_s"} <= set(rows["FGD"])


def test_knowing_where_models_lie_and_which_nodes_go_away_gains_something() -> None:
    """Small; `bench.experience` measures it."""
    few = Warm(tasks=600)
    blind, knowing = (warm(7, knows=knows, told=few) for knows in (False, True))
    assert float(str(knowing["hit"])) > float(str(blind["hit"])) + 0.2
    assert float(str(knowing["latency_s"])) < float(str(blind["latency_s"]))
    some = Flaky(nodes=40, tasks=600)
    blind, knowing = (flaky(7, knows=knows, told=some) for knows in (False, True))
    assert float(str(knowing["useful"])) > float(str(blind["useful"]))
