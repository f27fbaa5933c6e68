"""The shape of a submitted task."""

from __future__ import annotations

from hashlib import sha256

from gpool.core.ids import UserId
from gpool.core.model import MIB, Shape, TaskKind, TaskSpec
from gpool.core.scheduler.predict.commands import kind_of

LEAST_DATA = 256 * MIB
"""Smaller inputs load quickly: tasks that differ in them alone are one shape."""


def shape_of(spec: TaskSpec, user: UserId, team: int | None = None) -> Shape:
    group = spec.function_sha256 if spec.kind is TaskKind.FUNCTION else kind_of(spec.command)
    data, size = data_of(spec)
    return Shape(
        user,
        spec.requirements,
        spec.priority,
        spec.kind,
        spec.environment,
        group,
        team,
        spec.preemptible or bool(spec.checkpoint),
        by=spec.by,
        checkpoint_every=spec.checkpoint_every if spec.checkpoint else None,
        data=data,
        data_bytes=size,
    )


def data_of(spec: TaskSpec) -> tuple[str, int]:
    large = sorted({(one.sha256, one.size_bytes) for one in spec.inputs if one.size_bytes >= MIB})
    size = sum(each for _, each in large)
    if size < LEAST_DATA:
        return "", 0
    return sha256(" ".join(name for name, _ in large).encode()).hexdigest()[:16], size
