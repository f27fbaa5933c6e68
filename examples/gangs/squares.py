"""Run a Ray program with one worker per node; gpool starts the cluster that `ray.init()` finds.

gpool run --nodes 2 --engine ray --memory 2GB --pip ray examples/gangs/squares.py
"""

from __future__ import annotations

import argparse
import os
import threading

import ray
from ray.util import ActorPool
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(num_cpus=1)
class Worker:
    def square(self, number: int, pause_s: float) -> tuple[str, int]:
        """Id of the Ray node that computed the square, and the square."""
        threading.Event().wait(pause_s)  # stands for work
        return ray.get_runtime_context().get_node_id(), number * number


def main(count: int, pause_s: float) -> None:
    ray.init(log_to_driver=False)
    group = placement_group([{"CPU": 1}] * int(os.environ["GPOOL_NODES"]), "STRICT_SPREAD")
    workers = [
        Worker.options(scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote()
        for index in range(group.bundle_count)
    ]
    found = ActorPool(workers).map(lambda one, n: one.square.remote(n, pause_s), range(count))
    total, nodes = 0, set()
    for number, (node, value) in enumerate(found):
        total += value
        nodes.add(node)
        print(f"{number + 1} of {count}", flush=True)
    print(f"{total} from {len(nodes)} nodes", flush=True)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--count", type=int, default=20)
    asked.add_argument("--pause", type=float, default=0.1, help="seconds a square takes")
    given = asked.parse_args()
    main(given.count, given.pause)
