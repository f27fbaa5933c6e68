"""Grammar of GPU requirements (`--gpu`, `--vram`): parse, format and match.

    spec    = "0" | item ("," item)*            alternatives, tried in order; "0": CPU only
    item    = part (":" part)*                  each kind of part at most once
    part    = count | fraction | vendor | memory | slice | model ["-" size]
    count   = "1" … "64"                        whole GPUs
    fraction= "0.5"                             that part of one GPU, memory and compute
    vendor  = "nvidia" | "amd" | "intel" | "apple"
    memory  = size | size "+" | ">=" size | size ".." [size] | ".." size
    slice   = "vram=" size                      that much memory of one GPU; same as `--vram`
    model   = "A100", "rtx 4090", "4090", …     letters, digits, blanks, dashes; upper or lower case
    size    = number ("GB" | "GiB" | "MB" | …)

A bare size means *at least*. Sizes are nominal: a 24 GB card has between 24·10⁹ and 24·2³⁰ bytes (an A10G 24.1·10⁹, an
RTX 4090 25.8·10⁹), so a lower bound counts in powers of ten, an upper bound in powers of two: `24GB` takes both cards,
`40GB..80GB` an A100 of 85.9·10⁹ bytes. A slice counts in powers of ten: four of 6GB fit a 24 GB card. `GiB`, `MiB` …
are exact. No list of models is kept.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite

from gpool.core.errors import BadGpuSpec
from gpool.core.model import GIB, Gpu, GpuRequest

MAX_COUNT = 64
MAX_ALTERNATIVES = 16
MAX_TEXT = 400
VENDORS = frozenset({"nvidia", "amd", "intel", "apple"})
EXAMPLES = "write for instance 1, H100:2, A100-80GB, 24GB, 0.5 or A10G,A100"

_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SIZE = re.compile(r"(\d+)(?:\.(\d+))?\s*(?:([KMGT])(?:(i)B|B?)|B)", re.IGNORECASE | re.ASCII)
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]*", re.ASCII)
_MODEL_WITH_SIZE = re.compile(
    r"(.*[A-Za-z0-9].*?)[-_ ]+(\d+(?:\.\d+)?\s*[GT]i?B)", re.IGNORECASE | re.ASCII
)
_NUMBER = re.compile(r"\d+", re.ASCII)
_FRACTION = re.compile(r"(\d*)\.(\d+)", re.ASCII)
_TOKEN = re.compile(r"[A-Z0-9]+", re.ASCII)

# Words of a device's name that do not identify its model.
_MAKERS = {"NVIDIA", "AMD", "INTEL", "APPLE", "GEFORCE", "TESLA", "QUADRO", "RADEON", "INSTINCT"}
_BRANDS = _MAKERS | {"GPU", "GRAPHICS", "GENERATION", "SERVER", "WORKSTATION", "EDITION"}
_SERIES = ("RTX", "GTX")
_CAPACITY = re.compile(r"\d+(GB|GIB)", re.ASCII)
_FORM = re.compile(r"SXM\d*|PCIE|NVL|OAM|HBM\d*[A-Z]?|PG\d+|BLACKWELL", re.ASCII)


def parse(gpu: str | int | float | None, vram: str | None = None) -> tuple[GpuRequest, ...]:
    """Parse to alternatives, first choice first; empty: CPU only. Raises `BadGpuSpec` only."""
    if gpu is None and vram is None:
        return ()
    size = None if vram is None else _vram(vram)
    if gpu is None:
        return (GpuRequest(vram_bytes=size),)
    requests = _requests(_as_text(gpu))
    if size is None:
        return requests
    text = _as_text(gpu)
    if not requests:
        raise _bad(text, 0, "vram requests part of a GPU but gpu is 0; leave gpu out")
    for request in requests:
        if request.count > 1:
            raise _bad(text, 0, "vram requests part of one GPU; leave out the count, or vram")
        if request.vram_bytes is not None:
            raise _bad(text, 0, "the memory of the slice is given twice; leave out one of them")
    return tuple(replace(request, vram_bytes=size) for request in requests)


def parse_bytes(text: str) -> int:
    """Parse a size: `6GB` is 6·10⁹ bytes, `6GiB` 6·2³⁰."""
    return _size(text, text, 0)


def typed_size(size: int) -> str:
    """`parse_bytes` reads it back."""
    units = [(f"{unit}B", 1000 ** _POWER[unit]) for unit in "TGM"]
    units += [(f"{unit}iB", 1024 ** _POWER[unit]) for unit in "TGMK"]
    return next((f"{size // scale}{unit}" for unit, scale in units if not size % scale), f"{size}B")


def gib(size: int) -> str:
    """Format an amount of memory: `22.5 GiB`."""
    return f"{round(size / GIB, 1):g} GiB"


def format(requests: tuple[GpuRequest, ...]) -> str:
    """`parse` reads it back."""
    return ",".join(_item_text(request) for request in requests) or "0"


def matches(request: GpuRequest, gpu: Gpu) -> bool:
    if request.min_memory_bytes is not None and gpu.memory_bytes < request.min_memory_bytes:
        return False
    if request.max_memory_bytes is not None and gpu.memory_bytes > request.max_memory_bytes:
        return False
    if request.vendor is not None and gpu.vendor.lower() != request.vendor:
        return False
    return request.model is None or is_model(request.model, gpu.model)


@lru_cache(maxsize=4096)
def is_model(wanted: str, name: str) -> bool:
    """Return whether a device name matches a model. `A10` is neither an A100 nor an A10G."""
    return _without_series(normalise(wanted)) in _answers_to(name)


def normalise(model: str) -> str:
    """Return letters and digits in upper case without brands: `GeForce rtx 4090` and `4090` are `RTX4090`."""
    words = _TOKEN.findall(model.upper())
    joined = "".join(word for word in words if word not in _BRANDS) or "".join(words)
    if re.fullmatch(r"[2-9]0[1-9]0(TI)?(SUPER|D)?", joined):
        return "RTX" + joined
    if re.fullmatch(r"1[06][1-9]0(TI)?(SUPER)?", joined):
        return "GTX" + joined
    return joined


@lru_cache(maxsize=1024)
def _answers_to(name: str) -> frozenset[str]:
    """Models of a name: `A100-SXM4-80GB` is A100 and A100SXM4. Words like Ti, SUPER, Laptop are kept."""
    words = [
        word
        for word in _TOKEN.findall(name.upper())
        if word not in _BRANDS and not _CAPACITY.fullmatch(word)
    ]
    answers = {_without_series("".join(words))}
    while len(words) > 1 and _FORM.fullmatch(words[-1]):
        words.pop()
        answers.add(_without_series("".join(words)))
    return frozenset(answers)


def _without_series(joined: str) -> str:
    for series in _SERIES:
        if joined.startswith(series) and len(joined) > len(series):
            return joined.removeprefix(series)
    return joined


# ---- parsing


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    at: int  # offset in the whole text


def _as_text(gpu: str | int | float) -> str:
    """A number is a count of GPUs; a model that is a number (4090) must be text."""
    if isinstance(gpu, str):
        return gpu
    if isinstance(gpu, float) and not isfinite(gpu):
        raise _bad(str(gpu), 0, f"not a number of GPUs; {EXAMPLES}")
    if not 0 <= gpu <= MAX_COUNT:
        shown = str(gpu) if abs(gpu) < 10**9 else "a huge number"
        raise _bad(shown, 0, f"a task gets 0 to {MAX_COUNT} GPUs; a model is written as text")
    return str(int(gpu)) if gpu == int(gpu) else f"{gpu:.9f}"


@lru_cache(maxsize=4096)
def _requests(text: str) -> tuple[GpuRequest, ...]:
    if len(text) > MAX_TEXT:
        raise _bad(text[:MAX_TEXT], MAX_TEXT - 1, f"longer than {MAX_TEXT} letters")
    if not text.strip():
        raise _bad(text, 0, f"empty; {EXAMPLES}, or leave it out for CPU only")
    if text.strip() == "0":
        return ()
    items = _split(_Part(text, 0), ",")
    if len(items) > MAX_ALTERNATIVES:
        raise _bad(text, items[MAX_ALTERNATIVES].at, f"more than {MAX_ALTERNATIVES} alternatives")
    return tuple(_request(text, item) for item in items)


def _split(whole: _Part, separator: str) -> list[_Part]:
    parts, at = [], whole.at
    for piece in whole.text.split(separator):
        lead = len(piece) - len(piece.lstrip())
        parts.append(_Part(piece.strip(), at + (lead if piece.strip() else 0)))
        at += len(piece) + 1
    return parts


def _request(text: str, item: _Part) -> GpuRequest:
    said: dict[str, object] = {}
    for part in _split(item, ":"):
        for name, value in _part(text, part).items():
            if name in said:
                also = f"; {part.text!r} is no number of GPUs" if name == "model" else ""
                raise _bad(text, part.at, f"{_NAMES[name]} is given twice; leave out one{also}")
            said[name] = value
    if "count" in said and "share_milli" in said:
        raise _bad(text, item.at, "either whole GPUs or a fraction of one; leave out one of them")
    request = GpuRequest(**said)  # type: ignore[arg-type]  # names and types come from _part
    low, high = request.min_memory_bytes, request.max_memory_bytes
    if low is not None and high is not None and low > high:
        raise _bad(text, item.at, "the range ends below its start; write the smaller size first")
    if request.vram_bytes is not None and request.count > 1:
        raise _bad(text, item.at, "a slice is a part of one GPU; leave out the count")
    return request


_NAMES = {
    "count": "the number of GPUs",
    "share_milli": "the number of GPUs",
    "model": "the model",
    "vendor": "the vendor",
    "min_memory_bytes": "the memory",
    "max_memory_bytes": "the memory",
    "vram_bytes": "the slice's memory",
}


def _part(text: str, part: _Part) -> dict[str, object]:
    body, at = part.text, part.at
    if not body:
        raise _bad(text, at, f"something is missing here; {EXAMPLES}")
    if _NUMBER.fullmatch(body) and len(body) != 4:
        return {"count": _count(text, part)}
    if _FRACTION.fullmatch(body):
        return {"share_milli": _share(text, part)}
    if body.lower() in VENDORS:
        return {"vendor": body.lower()}
    if body[:5].lower() == "vram=":
        return {"vram_bytes": _size(text, body[5:], at + 5)}
    if body.startswith(">="):
        return {"min_memory_bytes": _size(text, body[2:], at + 2)}
    if ".." in body:
        return _range(text, part)
    if _SIZE.fullmatch(body.removesuffix("+").rstrip()):
        return {"min_memory_bytes": _size(text, body.removesuffix("+"), at)}
    return _model(text, part)


def _count(text: str, part: _Part) -> int:
    count = int(part.text[-4:]) if len(part.text.lstrip("0")) < 4 else MAX_COUNT + 1
    if count == 0:
        raise _bad(text, part.at, "no GPU at all; write 0 alone, or at least 1")
    if count > MAX_COUNT:
        raise _bad(text, part.at, f"one task gets at most {MAX_COUNT} GPUs of one node")
    return count


def _share(text: str, part: _Part) -> int:
    whole, digits = part.text.split(".")
    if whole.strip("0"):
        raise _bad(text, part.at, "either whole GPUs (1, 2, …) or a fraction of one below 1 (0.5)")
    share = int((digits + "00")[:3])
    if share == 0:
        raise _bad(text, part.at, "the smallest fraction of a GPU is 0.001")
    return share


def _range(text: str, part: _Part) -> dict[str, object]:
    low, _, high = part.text.partition("..")
    bounds: dict[str, object] = {}
    if low.strip():
        bounds["min_memory_bytes"] = _size(text, low, part.at)
    if high.strip():
        bounds["max_memory_bytes"] = _size(text, high, part.at + len(low) + 2, as_sold=True)
    if not bounds:
        raise _bad(text, part.at, "a range needs a size: 40GB..80GB, 24GB.. or ..24GB")
    return bounds


def _model(text: str, part: _Part) -> dict[str, object]:
    legal = _MODEL.match(part.text)
    if legal is None or legal.end() < len(part.text):
        at = legal.end() if legal else 0
        raise _bad(text, part.at + at, f"{part.text[at]!r} cannot stand here; {EXAMPLES}")
    sized = _MODEL_WITH_SIZE.fullmatch(part.text)
    said: dict[str, object] = {}
    name = part.text
    if sized:
        name = sized[1]
        said["min_memory_bytes"] = _size(text, sized[2], part.at + sized.start(2))
    model = normalise(name)
    if not model or _SIZE.fullmatch(model) or (_NUMBER.fullmatch(model) and len(model) != 4):
        raise _bad(text, part.at, f"not a GPU model; {EXAMPLES}")
    return {"model": model, **said}


def _vram(text: str) -> int:
    return _size(text, text, 0)


def _size(text: str, body: str, at: int, *, as_sold: bool = False) -> int:
    """`as_sold`: an upper bound, where GB counts in powers of two."""
    lead = len(body) - len(body.lstrip())
    body, at = body.strip(), at + lead
    found = _SIZE.fullmatch(body)
    if found is None:
        raise _bad(text, at, "not a size; write a number and a unit, for instance 24GB or 512MiB")
    whole, digits, unit, binary = found.groups()
    if len(whole) > 19 or len(digits or "") > 12:
        raise _bad(text, at, "more digits than any GPU has bytes")
    base = 1024 if binary or as_sold else 1000
    scale: int = base ** _POWER[(unit or "").upper()]
    total: int = int(whole + (digits or "")) * scale // 10 ** len(digits or "")
    if total == 0:
        raise _bad(text, at, "a size of nothing; leave it out, or ask for more")
    if total >= 1 << 60:
        raise _bad(text, at, "larger than any GPU")
    return total


def _bad(text: str, position: int, reason: str) -> BadGpuSpec:
    shown = "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text
    )
    position = max(0, min(position, len(text)))
    detail = f"GPU requirement {shown!r}: {reason}"
    if shown.strip():
        detail += f"\n  {shown}\n  {' ' * position}^"
    return BadGpuSpec(detail, text=text, position=position)


# ---- formatting


def _item_text(request: GpuRequest) -> str:
    parts = []
    if request.vendor is not None:
        parts.append(request.vendor)
    if request.model is not None:
        parts.append(request.model)
    low, high = request.min_memory_bytes, request.max_memory_bytes
    if high is not None:
        parts.append((_bytes_text(low, 1000) if low else "") + ".." + _bytes_text(high, 1024))
    elif low is not None:
        parts.append(_bytes_text(low, 1000))
    if request.vram_bytes is not None:
        parts.append("vram=" + _bytes_text(request.vram_bytes, 1000))
    if request.share_milli < 1000:
        parts.append(f"0.{request.share_milli:03}".rstrip("0"))
    elif request.count > 1 or not parts:
        parts.append(str(request.count))
    return ":".join(parts)


def _bytes_text(size: int, base: int) -> str:
    for unit in ("T", "G", "M", "K"):
        scale: int = base ** _POWER[unit]
        if size % scale == 0:
            return f"{size // scale}{unit}B"
    return f"{size}B"
