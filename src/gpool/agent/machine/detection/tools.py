"""Asks other vendors' tools and the kernel for GPUs, and hands what they print to `vendors`. Changes nothing; waits seconds at most."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

from gpool.agent.machine.detection import vendors
from gpool.agent.machine.detection.vendors import ParsedGpus

DRM = Path("/sys/class/drm")
ASK_S = 10.0
MOST_BYTES = 4 * 1024**2
MOST_DEVICES = 64
ROCM = [
    "--showproductname",
    "--showmeminfo",
    "vram",
    "--showuniqueid",
    "--showbus",
    "--showdriverversion",
    "--json",
]

Ask = Callable[[list[str]], str | None]
"""Runs a program and gives what it printed; None: there is no such program."""


def ask(argv: list[str]) -> str | None:
    found = shutil.which(argv[0])
    if found is None:
        return None
    try:
        done = subprocess.run(
            [found, *argv[1:]],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
            timeout=ASK_S,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{argv[0]}: {error}"  # no tool's format: the parser complains of it in these words
    return done.stdout[:MOST_BYTES].decode("utf-8", "replace")


def others(ask: Ask = ask, root: Path = DRM) -> ParsedGpus:
    """GPUs that are not NVIDIA's. The kernel is asked about a vendor whose tool is not there or tells of nothing."""
    found = [_amd(ask), _intel(ask), _apple(ask)]
    told = {gpu.vendor for parsed in found for gpu in parsed.gpus}
    kernel = vendors.drm(_cards(root))
    found.append(
        ParsedGpus(tuple(gpu for gpu in kernel.gpus if gpu.vendor not in told), kernel.complaints)
    )
    return ParsedGpus(
        tuple(gpu for parsed in found for gpu in parsed.gpus),
        tuple(text for parsed in found for text in parsed.complaints),
    )


def _amd(ask: Ask) -> ParsedGpus:
    static = ask(["amd-smi", "static", "--json"])
    if static is not None:
        parsed = vendors.amd_smi(static, ask(["amd-smi", "list", "--json"]) or "")
        if parsed.gpus:
            return parsed
    older = ask(["rocm-smi", *ROCM])
    if older is not None:
        return vendors.rocm_smi(older)
    return parsed if static is not None else ParsedGpus()


def _intel(ask: Ask) -> ParsedGpus:
    listing = ask(["xpu-smi", "discovery", "-j"])
    if listing is None:
        return ParsedGpus()
    ids = vendors.xpu_ids(listing)[:MOST_DEVICES]
    details = {one: ask(["xpu-smi", "discovery", "-d", one, "-j"]) or "" for one in ids}
    return vendors.xpu_smi(listing, details)


def _apple(ask: Ask) -> ParsedGpus:
    kinds = ["SPDisplaysDataType", "SPHardwareDataType"]
    told = ask(["system_profiler", "-json", *kinds])
    return ParsedGpus() if told is None else vendors.apple(told)


def _cards(root: Path) -> Mapping[str, Mapping[str, str]]:
    cards = {}
    for card in sorted(root.glob("card[0-9]*")) if root.is_dir() else ():
        device = card / "device"
        if "-" in card.name or not device.is_dir():  # card0-HDMI-A-1 is a plug
            continue
        files = {
            "vendor": _word(device / "vendor"),
            "device": _word(device / "device"),
            "unique_id": _word(device / "unique_id"),
            "name": _word(device / "product_name"),
            "bus": os.path.basename(os.path.realpath(device)),
            "vram": _word(device / "mem_info_vram_total") or _word(card / "lmem_total_bytes"),
        }
        cards[card.name] = {name: text for name, text in files.items() if text}
    return cards


def _word(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()[:200]
    return ""
