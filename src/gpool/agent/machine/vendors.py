"""Parsers of GPU listings. Pure; a parser returns a message for each part it does not understand and never raises.

None was tested on its hardware (`tests/agent/detect/recorded` names the source of each format).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpool.core.model import GIB, KIB, MIB, Gpu, GpuDetails

MOST_MEMORY = 1 << 50
AMD_ID, INTEL_ID = "0x1002", "0x8086"
NOT_LENT = "gpool does not give {} GPUs to sandboxes"
LENT = frozenset({"amd", "intel"})
_UNITS = {
    "B": 1,
    "KB": KIB,
    "MB": MIB,
    "GB": GIB,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
    "TB": 1024 * GIB,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B)?\s*", re.IGNORECASE)
_DECORATION = re.compile(
    r"NVIDIA|GEFORCE|TESLA|QUADRO|GRAPHICS|GPU|SXM\d?|PCIE|HBM\d?E?|NVL|\d+GI?B"
    r"|AMD|ATI|RADEON|INSTINCT|INTEL|CORPORATION|R|TM|DATA|CENTER|ARC|APPLE|INC|OAM|SERIES"
)
_PCIE_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


@dataclass(frozen=True, slots=True)
class ParsedGpus:
    gpus: tuple[Gpu, ...] = ()
    complaints: tuple[str, ...] = ()


class _Unread(Exception):
    pass


def normalised(name: str) -> str:
    """Name users write: A100 for `NVIDIA A100-SXM4-80GB`, RX7900XTX for `AMD Radeon RX 7900 XTX`."""
    words = re.findall(r"[A-Z0-9]+", name.upper())
    kept = [word for word in words if not _DECORATION.fullmatch(word)]
    return "".join(kept or words)


def amd_smi(static: str, listing: str = "") -> ParsedGpus:
    """Parse `amd-smi static --json`; uuids it lacks come from `amd-smi list --json`."""
    uuids: dict[object, str] = {}
    complaints = []
    try:
        for row in _rows(_json(listing, "amd-smi list")) if listing.strip() else ():
            if isinstance(row, Mapping) and isinstance(row.get("uuid"), str):
                uuids[_key(row.get("gpu"))] = row["uuid"]
    except _Unread as error:
        complaints.append(str(error))
    parsed = _each(static, "amd-smi static", lambda row, at: _amd_device(row, at, uuids))
    return ParsedGpus(parsed.gpus, (*complaints, *parsed.complaints))


def _amd_device(row: Any, at: int, uuids: Mapping[object, str]) -> Gpu:
    asic, bus, vram = (_table(row, name) for name in ("asic", "bus", "vram"))
    name = _word(asic, "market_name")
    if _AMD_NUMBER.fullmatch(name.lower()):  # an old tool that has only the number of the card
        name = _word(_table(row, "board"), "product_name")
    serial = asic.get("asic_serial")
    bdf = _text(bus.get("bdf")).lower()
    uuid = uuids.get(_key(row.get("gpu"))) or (f"AMD-{serial}" if _has_value(serial) else "")
    power = _table(row, "limit", required=False)
    speed, width = bus.get("max_pcie_speed"), bus.get("max_pcie_width")
    return _device(
        at,
        uuid or _id_by_bus("AMD", bdf),
        name,
        "amd",
        _quantity(vram.get("size"), MIB),
        GpuDetails(
            "amd-smi",
            _text(_table(row, "driver", required=False).get("version")),
            _text(asic.get("target_graphics_version")),
            bdf,
            _pcie(speed, width),
            _watts(power.get("max_power")),
        ),
    )


_AMD_NUMBER = re.compile(r"n/a|0x[0-9a-f]+|")


def rocm_smi(text: str) -> ParsedGpus:
    """Parse `rocm-smi --showproductname --showmeminfo vram --showuniqueid --showbus --showdriverversion --json`."""
    complaints: list[str] = []
    found: list[Gpu] = []
    try:
        document = _json(text, "rocm-smi")
        if not isinstance(document, Mapping):
            raise _Unread("rocm-smi: not an object")
        system = document.get("system")
        driver = _text(system.get("Driver version")) if isinstance(system, Mapping) else ""
        for key in sorted(document, key=_natural):
            if key.startswith("card"):
                _try(
                    f"rocm-smi, {key}",
                    complaints,
                    found,
                    lambda k=key: _rocm_device(document[k], len(found), driver),
                )
    except _Unread as error:
        complaints.append(str(error))
    return ParsedGpus(tuple(found), tuple(complaints))


def _rocm_device(row: Any, at: int, driver: str) -> Gpu:
    if not isinstance(row, Mapping):
        raise _Unread("not an object")
    folded = {
        str(key).lower(): value for key, value in row.items()
    }  # the spelling differs between releases
    name = next(
        (
            _text(folded[key])
            for key in ("card series", "card model", "card sku")
            if _has_value(folded.get(key)) and not _AMD_NUMBER.fullmatch(_text(folded[key]).lower())
        ),
        "",
    )
    if not name:
        raise _Unread("no name")
    bus = _text(folded.get("pci bus")).lower()
    serial = folded.get("unique id")
    uuid = f"AMD-{serial}" if _has_value(serial) else _id_by_bus("AMD", bus)
    memory = _quantity(folded.get("vram total memory (b)"), 1)
    gfx = _text(folded.get("gfx version"))
    return _device(at, uuid, name, "amd", memory, GpuDetails("rocm-smi", driver, gfx, bus))


def xpu_ids(listing: str) -> list[str]:
    try:
        document = _json(listing, "xpu-smi")
    except _Unread:
        return []
    rows = document.get("device_list") if isinstance(document, Mapping) else None
    row = (
        [one.get("device_id") for one in rows or () if isinstance(one, Mapping)]
        if isinstance(rows, list)
        else []
    )
    return [str(one) for one in row if isinstance(one, int) and not isinstance(one, bool)]


def xpu_smi(listing: str, devices: Mapping[str, str]) -> ParsedGpus:
    """Parse `xpu-smi discovery -j`, and `xpu-smi discovery -d ID -j` by device id."""
    return _each(listing, "xpu-smi", lambda row, at: _intel_device(row, at, devices), "device_list")


def _intel_device(row: Any, at: int, devices: Mapping[str, str]) -> Gpu:
    if not isinstance(row, Mapping):
        raise _Unread("not an object")
    detail = devices.get(str(row.get("device_id")), "")
    more = _json(detail, f"xpu-smi -d {row.get('device_id')}") if detail.strip() else {}
    if not isinstance(more, Mapping):
        raise _Unread("its details are no object")
    both = {**row, **more}
    bus = _text(both.get("pci_bdf_address")).lower()
    uuid = both.get("uuid")
    width, gen = both.get("pcie_max_link_width"), both.get("pcie_generation")
    return _device(
        at,
        f"INTEL-{uuid}" if _has_value(uuid) else _id_by_bus("INTEL", bus),
        _word(both, "device_name"),
        "intel",
        _quantity(both.get("memory_physical_size_byte"), 1),
        GpuDetails(
            "xpu-smi",
            _text(both.get("driver_version")),
            bus=bus,
            pcie=f"gen{gen} x{width}" if _has_value(gen) and _has_value(width) else "",
            clock_mhz=int(_number(both.get("core_clock_rate_mhz")) or 0),
        ),
    )


def drm(cards: Mapping[str, Mapping[str, str]]) -> ParsedGpus:
    """Parse the kernel's files of each card. Skips cards without their own memory: integrated ones are not lent."""
    found: list[Gpu] = []
    complaints: list[str] = []
    for key in sorted(cards, key=_natural):
        files = cards[key]
        vendor = {AMD_ID: "amd", INTEL_ID: "intel"}.get(files.get("vendor", "").strip().lower())
        if vendor is None or not files.get("vram", "").strip():
            continue
        _try(
            f"sysfs, {key}",
            complaints,
            found,
            lambda f=files, v=vendor: _drm_device(f, len(found), v),
        )
    return ParsedGpus(tuple(found), tuple(complaints))


