"""GPUs of AMD, Intel and Apple, from their tools and the kernel. Changes nothing."""

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
"""Run a program and return its output; None if it is not installed."""


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
        return f"{argv[0]}: {error}"  # not the tool's format: the parser reports this text
    return done.stdout[:MOST_BYTES].decode("utf-8", "replace")


def others(ask: Ask = ask, root: Path = DRM) -> ParsedGpus:
    """From the kernel where a vendor's tool is missing or lists none."""
    found = [_amd(ask), _intel(ask), _apple(ask)]
    known = {gpu.vendor for parsed in found for gpu in parsed.gpus}
    kernel = vendors.drm(_cards(root))
    found.append(
        ParsedGpus(tuple(gpu for gpu in kernel.gpus if gpu.vendor not in known), kernel.complaints)
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
    text = ask(["system_profiler", "-json", *kinds])
    return ParsedGpus() if text is None else vendors.apple(text)


def _cards(root: Path) -> Mapping[str, Mapping[str, str]]:
    cards = {}
    for card in sorted(root.glob("card[0-9]*")) if root.is_dir() else ():
        device = card / "device"
        if "-" in card.name or not device.is_dir():  # card0-HDMI-A-1 is a connector
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
