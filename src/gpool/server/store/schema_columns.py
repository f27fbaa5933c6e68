"""Columns and indexes of the schema, the same in both databases, and its metadata."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Text,
    text,
)

BIG = BigInteger().with_variant(Integer(), "sqlite")
"""63 bits in both databases; SQLite's row id must have the type INTEGER."""

metadata = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    }
)


def id_column() -> Column[int]:
    return Column("id", BIG, primary_key=True, autoincrement=False)


def int_column(name: str, *, primary_key: bool = False) -> Column[int]:
    return Column(name, BIG, nullable=False, primary_key=primary_key, autoincrement=False)


def counter(name: str) -> Column[int]:
    return Column(name, BIG, nullable=False, server_default=text("0"))


def maybe_int(name: str) -> Column[int]:
    return Column(name, BIG)


def text_column(name: str, *, primary_key: bool = False) -> Column[str]:
    return Column(name, Text, nullable=False, primary_key=primary_key)


def maybe_text(name: str) -> Column[str]:
    return Column(name, Text)


def bytes_column(name: str, *, nullable: bool = False) -> Column[bytes]:
    return Column(name, LargeBinary, nullable=nullable)


def note(name: str, *, primary_key: bool = False) -> Column[str]:
    default = text("''")
    return Column(name, Text, nullable=False, server_default=default, primary_key=primary_key)


def partial_index(name: str, *columns: Column[Any], where: str) -> Index:
    return Index(name, *columns, sqlite_where=text(where), postgresql_where=text(where))
