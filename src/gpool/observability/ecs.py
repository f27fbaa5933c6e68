"""Log events in Elastic Common Schema: names and types of every field, and the index template made from them.

`python -m gpool.observability.ecs` prints deploy/logging/elasticsearch/index-template.json.
"""

from __future__ import annotations

import ipaddress
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from enum import StrEnum
from typing import NamedTuple

from gpool.core.ids import encode

ECS_VERSION = "8.17.0"
LONGEST_TEXT = 32 * 1024
"""Longer texts are cut: Lucene refuses a keyword of more than 32,766 bytes."""


class EcsType(StrEnum):
    KEYWORD = "keyword"
    TEXT = "match_only_text"
    LONG = "long"
    DOUBLE = "double"
    DATE = "date"
    IP = "ip"


class EcsField(NamedTuple):
    name: str
    type: EcsType = EcsType.KEYWORD
    id_kind: str = ""  # an integer id that users see as text (`core.ids`)


REQUIRED = (
    EcsField("@timestamp", EcsType.DATE),
    EcsField("log.level"),
    EcsField("message", EcsType.TEXT),
    EcsField("ecs.version"),
    EcsField("log.logger"),
    EcsField("service.name"),
    EcsField("service.version"),
    EcsField("event.dataset"),
    EcsField("process.pid", EcsType.LONG),
)
"""Fields of every line."""

ERROR = (
    EcsField("error.type"),
    EcsField("error.message", EcsType.TEXT),
    EcsField("error.stack_trace", EcsType.TEXT),
)

NAMED: Mapping[str, EcsField] = {
    "task": EcsField("gpool.task.id", id_kind="task"),
    "tasks": EcsField("gpool.task.id", id_kind="task"),
    "epoch": EcsField("gpool.task.epoch", EcsType.LONG),
    "batch": EcsField("gpool.batch.id", id_kind="batch"),
    "node": EcsField("gpool.node.id", id_kind="node"),
    "runner": EcsField("gpool.runner.number", EcsType.LONG),
    "rank": EcsField("gpool.gang.rank", EcsType.LONG),
    "gpu": EcsField("gpool.gpu.uuid"),
    "uuid": EcsField("gpool.gpu.uuid"),
    "runtime": EcsField("gpool.runtime"),
    "environment": EcsField("gpool.environment"),
    "count": EcsField("gpool.count", EcsType.LONG),
    "total": EcsField("gpool.total", EcsType.LONG),
    "bytes": EcsField("gpool.bytes", EcsType.LONG),
    "retry_s": EcsField("gpool.retry_s", EcsType.DOUBLE),
    "line": EcsField("gpool.output", EcsType.TEXT),
    "user": EcsField("user.id", id_kind="user"),
    "request": EcsField("http.request.id"),
    "method": EcsField("http.request.method"),
    "status": EcsField("http.response.status_code", EcsType.LONG),
    "path": EcsField("url.path"),
    "server": EcsField("url.full"),
    "client": EcsField("client.ip", EcsType.IP),
    "duration_ns": EcsField("event.duration", EcsType.LONG),
    "why": EcsField("event.reason"),
    "outcome": EcsField("gpool.task.status"),
    "container": EcsField("container.id"),
    "file": EcsField("file.path"),
    "code": EcsField("process.exit_code", EcsType.LONG),
    "error": EcsField("error.message", EcsType.TEXT),
    "trace": EcsField("trace.id"),
    "span": EcsField("span.id"),
}
"""Fields by the name that log calls use. Other names become strings in `labels`, whose type is fixed by ECS."""


def timestamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def put(document: dict[str, object], name: str, value: object) -> None:
    """Add the field of a log call; a value that does not fit the field's type goes to `labels` as text."""
    if value is None:
        return
    field = NAMED.get(name)
    typed = None if field is None else _typed(field, value)
    if field is None or typed is None:
        label = "labels." + name.replace(".", "_")
        document[label] = _text(value)
    else:
        document[field.name] = typed


def span_attributes(fields: Mapping[str, object]) -> dict[str, str | int | bool]:
    """Log fields as attributes of a span, under the same names; without the ids of the span itself."""
    document: dict[str, object] = {}
    for name, value in fields.items():
        if name not in ("trace", "span"):
            put(document, name, value)
    return {name: value for name, value in document.items() if isinstance(value, (str, int))}


def _typed(field: EcsField, value: object) -> object:
    """Value as the field's type, or None."""
    if isinstance(value, (list, tuple)):
        members = [None if isinstance(each, list) else _typed(field, each) for each in value]
        return None if None in members else members
    is_number = isinstance(value, (int, float)) and abs(value) < 1 << 63  # False for NaN
    if field.type is EcsType.LONG:
        return value if is_number and type(value) is int else None
    if field.type is EcsType.DOUBLE:
        return value if is_number and type(value) is not bool else None
    if field.id_kind and isinstance(value, int):
        return encode(field.id_kind, value) if 0 <= value < 1 << 63 else None
    if field.type is EcsType.IP:
        return value if isinstance(value, str) and _is_address(value) else None
    return _text(value)


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _text(value: object) -> str:
    if isinstance(value, (dict, list, tuple)):
        value = json.dumps(value, ensure_ascii=False, default=str)
    return clean(str(value))[:LONGEST_TEXT]


def clean(text: str) -> str:
    """Replace lone surrogates, which UTF-8 cannot encode."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def index_template() -> dict[str, object]:
    """Elasticsearch index template for the data stream `logs-gpool.*`: only these fields and `labels.*`."""
    properties: dict[str, object] = {}
    for field in (*REQUIRED, *ERROR, *NAMED.values()):
        _insert(properties, field.name.split("."), field.type)
    _insert(properties, ["data_stream", "type"], "constant_keyword")
    _insert(properties, ["data_stream", "dataset"], "constant_keyword")
    _insert(properties, ["data_stream", "namespace"], "constant_keyword")
    labels = {
        "path_match": "labels.*",
        "mapping": {"type": EcsType.KEYWORD.value, "ignore_above": 1024},
    }
    return {
        "index_patterns": ["logs-gpool.*-*"],
        "priority": 200,
        "data_stream": {},
        "template": {
            "settings": {"index": {"default_pipeline": "gpool-logs", "codec": "best_compression"}},
            "mappings": {
                "dynamic": "runtime",  # fields that shippers add (agent, host, log.file) stay searchable
                "dynamic_templates": [{"labels": labels}],
                "properties": properties | {"labels": {"type": "object", "dynamic": True}},
            },
        },
        "_meta": {"ecs_version": ECS_VERSION, "made_by": "python -m gpool.observability.ecs"},
    }


def _insert(properties: dict[str, object], path: list[str], kind: str) -> None:
    name, rest = path[0], path[1:]
    if not rest:
        limit = {"ignore_above": 8191} if kind == EcsType.KEYWORD else {}
        properties[name] = {"type": str(kind)} | limit
        return
    inner = properties.setdefault(name, {"properties": {}})
    assert isinstance(inner, dict)
    _insert(inner["properties"], rest, kind)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(index_template(), indent=2) + "\n")
