"""Specs of open tasks in memory, for planning and grants. A rebuilt picture drops unused ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gpool.core.ids import SpecId, UserId
from gpool.core.model import Shape, TaskSpec
from gpool.core.scheduler.state.shapes import shape_of
from gpool.server.store.operations.tasks.submissions import Submission

MAX_SPECS = 50_000
"""Specs kept beyond those in use."""

MAX_NAMES = 500_000
"""Names of inputs and outputs in specs kept since the last rebuild, about 100 MB."""


@dataclass(frozen=True, slots=True)
class KnownSpec:
    spec: TaskSpec
    shape: Shape


class SpecCache:
    def __init__(self) -> None:
        self.with_secrets: set[SpecId] = set()
        self.with_checkpoints: set[SpecId] = set()
        self._known: dict[SpecId, KnownSpec] = {}
        self._names = 0

    def rebuild(
        self, rows: Iterable[tuple[SpecId, UserId, TaskSpec]], teams: Mapping[SpecId, int]
    ) -> None:
        self.with_secrets, self.with_checkpoints, self._known = set(), set(), {}
        for id_, user, spec in rows:
            self._add(id_, user, spec, teams.get(id_))
        self._names = 0

    def add(self, id_: SpecId, submission: Submission) -> Shape:
        known = self._known.get(id_)
        if known is None:
            spec = submission.spec
            known = self._add(id_, submission.user, spec, submission.team)
            self._names += len(spec.inputs) + len(spec.outputs)
        return known.shape

    def _add(self, id_: SpecId, user: UserId, spec: TaskSpec, team: int | None) -> KnownSpec:
        known = self._known[id_] = KnownSpec(spec, shape_of(spec, user, team))
        if spec.secrets:
            self.with_secrets.add(id_)
        if spec.checkpoint:
            self.with_checkpoints.add(id_)
        return known

    def shape(self, id_: SpecId) -> Shape | None:
        known = self._known.get(id_)
        return None if known is None else known.shape

    def shapes(self) -> Mapping[SpecId, Shape]:
        return {id_: known.shape for id_, known in self._known.items()}

    def spec(self, id_: int) -> TaskSpec | None:
        known = self._known.get(SpecId(id_))
        return None if known is None else known.spec

    def is_oversized(self, in_use: int) -> bool:
        return len(self._known) > MAX_SPECS + in_use or self._names > MAX_NAMES
