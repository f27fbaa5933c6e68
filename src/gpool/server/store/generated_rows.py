"""Rows of the tables. Written by `make docs` from `schema`; do not edit. One file because it is generated."""

from __future__ import annotations

from typing import NamedTuple

from gpool.core.ids import BatchId, NodeId, SpecId, TaskId, UserId
from gpool.core.model import Instant
from gpool.core.permissions import TeamId


class WalletsRecord(NamedTuple):
    address: str
    user_id: UserId
    linked_at: Instant
    payout: int


class OidcIdentitiesRecord(NamedTuple):
    issuer: str
    subject: str
    user_id: UserId


class UserInvitesRecord(NamedTuple):
    hashed: str
    made_by: UserId
    permissions: str
    team_id: TeamId | None
    role: str | None
    expires_at: Instant
    created_at: Instant
    used_at: Instant | None
    used_by: UserId | None


class SigningKeysRecord(NamedTuple):
    kid: str
    sealed: bytes | None
    public: str
    created_at: Instant
    signs_from: Instant
    verifies_until: Instant | None


class ReceiptKeysRecord(NamedTuple):
    id: str
    sealed: bytes | None
    public: str
    from_ms: int
    endorsement: str


class SessionsRecord(NamedTuple):
    id: str
    user_id: UserId
    seed_sealed: bytes
    generation: int
    rotated_at: Instant
    idle_until: Instant
    created_at: Instant
    expires_at: Instant
    ended_at: Instant | None
    ended_why: str | None
    label: str


class TeamsRecord(NamedTuple):
    id: TeamId
    name: str
    created_at: Instant


class QuotasRecord(NamedTuple):
    kind: str
    id: int
    running_gpu_milli: int | None
    queued_tasks: int | None
    storage_bytes: int | None
    guaranteed_gpu_milli: int | None


class StoredRecord(NamedTuple):
    kind: str
    id: int
    sha256: str


class UploadsRecord(NamedTuple):
    uploader: str
    sha256: str
    number: int
    kind: str
    account: int
    size_bytes: int
    at: Instant
    object: str
    upload_id: str
    writer: int


class AuditRecord(NamedTuple):
    number: int
    at: Instant
    actor: str
    action: str
    thing: str
    outcome: str
    address: str
    facts: str
    hash: bytes


class AuditHeadRecord(NamedTuple):
    id: int
    number: int
    hash: bytes | None


class DataKeysRecord(NamedTuple):
    id: str
    wrapped: bytes
    created_at: Instant
    retired_at: Instant | None


class AccountKeysRecord(NamedTuple):
    kind: str
    id: int
    key_id: str
    wrapped: bytes


class TaskSecretsRecord(NamedTuple):
    spec_id: SpecId
    name: str
    sealed: bytes


class NamedSecretsRecord(NamedTuple):
    holder_kind: str
    holder_id: int
    name: str
    sealed: bytes
    created_at: Instant
    updated_at: Instant


class GpuBindingsRecord(NamedTuple):
    uuid: str
    owner_id: UserId
    wallet: str | None
    bound_at: Instant
    settled_at: Instant | None


class FailedChecksRecord(NamedTuple):
    task_id: TaskId
    node_id: NodeId
    at: Instant
    wanted: str
    found: str


class StandingsRecord(NamedTuple):
    node_id: NodeId
    suspicion: int
    as_sibling: int
    offences: int
    banned_until: int
    last_start: int | None
    changed_at: Instant


class CheckRecordsRecord(NamedTuple):
    node_id: NodeId
    model: str
    environment: str
    passed: int


class UsageTotalsRecord(NamedTuple):
    kind: str
    id: int
    month: int
    node_id: NodeId
    model: str
    project: str
    attempts: int
    task_us: int
    gpu_us: int


class ProjectsRecord(NamedTuple):
    kind: str
    id: int
    name: str


class MetersRecord(NamedTuple):
    task_id: TaskId
    epoch: int
    rank: int
    node_id: NodeId
    number: int
    payer_id: int
    pending_id: int
    owner_id: int
    rate: int
    minimum: int
    fee_ppm: int
    gpus: str
    until: Instant
    charged_us: int
    charged: int
    posted: int
    reserved: int
    roll: int
    leases: int
    renew_at: Instant
    closed_at: Instant | None


class ChargesRecord(NamedTuple):
    task_id: TaskId
    epoch: int
    node_id: NodeId
    payer_id: int
    owner_id: int
    started_at: Instant | None
    ended_at: Instant
    charged_us: int
    microcredits: int
    fee: int
    rate: int
    minimum: int
    reason: str
    gpus: str
    reserve_id: str
    transfer_id: str | None
    state: str
    vests_at: Instant | None
    project: str


class ReceiptsRecord(NamedTuple):
    id: int
    task_id: TaskId
    epoch: int
    node_id: NodeId
    payer_id: int
    owner_id: int
    month: int
    issued_at: Instant
    body: bytes


class WalletChangesRecord(NamedTuple):
    user_id: UserId
    number: int
    at: Instant
    address: str | None


class RewardsRecord(NamedTuple):
    month: int
    account_id: int
    weight: int
    microcredits: int
    at: Instant


class PayoutsRecord(NamedTuple):
    number: int
    month: int
    closed_at: Instant
    accounts: int
    total_due: str
    root: str | None
    receipts_root: str
    body: bytes


class PayoutLinesRecord(NamedTuple):
    number: int
    account_id: int
    payee: str
    microcredits: int


