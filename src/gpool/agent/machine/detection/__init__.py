"""Detection of GPUs, processors, memory and installed tools, and of what is missing to lend them. Changes nothing."""

from __future__ import annotations

from gpool.agent.machine.detection.findings import Finding, Level, doctor
from gpool.agent.machine.detection.gpus import detect
from gpool.agent.machine.detection.host import HostCapacity, host_capacity

__all__ = ["Finding", "HostCapacity", "Level", "detect", "doctor", "host_capacity"]
