"""Detection of hardware and tools. Changes nothing."""

from __future__ import annotations

from gpool.agent.machine.detection.findings import Finding, Level, doctor
from gpool.agent.machine.detection.gpus import detect
from gpool.agent.machine.detection.host import HostCapacity, host_capacity

__all__ = ["Finding", "HostCapacity", "Level", "detect", "doctor", "host_capacity"]
