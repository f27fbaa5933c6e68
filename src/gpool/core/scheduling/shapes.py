"""From what a consumer asked to the shape the queue knows it by."""

from __future__ import annotations

from gpool.core.ids import UserId
from gpool.core.model import Shape, TaskKind, TaskSpec


def shape_of(spec: TaskSpec, user: UserId, team: int | None = None) -> Shape:
    """Interchangeable tasks have equal shapes; `group` keeps unlike run times apart."""
    group = spec.function_sha256 if spec.kind is TaskKind.FUNCTION else spec.command[0]
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
    )
