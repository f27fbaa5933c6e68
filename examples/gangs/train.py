"""Train data-parallel on several nodes; resume from the checkpoint after the loss of a node.

    gpool run --nodes 2 --engine torchrun --pip torch --checkpoint state/ examples/gangs/train.py

Each node processes its own part of the data, and gradients are averaged. Without a GPU it uses gloo.
"""

from __future__ import annotations

import argparse
import os
import threading

import torch
import torch.distributed as dist

STATE = "state/model.pt"


def main(steps: int, pause_s: float) -> None:
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    weight = torch.zeros(4, dtype=torch.float64, device=device)
    first = 0
    if os.path.exists(STATE):  # every member finds the checkpoint of rank 0
        saved = torch.load(STATE, map_location=device)
        first, weight = saved["step"], saved["weight"]
        print(f"rank {rank} goes on at step {first}", flush=True)
    for step in range(first, steps):
        gradient = torch.full_like(weight, (rank + 1) * (step + 1))
        dist.all_reduce(gradient)
        weight += gradient / world
        if rank == 0:
            os.makedirs("state", exist_ok=True)
            torch.save({"step": step + 1, "weight": weight}, STATE + ".tmp")
            os.replace(STATE + ".tmp", STATE)  # atomic: a checkpoint never has half a file
            print(f"step {step + 1} of {steps}", flush=True)
        threading.Event().wait(pause_s)  # stands for work
    print(f"rank {rank} of {world} has {weight.sum().item():g}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--steps", type=int, default=20)
    asked.add_argument("--pause", type=float, default=0.1, help="seconds between two steps")
    given = asked.parse_args()
    main(given.steps, given.pause)
