"""Answers of siblings in a form that can be compared. Their bytes come from nodes nobody trusts: nothing is unpickled.

The answer of a function is its value. The answer of a command is its exit code with the output files it was asked for,
or with its standard output if it was asked for none. Of a task that failed it is the reason and the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpool.core.errors import Invalid
from gpool.core.ids import NodeId, TaskId
from gpool.core.model import MIB, TaskKind, TaskSpec, TaskStatus
from gpool.core.specs import fields
from gpool.core.trust.comparison import Same, Tolerance, canonical_digest
from gpool.server.actions.tasks.outputs import location_of
from gpool.server.server import Server
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.operations.verification import siblings as operations
from gpool.server.store.operations.verification.siblings import SiblingRow, StoredAnswer
from gpool.wire.imported_classes import BadValue
from gpool.wire.values import DATA, decode

MAX_TOLERANT_BYTES = 4 * MIB
"""Larger values are compared by their hash, also with a tolerance."""

SHOWN_DIGITS = 16
"""Hexadecimal digits of a digest in texts."""


@dataclass(frozen=True, slots=True)
class SiblingAnswer:
    """`plain`: the value as plain data, to be compared with a tolerance; None: by `digest` only."""

    task: TaskId
    node: NodeId
    digest: bytes
    summary: str
    plain: tuple[object] | None = None


async def read_answers(
    server: Server, spec: TaskSpec, rows: Sequence[SiblingRow]
) -> list[SiblingAnswer]:
    stored = await server.store.read(operations.answers([row.task_id for row in rows]))
    found = []
    for row in rows:
        answer = stored[row.task_id]
        content = answer.value or None
        if row.status == TaskStatus.SUCCEEDED and answer.value_sha256:
            content = await _artifact(server, spec, answer.value_sha256)
        found.append(await asyncio.to_thread(compared_form, spec, row, answer, content))
    return found


async def _artifact(server: Server, spec: TaskSpec, sha256: str) -> bytes | None:
    """Content of a value that is an artifact, if it is needed and small."""
    if spec.tolerance is None:
        return None
    size = await server.store.read(artifacts.size_of(sha256))
    if size is None or size > MAX_TOLERANT_BYTES:
        return None
    return await server.blobs.read_range(await location_of(server, sha256), 0, size)


def compared_form(
    spec: TaskSpec, row: SiblingRow, answer: StoredAnswer, content: bytes | None
) -> SiblingAnswer:
    if row.status != TaskStatus.SUCCEEDED:
        ended = [row.reason, row.exit_code]
        code = "" if row.exit_code is None else f" with code {row.exit_code}"
        summary = f"it failed: {(row.reason or '').replace('_', ' ')}{code}"
        return SiblingAnswer(row.task_id, row.node_id, canonical_digest(ended), summary)
    if spec.kind is TaskKind.COMMAND:
        is_asked_for = fields.asked_for(spec.outputs)
        files = sorted(
            [file.path, file.sha256, file.executable]
            for file in answer.outputs
            if is_asked_for(file.path)
        )
        printed = "" if spec.outputs else hashlib.sha256(answer.stdout).hexdigest()
        digest = canonical_digest(["exited", row.exit_code, files, printed])
        what = f"{len(files)} output files" if spec.outputs else f"{len(answer.stdout)} bytes"
        where = "" if spec.outputs else " on standard output"
        return SiblingAnswer(
            row.task_id, row.node_id, digest, f"{what}{where}, hash {_shown(digest)}"
        )
    plain = None if content is None else plain_value(content)
    raw = answer.value_sha256 or hashlib.sha256(answer.value).hexdigest()
    digest = canonical_digest(["returned", raw])
    if plain is not None and not answer.value_sha256:
        with contextlib.suppress(Invalid):  # too deep: by its bytes
            digest = canonical_digest(["value", plain[0]])
    size = len(answer.value) if content is None else len(content)
    summary = f"a value of {size} bytes, hash {_shown(digest)}"
    if answer.value_sha256 and content is None:
        summary = f"a value in an artifact, hash {_shown(digest)}"
    tolerant = plain if spec.tolerance is not None else None
    return SiblingAnswer(row.task_id, row.node_id, digest, summary, tolerant)


def _shown(digest: bytes) -> str:
    return digest.hex()[:SHOWN_DIGITS]


def plain_value(content: bytes) -> tuple[object] | None:
    """Decode a value that was sent as data; None for pickles and for values of classes of their own."""
    if not content.startswith(DATA):
        return None
    try:
        return (_plain(decode(content)),)
    except (BadValue, Invalid):
        return None


def _plain(value: Any) -> object:
    """Turn arrays into lists; `Invalid` for types that have no plain form."""
    match value:
        case None | bool() | int() | float() | str() | bytes():
            return value
        case complex():
            return [value.real, value.imag]
        case list() | tuple():
            return [_plain(part) for part in value]
        case dict():
            return {key: _plain(part) for key, part in value.items()}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return {
            "dtype": str(value.dtype),
            "shape": list(value.shape),
            "data": _plain(value.tolist()),
        }
    raise Invalid(f"a value of type {type(value).__name__} has no plain form")


def same_answers(spec: TaskSpec, answers: Sequence[SiblingAnswer]) -> Same:
    """Compare by digest, or by the spec's tolerance where both answers are plain data."""
    if spec.tolerance is None:
        return lambda one, other: answers[one].digest == answers[other].digest
    tolerance = Tolerance(spec.tolerance, spec.tolerance)

    def agree(one: int, other: int) -> bool:
        first, second = answers[one], answers[other]
        if first.digest == second.digest:
            return True
        if first.plain is None or second.plain is None:
            return False
        return tolerance.agree(first.plain[0], second.plain[0])

    return agree
