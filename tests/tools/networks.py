"""Addresses for pretended machines on this one. It only looks; whoever asks lays the cables and takes them away."""

from __future__ import annotations

import os
import subprocess


def unused_network() -> str:
    """The beginning of 254 addresses that no interface here has: another run may be under way on this machine, and look now."""
    listed = subprocess.run(
        ["ip", "-4", "-oneline", "address"], check=True, capture_output=True, text=True
    ).stdout
    numbers = ((os.getpid() + more) % 4096 for more in range(4096))
    beginnings = (f"10.{224 + number // 256}.{number % 256}" for number in numbers)
    return next(network for network in beginnings if f" {network}." not in listed)
