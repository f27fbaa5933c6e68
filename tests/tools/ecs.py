"""Judges log lines against the fields of Elastic Common Schema, with the types that the index template declares."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parents[2] / "deploy/logging/elasticsearch/index-template.json"
REQUIRED = (
    "@timestamp",
    "log.level",
    "message",
    "ecs.version",
    "log.logger",
    "service.name",
    "event.dataset",
    "process.pid",
)
LEVELS = {"debug", "info", "warning", "error", "critical"}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_LABEL = re.compile(r"labels\.[A-Za-z0-9_]+")


def declared() -> dict[str, str]:
    """Type of each field, by its dotted name."""
    return dict(_flat(json.loads(TEMPLATE.read_text())["template"]["mappings"]["properties"], ""))


def _flat(properties: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
    for name, mapping in properties.items():
        if "properties" in mapping:
            yield from _flat(mapping["properties"], f"{above}{name}.")
        else:
            yield above + name, mapping["type"]


def problems(line: str, types: Mapping[str, str] | None = None) -> list[str]:
    """Reasons why the line is not a valid document; none for a valid one."""
    types = declared() if types is None else types
    try:
        document = json.loads(line)
    except ValueError:
        return [f"not JSON: {line[:200]!r}"]
    if not isinstance(document, dict):
        return [f"not an object: {line[:200]!r}"]
    found = [f"no {name}" for name in REQUIRED if name not in document]
    if document.get("log.level") not in LEVELS:
        found.append(f"log.level is {document.get('log.level')!r}")
    if not re.fullmatch(r"8\.\d+\.\d+", str(document.get("ecs.version"))):
        found.append(f"ecs.version is {document.get('ecs.version')!r}")
    for name, value in document.items():
        kind = "keyword" if _LABEL.fullmatch(name) else types.get(name)
        if kind is None:
            found.append(f"{name} is not declared")
        elif not all(_fits(kind, each) for each in (value if isinstance(value, list) else [value])):
            found.append(f"{name} is no {kind}: {value!r}")
    return [f"{each} in {line[:300]}" for each in found]


def _fits(kind: str, value: object) -> bool:
    if kind in ("keyword", "constant_keyword"):
        return isinstance(value, str) and len(value.encode()) <= 4 * 32_766
    if kind == "match_only_text":
        return isinstance(value, str)
    if kind == "long":
        return type(value) is int and -(1 << 63) <= value < 1 << 63
    if kind == "double":
        return type(value) in (int, float)
    if kind == "ip":
        return isinstance(value, str) and bool(ipaddress.ip_address(value))
    assert kind == "date", kind
    return isinstance(value, str) and bool(_TIME.fullmatch(value) and datetime.fromisoformat(value))
