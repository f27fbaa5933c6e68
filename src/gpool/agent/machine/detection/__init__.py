"""What this machine has: GPUs, processors, memory, and what is missing to lend them. It changes nothing."""

from __future__ import annotations

from gpool.agent.machine.detection.findings import Finding, Level, doctor
from gpool.agent.machine.detection.gpus import detect
from gpool.agent.machine.detection.host import HostFacts, host_facts

__all__ = ["Finding", "HostFacts", "Level", "detect", "doctor", "host_facts"]
