"""Reference table of GPU models: the packaged rows and an operator's file. Reads files at start; decides nothing."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec

from gpool.core.errors import Invalid
from gpool.core.gpu_verification import GpuModels, Make
from gpool.core.specs.gpu import normalise

PACKAGED = "gpu_models.toml"
MAX_ROWS = 1000

_Positive = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


class _ModelRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    int8_teraops: _Positive
    memory_gb_per_s: _Positive
    memory_gib: _Positive


class _ModelFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: list[_ModelRow] = []


@cache
def packaged_models() -> GpuModels:
    text = resources.files("gpool.server.nodes").joinpath(PACKAGED).read_text("utf-8")
    return MappingProxyType(models_from(text, PACKAGED))


def models_with(file: Path | None) -> GpuModels:
    """Return the packaged rows with those of an operator's file, which replace rows of the same name."""
    if file is None:
        return packaged_models()
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise Invalid(f"the table of GPU models {file} cannot be read: {error}") from error
    return {**packaged_models(), **models_from(text, str(file))}


def models_from(text: str, name: str) -> dict[str, Make]:
    """Parse a table; `name` of its file is for errors. `Invalid` says what is wrong."""
    try:
        rows = msgspec.convert(tomllib.loads(text), _ModelFile).model
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise Invalid(f"{name} is no table of GPU models: {error}") from error
    if len(rows) > MAX_ROWS:
        raise Invalid(f"{name} has {len(rows)} rows; at most {MAX_ROWS} are read")
    found: dict[str, Make] = {}
    for row in rows:
        model = normalise(row.name)
        if not model:
            raise Invalid(f"{name}: {row.name!r} is no model name")
        if model in found:
            raise Invalid(f"{name} names the model {model} twice; remove one of the rows")
        found[model] = Make(row.int8_teraops, row.memory_gb_per_s, row.memory_gib)
    return found
