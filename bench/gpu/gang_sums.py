"""Both members' part of `gang.py`: sums over NCCL, checked, and how fast they are."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

SIZES = (1 << 10, 1 << 20, 1 << 24)  # bytes
TIMES = 10


def main() -> None:
    # both stand on one card, and NCCL wants a card once a host: to it they are two hosts, as they are to gpool
    os.environ["NCCL_HOSTID"] = f"node-{os.environ['GPOOL_RANK']}"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    for size in SIZES:
        value = torch.empty(size // 4, device="cuda")
        took = []
        for turn in range(TIMES):
            value.fill_(rank + 1 + turn)
            torch.cuda.synchronize()
            began = time.perf_counter()
            dist.all_reduce(value)
            torch.cuda.synchronize()
            took.append(time.perf_counter() - began)
            wanted = sum(one + 1 + turn for one in range(world))
            if not bool((value == wanted).all()):
                raise SystemExit(f"wrong sum at {size} bytes: {value[:4].tolist()}, not {wanted}")
        if rank == 0:
            best = min(took)
            print(
                f"{size} bytes: {best * 1e3:.2f} ms, {size * 8 / best / 1e9:.3f} Gbit/s", flush=True
            )
    name = torch.cuda.get_device_name()
    print(f"rank {rank} of {world} on {name}, NCCL {torch.cuda.nccl.version()}: all sums right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
