"""Verification of a store and its data directory: invariants of rows, leases, files, keys, the ledger and the audit record.

Reads one snapshot, so that a serving pool is checked as it was at one moment, and lists a bounded number of violations.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from gpool.core.errors import GpoolError, Invalid
from gpool.core.ids import PREFIXES, encode
from gpool.core.model import Allocation, Offer
from gpool.server.actions.audit import verify
from gpool.server.actions.money.verification import verify as verify_ledger
from gpool.server.blobs.stores import FolderStore
from gpool.server.identity.audit import AuditAnchor, ChainBroken
from gpool.server.identity.envelope import Envelope, WrappedKey
from gpool.server.recovery.backup import masters_of
from gpool.server.recovery.snapshots import StoreSnapshot, known_revision, open_snapshot
from gpool.server.settings import Settings
from gpool.server.store.migrations import newest_migration
from gpool.server.store.operations import invariants
from gpool.server.store.operations.identity import sealed_fields
from gpool.server.store.operations.tasks import artifacts
from gpool.server.store.rows import allocation_from, offer_from

MOST_LISTED = 20
PAGE = 500


@dataclass(frozen=True, slots=True)
class Violation:
    check: str
    id: str
    detail: str


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Violations, at most `most` of each check; `truncated`: checks with more."""

    checks: int
    violations: tuple[Violation, ...]
    truncated: tuple[str, ...]
    audit_head: str  # NUMBER:HASH, empty without entries

    @property
    def is_clean(self) -> bool:
        return not self.violations


def parse_anchor(text: str) -> AuditAnchor:
    """Parse `NUMBER:HASH`, as the log and `gpool admin audit --verify` print it."""
    if not re.fullmatch(r"[0-9]{1,18}:[0-9a-f]{64}", text):
        raise Invalid(f"{text[:100]!r} is no anchor; give NUMBER:HASH as the log has it")
    number, _, digest = text.partition(":")
    return AuditAnchor(int(number), bytes.fromhex(digest))


async def check_pool(
    settings: Settings, anchors: Sequence[AuditAnchor] = (), most: int = MOST_LISTED
) -> CheckReport:
    snapshot = await open_snapshot(settings.store_url)
    try:
        if await known_revision(snapshot) != newest_migration():
            raise Invalid(
                f"the database has the schema {await snapshot.revision()}, not {newest_migration()}; "
                "migrate it first: gpool server --migrate-only"
            )
        return await _Check(settings, snapshot, most).run(anchors)
    finally:
        await snapshot.close()


