"""Measure an NVIDIA GPU and print its row for the table of GPU models (`GPOOL_SERVER_GPU_MODELS`).

Run it on the machine with the GPU, with nothing else on the card: `python -m bench.gpu.model_row [INDEX]`. The table
wants the rates of the data sheet; where it gives them, write them into the row instead of the estimates.
"""

from __future__ import annotations

import sys

from gpool.agent.gpu_verification.cuda import Device, measure
from gpool.core.gpu_verification import MeasuredSpeed
from gpool.core.model import GIB
from gpool.core.specs.gpu import normalise

INT8_FACTOR = 3.0
"""Peak over the measurement: 1,979 over 651 tera-operations per second on an H200."""
MEMORY_FACTOR = 1.2
"""Likewise: 4,800 over 3,980 gigabytes per second."""


def row_of(model: str, memory_bytes: int, measured: MeasuredSpeed) -> str:
    """Return the row in TOML: data sheet rates estimated from measured ones, memory rounded up to whole GiB."""
    teraops = round(measured.int8_gigaops * INT8_FACTOR / 1000)
    gigabytes = round(measured.memory_bytes_per_s * MEMORY_FACTOR / 1e9)
    return (
        "[[model]]\n"
        f'name = "{normalise(model)}"\n'
        f"int8_teraops = {max(1, teraops)}\n"
        f"memory_gb_per_s = {max(1, gigabytes)}\n"
        f"memory_gib = {-(-memory_bytes // GIB)}\n"
    )


def main() -> None:
    with Device(int(sys.argv[1]) if len(sys.argv) > 1 else 0) as device:
        print(row_of(device.name, device.free_and_total[1], measure(device)), end="")


if __name__ == "__main__":
    main()