def _drm_device(files: Mapping[str, str], at: int, vendor: str) -> Gpu:
    bus = files.get("bus", "").strip().lower()
    serial = files.get("unique_id", "").strip()
    number = files.get("device", "").strip().lower().removeprefix("0x")
    uuid = f"{vendor.upper()}-{serial}" if serial else _id_by_bus(vendor.upper(), bus)
    name = files.get("name", "").strip() or f"{vendor} {number}"
    return _device(
        at, uuid, name, vendor, _quantity(files["vram"], 1), GpuDetails("sysfs", bus=bus)
    )


def apple(text: str) -> ParsedGpus:
    try:
        document = _json(text, "system_profiler")
        if not isinstance(document, Mapping):
            raise _Unread("system_profiler: not an object")
        machine: Any = next(_rows(document.get("SPHardwareDataType")), {})
        if not isinstance(machine, Mapping):
            raise _Unread("system_profiler: SPHardwareDataType holds no object")
        displays = document.get("SPDisplaysDataType")
    except _Unread as error:
        return ParsedGpus(complaints=(str(error),))
    apples = [
        one
        for one in _rows(displays)
        if not isinstance(one, Mapping) or "apple" in _text(one.get("spdisplays_vendor")).lower()
    ]
    return _each(apples, "system_profiler", lambda row, at: _apple_device(row, at, machine))


