"""From what NVML says of a card to the symptoms `core.health` judges. Pure."""

from __future__ import annotations

from gpool.agent.machine.detection.nvml import Vitals
from gpool.core.model import Gpu
from gpool.core.trust.gpu_health import Symptoms


def symptoms_of(
    gpu: Gpu, vitals: Vitals, xids: tuple[int, ...] = (), hung_us: int = 0, lost: bool = False
) -> Symptoms:
    return Symptoms(
        vitals.temperature_c,
        vitals.slowdown_c,
        vitals.shutdown_c,
        vitals.power_mw,
        gpu.details.power_limit_mw if gpu.details is not None else None,
        vitals.throttled,
        vitals.ecc_uncorrected,
        vitals.remap_pending,
        vitals.remap_failed,
        xids,
        hung_us,
        lost,
    )
