"""GPUs of recorded machines, from matrices as `nvidia-smi topo -m` prints them (`topologies/*.txt`)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpool.core.model import GIB, Gpu, GpuDetails
from gpool.core.specs.gpu_topology import PciePath

FOLDER = Path(__file__).parent / "topologies"
NAMES = sorted(path.stem for path in FOLDER.glob("*.txt"))


@dataclass(frozen=True, slots=True)
class RecordedMachine:
    gpus: tuple[Gpu, ...]
    words: tuple[tuple[str, ...], ...]  # the matrix: "NV2", "PIX", …
    cpus: tuple[str, ...]  # of each GPU: "0-23,48-71"


def recorded(name: str) -> RecordedMachine:
    lines = [line for line in (FOLDER / f"{name}.txt").read_text().splitlines() if line[0] != "#"]
    rows = [line.split("\t") for line in lines[1:]]
    count = len(rows)
    words = tuple(tuple(word.strip() for word in row[1 : 1 + count]) for row in rows)
    cpus = tuple(row[1 + count] for row in rows)
    numas = [None if row[2 + count] == "N/A" else int(row[2 + count]) for row in rows]
    gpus = tuple(_gpu(at, words[at], numas[at]) for at in range(count))
    return RecordedMachine(gpus, words, cpus)


def _gpu(index: int, words: tuple[str, ...], numa: int | None) -> Gpu:
    links = [(peer, int(word[2:])) for peer, word in enumerate(words) if word.startswith("NV")]
    near = [
        (peer, PciePath[word]) for peer, word in enumerate(words) if word in PciePath.__members__
    ]
    details = GpuDetails(
        bus=f"0000:{0x10 + index:02x}:00.0",
        links=tuple(links),
        numa=numa,
        near=tuple((peer, int(path)) for peer, path in near),
    )
    return Gpu(index, f"GPU-{index}", "NVIDIA X", "nvidia", 80 * GIB, details=details)
