"""Many small submissions in a few statements, however many they are. What needs more than that is left to `tasks.submit`."""

from __future__ import annotations

from collections.abc import Sequence

from gpool.core.errors import Invalid
from gpool.core.ids import SpecId
from gpool.server.store.operation import operation
from gpool.server.store.operations.tasks.tasks import spec_digest
from gpool.server.store.protocol import Operation, Relation, Row, Statement
from gpool.server.store.rows import spec_text, storable
from gpool.server.store.values import Submission, Submitted

DIGESTS = (("user_id", "int"), ("digest", "text"))
SPECS = (*DIGESTS, ("id", "int"), ("body", "text"), ("retries", "int"), ("at", "int"))
BATCHES = (
    ("id", "int"),
    ("user_id", "int"),
    ("name", "text"),
    ("total", "int"),
    ("closed", "int"),
    ("at", "int"),
    ("team_id", "int"),
)
TASKS = (
    ("id", "int"),
    ("batch_id", "int"),
    ("position", "int"),
    ("spec_id", "int"),
    ("user_id", "int"),
    ("at", "int"),
    ("team_id", "int"),
)
TASKS_WITH_PAYLOAD = (*TASKS, ("payload", "blob"))
_Digest = tuple[int, str]


def is_plain(s: Submission) -> bool:
    """A batch of its own, and no artifact as payload."""
    return s.is_new_batch and all(
        task.position == place and not task.payload_sha256 for place, task in enumerate(s.tasks)
    )


@operation
def submit_together(submissions: Sequence[Submission]) -> Operation[list[Submitted | None]]:
    """All of them or none, each as `tasks.submit` would. None in the place of one that was left out: it takes more than this."""
    bodies = [_body(s) for s in submissions]
    digests = [(s.user, spec_digest(s, body)) for s, body in zip(submissions, bodies, strict=True)]
    known = yield from _known(digests)
    new: dict[_Digest, Row] = {}
    for s, body, digest in zip(submissions, bodies, digests, strict=True):
        needs_more = s.spec.inputs or s.spec.function_sha256 or s.secrets
        if body and digest not in known and digest not in new and is_plain(s) and not needs_more:
            new[digest] = (*digest, s.spec_id, body, s.spec.retries, s.at)
    if new:
        yield Statement(
            "INSERT INTO specs (id, user_id, digest, body, retries, created_at) "
            "SELECT n.id, n.user_id, n.digest, n.body, n.retries, n.at FROM {specs} AS n WHERE true "
            "ON CONFLICT (user_id, digest) DO NOTHING",
            {},
            {"specs": Relation(SPECS, sorted(new.values()))},  # locks are taken in one order
        )
        known |= yield from _known(list(new))  # another replica may have been first
    taken = [
        (s, known[digest])
        for s, body, digest in zip(submissions, bodies, digests, strict=True)
        if body and digest in known and is_plain(s)
    ]
    if taken:
        yield from _put_batches([s for s, _ in taken])
        yield from _put_tasks(taken)
    done = {s.batch: Submitted(s.batch, spec_id, 0, s.tasks) for s, spec_id in taken}
    return [done.get(s.batch) if is_plain(s) else None for s in submissions]


def _body(s: Submission) -> str:
    """ "": it cannot be written; `tasks.submit` says why."""
    try:
        return spec_text(s.spec)
    except Invalid:
        return ""


def _known(digests: Sequence[_Digest]) -> Operation[dict[_Digest, SpecId]]:
    rows = yield Statement(
        "SELECT s.user_id, s.digest, s.id FROM {wanted} AS w "
        "JOIN specs s ON s.user_id = w.user_id AND s.digest = w.digest",
        {},
        {"wanted": Relation(DIGESTS, sorted(set(digests)))},
    )
    return {(user, digest): SpecId(id_) for user, digest, id_ in rows}


def _put_batches(submissions: Sequence[Submission]) -> Operation[None]:
    rows = [
        (s.batch, s.user, storable(s.spec.name), len(s.tasks), int(s.closes_batch), s.at, s.team)
        for s in submissions
    ]
    yield Statement(
        "INSERT INTO batches (id, user_id, name, total, closed, created_at, team_id) "
        "SELECT n.id, n.user_id, n.name, n.total, n.closed, n.at, n.team_id FROM {batches} AS n",
        {},
        {"batches": Relation(BATCHES, rows)},
    )


def _put_tasks(taken: Sequence[tuple[Submission, SpecId]]) -> Operation[None]:
    bare: list[Row] = []
    laden: list[Row] = []
    for s, spec_id in taken:
        for place, task in enumerate(s.tasks):
            row = (task.id, s.batch, place, spec_id, s.user, s.at, s.team)
            if task.payload:
                laden.append((*row, task.payload))
            else:
                bare.append(row)
    for columns, rows, picked in ((TASKS, bare, "NULL"), (TASKS_WITH_PAYLOAD, laden, "n.payload")):
        if rows:
            yield Statement(
                "INSERT INTO tasks (id, batch_id, position, spec_id, user_id, status, created_at, queued_at, "  # noqa: S608
                "team_id, payload_sha256, payload) SELECT n.id, n.batch_id, n.position, n.spec_id, n.user_id, "
                f"'queued', n.at, n.at, n.team_id, '', {picked} FROM {{tasks}} AS n",
                {},
                {"tasks": Relation(columns, rows)},
            )
