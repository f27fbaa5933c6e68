"""A Ray program on several nodes: gpool starts the cluster, the program finds it.

gpool run --nodes 2 --engine ray --memory 2GB --pip ray examples/gangs/squares.py
"""

from __future__ import annotations

import argparse
import threading

import ray


@ray.remote
def square(number: int, pause_s: float) -> tuple[str, int]:
    """Where it was computed, and what it is."""
    threading.Event().wait(pause_s)  # stands for work
    return ray.get_runtime_context().get_node_id(), number * number


def main(count: int, pause_s: float) -> None:
    ray.init(log_to_driver=False)
    waiting = [
        square.options(scheduling_strategy="SPREAD").remote(n, pause_s) for n in range(count)
    ]
    total, nodes = 0, set()
    while waiting:
        ready, waiting = ray.wait(waiting)
        for node, value in ray.get(ready):
            total += value
            nodes.add(node)
        print(f"{count - len(waiting)} of {count}", flush=True)
    print(f"{total} from {len(nodes)} nodes", flush=True)


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--count", type=int, default=20)
    asked.add_argument("--pause", type=float, default=0.1, help="seconds a square takes")
    given = asked.parse_args()
    main(given.count, given.pause)