def _apple_device(row: Any, at: int, machine: Mapping[str, Any]) -> Gpu:
    if not isinstance(row, Mapping):
        raise _Unread("not an object")
    memory = _quantity(machine.get("physical_memory"), GIB)
    uuid = machine.get("platform_UUID")
    if not _has_value(uuid):
        raise _Unread("the machine has no UUID")
    metal = _text(row.get("spdisplays_mtlgpufamilysupport")).removeprefix("spdisplays_")
    details = GpuDetails("system_profiler", capability=metal)
    return _device(at, f"APPLE-{uuid}-{at}", _word(row, "sppci_model"), "apple", memory, details)


# ---- parsing of values


def _each(source: object, name: str, read: Any, list_name: str = "gpu_data") -> ParsedGpus:
    complaints: list[str] = []
    found: list[Gpu] = []
    try:
        document = _json(source, name) if isinstance(source, str) else source
        if isinstance(document, Mapping) and list_name in document:
            document = document[list_name]
        if not isinstance(document, list):
            raise _Unread(f"{name}: no list of devices")
        for at, row in enumerate(document):
            _try(f"{name}, device {at}", complaints, found, lambda t=row: read(t, len(found)))
    except _Unread as error:
        complaints.append(str(error))
    return ParsedGpus(tuple(found), tuple(complaints))


def _try(name: str, complaints: list[str], found: list[Gpu], read: Any) -> None:
    try:
        gpu = read()
        if any(other.uuid == gpu.uuid for other in found):
            raise _Unread(f"{gpu.uuid} is there twice")
        found.append(gpu)
    except _Unread as error:
        complaints.append(f"{name}: {error}")


def _device(at: int, uuid: str, name: str, vendor: str, memory: int, details: GpuDetails) -> Gpu:
    model = normalised(name)
    if not model:
        raise _Unread(f"{name[:60]!r} is no name")
    if not uuid.isprintable() or len(uuid) > 128:
        raise _Unread("its uuid cannot be read")
    closed = "" if vendor in LENT else NOT_LENT.format(vendor.upper())
    return Gpu(at, uuid, model[:64], vendor, memory, closed=closed, details=details)


def _json(text: object, name: str) -> Any:
    if not isinstance(text, str) or not text.strip():
        raise _Unread(f"{name}: it printed nothing")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Unread(f"{name}: no JSON ({str(error)[:100]})") from error


def _rows(document: object) -> Iterator[Any]:
    if isinstance(document, Mapping) and isinstance(document.get("gpu_data"), list):
        document = document["gpu_data"]
    if isinstance(document, list):
        yield from document


def _table(row: Any, name: str, *, required: bool = True) -> Mapping[str, Any]:
    part = row.get(name) if isinstance(row, Mapping) else None
    if isinstance(part, Mapping):
        return part
    if required:
        raise _Unread(f"no '{name}'")
    return {}


def _word(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not _has_value(value):
        raise _Unread(f"no '{key}'")
    return _text(value)


def _text(value: object) -> str:
    """Shown to users."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return ""
    text = "".join(letter for letter in str(value) if letter.isprintable()).strip()
    return "" if text.upper() == "N/A" else text[:100]


def _has_value(value: object) -> bool:
    return bool(_text(value))


def _number(value: object) -> float | None:
    text = _text(value)
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number < 1e18 else None


def _quantity(value: object, unit: int) -> int:
    if isinstance(value, Mapping):
        value = f"{_text(value.get('value'))} {_text(value.get('unit'))}"
    found = _SIZE.fullmatch(_text(value)) if _has_value(value) else None
    if found is None:
        raise _Unread(f"its memory is {value!r:.60}")
    named = found[2]
    size = float(found[1]) * (unit if named is None else _UNITS[named.upper()])
    if not 0 < size <= MOST_MEMORY:
        raise _Unread(f"its memory is {value!r:.60}")
    return int(size)


def _watts(value: object) -> int:
    if isinstance(value, Mapping):
        value = value.get("value")
    watts = _number(value)
    return 0 if watts is None or watts > 1e5 else int(watts * 1000)


def _pcie(speed: object, width: object) -> str:
    if isinstance(speed, Mapping):
        speed = speed.get("value")
    generation = _PCIE_GENERATIONS.get(_number(speed) or 0.0)
    lanes = _number(width)
    return f"gen{generation} x{lanes:.0f}" if generation and lanes and lanes <= 64 else ""


def _id_by_bus(vendor: str, bus: str) -> str:
    if not bus:
        raise _Unread("neither a uuid nor a bus address")
    return f"{vendor}-{bus}"


def _key(value: object) -> object:
    return value if isinstance(value, int | str) else None


def _natural(name: object) -> tuple[int, str]:
    digits = re.findall(r"\d+", str(name))
    return (int(digits[0][:9]) if digits else -1, str(name))
