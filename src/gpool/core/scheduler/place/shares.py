"""CPUs and memory that a task gets on a node: as requested, else in proportion to its GPUs.

A request is met as it is. Without one, a task with GPUs gets their part of the node: with g of the n GPUs that the node
offers, g/n of the offered CPUs and memory. That part is a default, not a condition: the task needs `least_memory` and
`Requirements.cpu_milli` (1 CPU) free, as a task without GPUs does, and gets up to its part of what is free beyond. So a
CPU task on a node never keeps a GPU idle, and a node whose tasks have GPUs only divides evenly.

Example: a node offers 8 GPUs, 192 CPUs, 2048 GiB.

    --gpu 1                 24 CPUs, 256 GiB     (1/8)
    --gpu 4                 96 CPUs, 1024 GiB    (4/8)
    --gpu 0.5               12 CPUs, 128 GiB     (0.5/8)
    --gpu 1 --cpus 4         4 CPUs, 256 GiB     (memory by the GPU: more than 4/192)
    --gpu 1 --cpus 96       96 CPUs, 1024 GiB    (memory by the CPUs: more than 1/8)
    --gpu 1                  2 CPUs, 256 GiB     (where others hold 190 CPUs)
"""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.model import Node, Offer, Requirements


class ComputeShare(NamedTuple):
    cpu_milli: int
    memory_bytes: int


def part_of(amount: int, offer: Offer, gpu_milli: int) -> int:
    """Part of an amount that goes with `gpu_milli` thousandths of the node's GPUs, rounded down."""
    whole = 1000 * len(offer.gpus)
    return amount * min(gpu_milli, whole) // whole if whole else 0


def least_memory(node: Node, needs: Requirements) -> int:
    """Requested memory, else the node's in proportion to the least CPUs: as much must be free."""
    if needs.memory_bytes is not None:
        return needs.memory_bytes
    offer = node.offer
    return offer.memory_bytes * needs.cpu_milli // offer.cpu_milli if offer.cpu_milli else 0


def most_cpu(node: Node, needs: Requirements, gpu_milli: int) -> int:
    """CPUs, in thousandths, that the task takes of an idle node."""
    if not needs.cpu_by_gpus:
        return needs.cpu_milli
    return max(needs.cpu_milli, part_of(node.offer.cpu_milli, node.offer, gpu_milli))


def most_memory(node: Node, needs: Requirements, gpu_milli: int) -> int:
    """Memory that the task takes of an idle node."""
    least = least_memory(node, needs)
    if not needs.memory_by_gpus:
        return least
    return max(least, part_of(node.offer.memory_bytes, node.offer, gpu_milli))


def granted(
    node: Node, needs: Requirements, gpu_milli: int, free_cpu: int, free_memory: int
) -> ComputeShare:
    """CPUs and memory for a task that fits: the least of each is free."""
    cpu, memory = needs.cpu_milli, least_memory(node, needs)
    if needs.cpu_by_gpus:
        cpu = max(cpu, min(free_cpu, most_cpu(node, needs, gpu_milli)))
    if needs.memory_by_gpus:
        memory = max(memory, min(free_memory, most_memory(node, needs, gpu_milli)))
    return ComputeShare(cpu, memory)
