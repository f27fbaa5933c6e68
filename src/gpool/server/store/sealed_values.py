"""Sealed fields and the keys they are sealed with, as the store holds them. Never opened here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from gpool.core.ids import SpecId
from gpool.core.model import Instant


@dataclass(frozen=True, slots=True)
class DataKey:
    id: bytes
    wrapped: bytes = field(repr=False)
    created_at: Instant
    retired_at: Instant | None = None  # None: something may still be sealed with it


@dataclass(frozen=True, slots=True)
class SealedField:
    """One sealed value and where it lies. `row` is the primary key as text, its parts joined by `/`."""

    table: str
    row: str
    column: str
    sealed: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class SealedSecrets:
    """(name, sealed) by spec, and the data keys they may be sealed with."""

    fields: Mapping[SpecId, tuple[tuple[str, bytes], ...]] = field(default_factory=dict, repr=False)
    keys: tuple[DataKey, ...] = ()


NO_SECRETS = SealedSecrets()
