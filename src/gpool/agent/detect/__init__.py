"""What this machine has: GPUs, processors, memory, and what is missing to lend them. It changes nothing."""

from __future__ import annotations

from gpool.agent.detect.findings import Finding, Level, doctor
from gpool.agent.detect.gpus import detect
from gpool.agent.detect.host import HostFacts, host_facts

__all__ = ["Finding", "HostFacts", "Level", "detect", "doctor", "host_facts"]