class _Check:
    def __init__(self, settings: Settings, snapshot: StoreSnapshot, most: int) -> None:
        self._settings, self._snapshot, self._most = settings, snapshot, most
        self._found: list[Violation] = []
        self._counts: dict[str, int] = {}

    async def run(self, anchors: Sequence[AuditAnchor]) -> CheckReport:
        for each in invariants.ROW_CHECKS:
            rows = await self._snapshot.read(invariants.violations(each, self._most + 1))
            self._counts[each.name] = 0
            for row in rows:
                self._add(each.name, _named(each.kind, row.id), row.detail)
        await self._check_allocations()
        await self._check_files()
        await self._check_keys()
        await self._check_ledger()
        head = await self._check_audit(anchors)
        return CheckReport(
            len(self._counts),
            tuple(self._found),
            tuple(name for name, count in self._counts.items() if count > self._most),
            head,
        )

    def _add(self, check: str, id_: str, detail: str) -> None:
        self._counts[check] = self._counts.get(check, 0) + 1
        if self._counts[check] <= self._most:
            self._found.append(Violation(check, id_, detail))

    # ---- leases

    async def _check_allocations(self) -> None:
        self._counts["allocations"] = 0
        after = 0
        while nodes := await self._snapshot.read(invariants.holding_nodes(after, PAGE)):
            after = nodes[-1].id
            for node in nodes:
                held = await self._snapshot.read(invariants.held_allocations(node.id))
                for detail in allocation_problems(offer_from(node.offer), held):
                    self._add("allocations", encode("node", node.id), detail)

    # ---- files

    async def _check_files(self) -> None:
        """A file that is missing counts only if a later snapshot still names it: it may have been deleted."""
        self._counts["artifact_files"] = 0
        folder = FolderStore(self._settings.folder)
        async for found in self._artifacts():
            file = folder.path(found.object or found.sha256)
            if file.exists():
                continue
            later = await open_snapshot(self._settings.store_url)
            try:
                is_known = await later.read(artifacts.known(found.sha256))
            finally:
                await later.close()
            if is_known:
                self._add("artifact_files", found.sha256, f"{file} is missing")

    async def _artifacts(self) -> AsyncIterator[invariants.ArtifactFile]:
        after = ""
        while page := await self._snapshot.read(invariants.artifacts_in_folder(after, PAGE)):
            after = page[-1].sha256
            for row in page:
                yield row

    # ---- keys

    async def _check_keys(self) -> None:
        """Whether the master key opens every data key, and every sealed field names one."""
        self._counts["data_keys"] = self._counts["sealed_fields"] = 0
        try:
            masters = masters_of(self._settings)
        except GpoolError as error:
            self._add("data_keys", "master key", error.detail)
            return
        known = set()
        for key in await self._snapshot.read(sealed_fields.data_keys()):
            known.add(key.id)
            try:
                Envelope(masters, [WrappedKey(key.id, key.wrapped, key.created_at)])
            except GpoolError as error:
                self._add("data_keys", key.id.hex(), error.detail)
        for table, rows in (await self._snapshot.read(invariants.sealing_keys())).items():
            for row in rows:
                id_ = bytes(row.head)[1:]
                if id_ not in known:
                    detail = (
                        f"{row.fields} fields of {table} are sealed with it, and it is not there"
                    )
                    self._add("sealed_fields", id_.hex(), detail)

    # ---- ledger

    async def _check_ledger(self) -> None:
        self._counts["ledger"] = 0
        for found in (await verify_ledger(self._snapshot, most=self._most + 1)).findings:
            self._add("ledger", found.thing, found.why)

    # ---- audit record

    async def _check_audit(self, anchors: Sequence[AuditAnchor]) -> str:
        self._counts["audit"] = 0
        found = await verify(self._snapshot, anchors)
        if isinstance(found, ChainBroken):
            self._add("audit", str(found.sequence), found.why)
            return ""
        return f"{found.head.sequence}:{found.head.hash.hex()}" if found.head.sequence else ""


def allocation_problems(offer: Offer, held: Sequence[invariants.StoredAllocation]) -> list[str]:
    """Contradictions among the leases of one node: numbers used twice, and more than the node has."""
    found: list[str] = []
    by_number: dict[int, Allocation] = {}
    users: Counter[int] = Counter()
    for row in held:
        allocation = allocation_from(row.number, row.allocation)
        if by_number.setdefault(row.number, allocation) != allocation:
            found.append(f"two different allocations have the number {row.number}")
        users[row.number] += 1
    found += [
        f"the allocation {row.number} of a gang is another task's too"
        for row in held
        if row.is_member and users[row.number] > 1
    ]
    allocations = list(by_number.values())
    if sum(each.cpu_milli for each in allocations) > offer.cpu_milli:
        found.append("its leases have more processors than it offers now")
    if sum(each.memory_bytes for each in allocations) > offer.memory_bytes:
        found.append("its leases have more memory than it offers now")
    shares: dict[int, int] = {}
    for part in (part for each in allocations for part in each.slices):
        shares[part.gpu_index] = shares.get(part.gpu_index, 0) + part.share_milli
    found += [
        f"GPU {index} is given away more than once"
        for index, share in shares.items()
        if share > 1000
    ]
    return found


def _named(kind: str, id_: str) -> str:
    return encode(kind, int(id_)) if kind in PREFIXES else id_
