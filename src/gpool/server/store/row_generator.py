"""Generator of `generated_rows`: one NamedTuple per table of `schema`. `make docs` writes it, `make check` compares it.

A running server does not import SQLAlchemy, hence a generated file.
"""

from __future__ import annotations

import sys

from sqlalchemy import BigInteger, Column, LargeBinary, Text

from gpool.server.store import identity_schema, schema  # noqa: F401 - they fill the metadata
from gpool.server.store.operations.events import tables  # noqa: F401 - likewise
from gpool.server.store.schema_columns import metadata

IDS = {
    "batches": "BatchId",
    "nodes": "NodeId",
    "specs": "SpecId",
    "tasks": "TaskId",
    "teams": "TeamId",
    "users": "UserId",
}
"""Type of the column `id`, by table."""

REFERENCES = {
    "batch_id": "BatchId",
    "made_by": "UserId",
    "node_id": "NodeId",
    "owner_id": "UserId",
    "parent_id": "TaskId",
    "spec_id": "SpecId",
    "task_id": "TaskId",
    "team_id": "TeamId",
    "used_by": "UserId",
    "user_id": "UserId",
}
LEDGER_ACCOUNTS = frozenset(
    {("charges", "owner_id"), ("meters", "owner_id"), ("receipts", "owner_id")}
)
"""Columns with the name of a reference that hold an account of the ledger."""
NEVER_READ_WHOLE = frozenset(
    {
        "artifact_refs",
        "attempt_notes",
        "budgets",
        "changes",
        "checkpoints",
        "conditions",
        "event_readers",
        "gangs",
        "gpus",
        "idempotency",
        "ledger_holders",
        "ledger_transfers",
        "log_chunks",
        "log_heads",
        "memberships",
        "node_connections",
        "retired_names",
        "scheduler_term",
        "server_secrets",
        "siblings",
        "sign_in_nonces",
        "specs",
        "storage",
        "team_invitations",
        "team_names",
        "used_proofs",
        "verifications",
        "work_signatures",
    }
)
"""Tables without a row type: operations select some of their columns only."""
INSTANTS = frozenset({"at", "until", "idle_until", "since", "signs_from", "verifies_until"})
TYPES = {BigInteger: "int", Text: "str", LargeBinary: "bytes"}

HEAD = '''"""Rows of the tables. Written by `make docs` from `schema`; do not edit. One file because it is generated."""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant
from gpool.core.permissions import TeamId
'''


def type_of(table: str, column: Column[object]) -> str:
    if column.name == "id" and table in IDS:
        name = IDS[table]
    elif column.name in REFERENCES and (table, column.name) not in LEDGER_ACCOUNTS:
        name = REFERENCES[column.name]
    elif column.name in INSTANTS or column.name.endswith("_at"):
        name = "Instant"
    else:
        name = TYPES[type(column.type)]
    return f"{name} | None" if column.nullable else name


def class_name(table: str) -> str:
    return "".join(word.capitalize() for word in table.split("_")) + "Record"


def generated() -> str:
    parts = [HEAD]
    for name, table in metadata.tables.items():
        if name in NEVER_READ_WHOLE:
            continue
        fields = "\n".join(
            f"    {column.name}: {type_of(name, column)}" for column in table.columns
        )
        parts.append(f"class {class_name(name)}(NamedTuple):\n{fields}\n")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(generated())
