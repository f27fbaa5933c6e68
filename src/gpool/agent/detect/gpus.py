"""Finds GPUs by NVML, or makes simulated ones from a text. A machine without a driver simply has none."""

from __future__ import annotations

import contextlib
import hashlib
import re

import pynvml  # type: ignore[import-untyped]

from gpool.core.errors import Invalid
from gpool.core.model import GIB, Gpu

# Well-known cards, by the name a consumer would ask for.
MEMORY_GIB = {
    "A10": 24,
    "A100": 80,
    "A10040GB": 40,
    "A10080GB": 80,
    "A10G": 24,
    "A40": 48,
    "B200": 180,
    "GB200": 186,
    "GTX1080TI": 11,
    "H100": 80,
    "H200": 141,
    "L4": 24,
    "L40": 48,
    "L40S": 48,
    "P100": 16,
    "RTX2080TI": 11,
    "RTX3060": 12,
    "RTX3070": 8,
    "RTX3080": 10,
    "RTX3090": 24,
    "RTX4060": 8,
    "RTX4070": 12,
    "RTX4080": 16,
    "RTX4090": 24,
    "RTX5070": 12,
    "RTX5080": 16,
    "RTX5090": 32,
    "RTXA4000": 16,
    "RTXA5000": 24,
    "RTXA6000": 48,
    "T4": 16,
    "V100": 16,
    "V10032GB": 32,
}
MOST_SIMULATED = 64
_DECORATION = re.compile(
    r"NVIDIA|GEFORCE|TESLA|QUADRO|GRAPHICS|GPU|SXM\d?|PCIE|HBM\d?E?|NVL|\d+GI?B"
)


def normalised(name: str) -> str:
    """`NVIDIA A100-SXM4-80GB` is A100, `NVIDIA GeForce RTX 4090` is RTX4090: what consumers write."""
    words = re.findall(r"[A-Z0-9]+", name.upper())
    kept = [word for word in words if not _DECORATION.fullmatch(word)]
    return "".join(kept or words)


def detect(simulate: str | None = None) -> tuple[Gpu, ...]:
    """The machine's GPUs, or with `simulate` ('H100:2,RTX4090') pretended ones, marked as such."""
    return _simulated(simulate) if simulate else _nvidia()


def _simulated(text: str) -> tuple[Gpu, ...]:
    found: list[Gpu] = []
    for part in text.split(","):
        name, _, count = part.strip().partition(":")
        model = re.sub(r"[^A-Z0-9]", "", name.upper())
        memory = MEMORY_GIB.get(model)
        if memory is None:
            raise Invalid(
                f"cannot simulate a {name!r}; known cards are {', '.join(sorted(MEMORY_GIB))}"
            )
        if count and not (count.isdecimal() and 1 <= int(count) <= MOST_SIMULATED):
            raise Invalid(
                f"{part.strip()!r}: after the colon comes how many, 1 to {MOST_SIMULATED}"
            )
        for _ in range(int(count or "1")):
            index = len(found)
            uuid = "SIM-" + hashlib.sha256(f"{model}/{index}".encode()).hexdigest()[:32]
            found.append(Gpu(index, uuid, normalised(name), "nvidia", memory * GIB, simulated=True))
    return tuple(found)


def _nvidia() -> tuple[Gpu, ...]:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    found = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            with contextlib.suppress(pynvml.NVMLError):  # a card that fell off the bus is not lent
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                found.append(
                    Gpu(
                        index,
                        _text(pynvml.nvmlDeviceGetUUID(handle)),
                        normalised(_text(pynvml.nvmlDeviceGetName(handle))),
                        "nvidia",
                        int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
                    )
                )
    except pynvml.NVMLError:
        return tuple(found)
    finally:
        pynvml.nvmlShutdown()
    return tuple(found)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
