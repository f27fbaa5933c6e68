"""What the agent's look at its GPUs costs: processor seconds a second, for eight GPUs looked at every second.

python -m bench.telemetry [--json FILE] [--seconds 20] [--gpus 8]

With an NVIDIA driver the real card is asked, once for each of the GPUs wanted; without one the library's part costs nothing and
only ours is measured (it says which).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path

from gpool.agent.daemon import boot_clock, wall_clock
from gpool.agent.machine.gpu_monitor import GpuMonitor
from gpool.agent.machine.gpus import Detector
from gpool.agent.machine.host import AgentProcesses, ForeignPrograms
from gpool.agent.machine.monitor import LoadMeter, NodeMonitor, PolicyFile, facts_now, sampler
from gpool.agent.machine.nvml import Nvml
from gpool.agent.machine.real_nvml import RealNvml
from gpool.agent.machine.vendors import ParsedGpus
from gpool.core.model import GIB, Offer
from gpool.testing.fake_nvml import FakeNvml, h200

LOOK_EVERY = 10  # glances to a whole look, as the agent does it


def spent_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def lookouts(count: int, rules: Path | None) -> tuple[str, list[NodeMonitor]]:
    """As many as it takes to look at that many GPUs."""
    has_driver = Path("/dev/nvidiactl").exists()
    made: list[NodeMonitor] = []
    seen = 0
    while seen < count:
        nvml: Nvml = RealNvml() if has_driver else FakeNvml(*map(h200, range(count)))
        detector = Detector(None, nvml, ParsedGpus)
        seen += max(1, len(detector.survey().gpus))
        book, meter = PolicyFile(rules), LoadMeter(os.getpid())
        kin = AgentProcesses(os.getpid())
        watch, programs = GpuMonitor(nvml, kin), ForeignPrograms(kin)
        made.append(
            NodeMonitor(
                book,
                lambda d=detector: Offer(1000, GIB, GIB, d.survey().gpus),  # type: ignore[misc]
                lambda m=meter: facts_now(wall_clock(), m, lambda: None),  # type: ignore[misc]
                sampler(book, watch, programs, wall_clock, boot_clock),
            )
        )
    return ("NVML on the real card" if has_driver else "without a card: our part only"), made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    how, made = lookouts(asked.gpus, asked.policy)
    for one in made:
        one.survey()
    costs: list[float] = []
    began, before = time.monotonic(), spent_s()
    for second in range(asked.seconds):
        at = spent_s()
        for one in made:
            if second % LOOK_EVERY == LOOK_EVERY - 1 and one is made[0]:
                one.survey()  # the whole look once: the machine is one, however many cards
            else:
                one.poll()
        costs.append(spent_s() - at)
        time.sleep(max(0.0, began + second + 1 - time.monotonic()))  # noqa: TID251 - real seconds
    share = (spent_s() - before) / (time.monotonic() - began)
    print(f"{asked.gpus} GPUs, {how}: {100 * share:.2f} % of a core", end="")
    print(f"; a glance costs {1000 * sorted(costs)[len(costs) // 2]:.2f} ms (median)")
    if asked.json:
        asked.json.write_text(json.dumps({"gpus": asked.gpus, "how": how, "share": share}))


if __name__ == "__main__":
    main()
