"""Machines built from recorded sysfs trees: files, links, device nodes that stand in for cards, and processes."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from gpool.agent.machine.drm import DrmCards, DrmRoots
from gpool.agent.machine.gpus import Detector, others
from gpool.core.model import KIB, Gpu
from gpool.testing.fake_nvml import FakeNvml

RECORDED = sorted((Path(__file__).parent / "recorded" / "drm").glob("*.json"))
NULL = os.makedev(1, 3)  # the stand-in of every card: harmless


class DrmMachine:
    """`real_nodes`: device nodes made by mknod (root only); else links to /dev/null."""

    def __init__(self, folder: Path, recording: str, *, real_nodes: bool = False) -> None:
        path = next(path for path in RECORDED if path.stem == recording)
        self.recorded: dict[str, Any] = json.loads(path.read_text())
        self.roots = DrmRoots(folder / "sys", folder / "dev", folder / "proc")
        for name, content in self.recorded["sys"].items():
            file = self.roots.sys / name
            file.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                file.write_text(content)
            else:
                file.symlink_to(content["link"])
        self.roots.proc.mkdir()
        names = [f"dri/{entry.name}" for entry in (self.roots.sys / "class" / "drm").iterdir()]
        for name in [*names, *(["kfd"] if self.vendor == "amd" else [])]:
            node = self.roots.dev / name
            node.parent.mkdir(parents=True, exist_ok=True)
            if real_nodes:
                os.mknod(node, 0o020660, NULL)
                node.chmod(0o660)
            else:
                node.symlink_to("/dev/null")
        self.cards = DrmCards(self.roots)
        self.detector = Detector(
            None, FakeNvml(driver=""), lambda: others(lambda _: None, self.drm), self.cards
        )

    @property
    def vendor(self) -> str:
        return str(self.recorded["card"]["vendor"])

    @property
    def drm(self) -> Path:
        return self.roots.sys / "class" / "drm"

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return self.detector.survey().gpus

    def device(self, at: int = 0) -> Path:
        return self.cards.found()[self.recorded["card"]["bus"][at]].device

    def write(self, name: str, text: str, at: int = 0) -> None:
        file = self.device(at) / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def lose(self, at: int = 0) -> None:
        device = self.device(at)
        for entry in list(self.drm.iterdir()):
            if entry.resolve().is_relative_to(device):
                entry.unlink()
        shutil.rmtree(device)

    def run(
        self, pid: int, *clients: int, at: int = 0, vram: int = 0, host: int = 0, parent: int = 1
    ) -> None:
        """A process with the card open once for each client id."""
        here, bus = self.roots.proc / str(pid), self.recorded["card"]["bus"][at]
        for name in ("fd", "fdinfo"):
            (here / name).mkdir(parents=True, exist_ok=True)
        (here / "stat").write_text(f"{pid} (train) S {parent} 0 0\n")
        (here / "comm").write_text("train\n")
        card = self.cards.found()[bus]
        for client in clients:
            number = str(10 + len(os.listdir(here / "fd")))
            (here / "fd" / number).symlink_to(self.cards.node(card))
            text = self.recorded["fdinfo"].format(
                client=client, bus=bus, vram=vram // KIB, host=host // KIB
            )
            (here / "fdinfo" / number).write_text(text)

    def end(self, pid: int) -> None:
        shutil.rmtree(self.roots.proc / str(pid))

    def kfd_memory(self, pid: int, gpu_id: str, size: int) -> Path:
        """Memory that the compute driver holds for a process, whether or not it lives."""
        place = self.roots.sys / "devices/virtual/kfd/kfd/proc" / str(pid)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"vram_{gpu_id}").write_text(f"{size}\n")
        return place
