"""What was submitted lately, to learn from. Tasks are kept after their end, so this outlives a restart; it changes nothing."""

from __future__ import annotations

from gpool.core.ids import UserId
from gpool.core.model import Shape
from gpool.core.scheduler.state.shapes import shape_of
from gpool.server.store.operation import operation
from gpool.server.store.protocol import Operation, Statement
from gpool.server.store.rows import of_ids, spec_from

MOST_ALIKE = 50
"""Of one batch: a hundred thousand equal tasks are not a day's mix."""


@operation
def lately(most: int) -> Operation[list[tuple[Shape, int]]]:
    """The last `most` tasks, oldest first, those of one batch and spec together."""
    rows = yield Statement(
        "SELECT t.spec_id, t.team_id, COUNT(*) FROM (SELECT id, spec_id, team_id, batch_id FROM tasks "
        "ORDER BY id DESC LIMIT :most) AS t GROUP BY t.batch_id, t.spec_id, t.team_id ORDER BY MIN(t.id)",
        {"most": most},
    )
    specs = yield Statement(
        "SELECT s.id, s.user_id, s.body FROM {specs} AS i JOIN specs s ON s.id = i.id",
        {},
        {"specs": of_ids(row[0] for row in rows)},
    )
    known = {id_: (UserId(user), spec_from(body)) for id_, user, body in specs}
    shapes: dict[tuple[int, int | None], Shape] = {}
    found = []
    for id_, team, count in rows:
        if id_ not in known:
            continue
        shape = shapes.get((id_, team))
        if shape is None:
            user, spec = known[id_]
            shape = shapes[id_, team] = shape_of(spec, user, team)
        found.append((shape, min(int(count), MOST_ALIKE)))
    return found