class DepositCursorsRecord(NamedTuple):
    chain_id: int
    token: str
    address: str
    block: int
    block_hash: str
    changed_at: Instant
    halted_at: Instant | None
    why: str


class DepositsRecord(NamedTuple):
    chain_id: int
    tx: str
    log_index: int
    token: str
    address: str
    block: int
    block_hash: str
    sender: str
    amount: str
    status: str
    account_id: int | None
    changed_at: Instant


class UsersRecord(NamedTuple):
    id: UserId
    name: str
    permissions: str
    created_at: Instant
    password_hash: str | None
    disabled_at: Instant | None
    deleted_at: Instant | None


class ApiKeysRecord(NamedTuple):
    id: int
    user_id: UserId
    name: str
    hashed: str
    created_at: Instant
    scopes: str | None
    expires_at: Instant | None
    ended_at: Instant | None
    last_used_at: Instant | None
    team_id: TeamId | None


class InvitesRecord(NamedTuple):
    hashed: str
    owner_id: UserId
    expires_at: Instant
    created_at: Instant
    used_at: Instant | None
    node_id: NodeId | None


class NodesRecord(NamedTuple):
    id: NodeId
    owner_id: UserId
    name: str
    secret_hash: str
    offer: str
    availability: str
    availability_at: Instant | None
    last_beat_at: Instant | None
    created_at: Instant
    public_key: str | None


class BatchesRecord(NamedTuple):
    id: BatchId
    user_id: UserId
    name: str
    total: int
    done: int
    closed: int
    created_at: Instant
    team_id: TeamId | None


class TasksRecord(NamedTuple):
    id: TaskId
    batch_id: BatchId
    position: int
    spec_id: SpecId
    user_id: UserId
    status: str
    epoch: int
    created_at: Instant
    queued_at: Instant | None
    node_id: NodeId | None
    holding: int
    allocation_number: int | None
    allocation: str | None
    leased_at: Instant | None
    started_at: Instant | None
    finished_at: Instant | None
    reason: str | None
    exit_code: int | None
    tries: int
    losses: int
    sequence: int | None
    error_text: str | None
    payload_sha256: str
    value_sha256: str
    log_sha256: str
    outputs: str | None
    payload: bytes | None
    value: bytes | None
    team_id: TeamId | None
    stored_bytes: int
    shrunk_at: Instant | None
    max_cost: int | None
    settlement: str
    metered: int
    parent_id: TaskId | None
    progress: str | None


class AttemptsRecord(NamedTuple):
    task_id: TaskId
    epoch: int
    node_id: NodeId
    leased_at: Instant
    started_at: Instant | None
    ended_at: Instant
    reason: str
    detail: str


class ArtifactsRecord(NamedTuple):
    sha256: str
    size_bytes: int
    touched_at: Instant
    object: str
    key_sealed: bytes | None


class RulesRecord(NamedTuple):
    kind: str
    id: int
    value: str
    changed_at: Instant


class MembersRecord(NamedTuple):
    task_id: TaskId
    rank: int
    epoch: int
    node_id: NodeId
    allocation_number: int
    allocation: str
    host: str
    port: int
    holding: int
    started_at: Instant | None
    ended_at: Instant | None
    place: int | None
    reason: str | None
    exit_code: int | None
    detail: str
    duration_us: int
    outputs: str | None
    logged: int
    mid_line: int


class UsageRecord(NamedTuple):
    kind: str
    id: int
    value: int
    at: Instant


class NodeRecordsRecord(NamedTuple):
    node_id: NodeId
    up_us: int
    losses: int
    at: Instant


class ReplicasRecord(NamedTuple):
    id: int
    slot: int
    address: str
    version: str
    started_at: Instant
    heard_at: Instant
    lock_pid: int | None
    term: int
    draining: int


class ReadingsRecord(NamedTuple):
    replica_id: int
    number: int
    at: Instant
    body: bytes


class LedgerAccountsRecord(NamedTuple):
    id: int
    kind: str
    balance: int
    sequence: int


class LedgerEntriesRecord(NamedTuple):
    account_id: int
    sequence: int
    transfer_id: str
    amount: int
    balance: int


class PendingTransfersRecord(NamedTuple):
    id: str
    payer_id: int
    account_id: int
    amount: int
    month: int
    expires_at: Instant
    resolved_by: str | None
    returned: int


class LedgerBlocksRecord(NamedTuple):
    number: int
    previous: str
    root: str
    transfers: int
    sealed_at: Instant
    hash: str


class LedgerSpendingRecord(NamedTuple):
    account_id: int
    month: int
    amount: int


class OutboxRecord(NamedTuple):
    id: int
    at: Instant
    kind: str
    holder_kind: str
    holder_id: int
    subject: int
    epoch: int
    data: str


class EventsRecord(NamedTuple):
    number: int
    at: Instant
    kind: str
    holder_kind: str
    holder_id: int
    subject: int
    data: str


class DestinationsRecord(NamedTuple):
    id: int
    holder_kind: str
    holder_id: int
    form: str
    kinds: str
    sealed: bytes
    status: str
    why: str
    created_at: Instant
    changed_at: Instant
    sent_at: Instant | None
    code_hash: str | None
    code_tries: int


class DeliveriesRecord(NamedTuple):
    destination_id: int
    number: int
    subject: int
    status: str
    attempts: int
    next_at: Instant
    tried_at: Instant | None
    response: int | None
    error: str
