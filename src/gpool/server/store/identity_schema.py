"""The tables of accounts: sign-in, teams, quotas, audit log, secrets, GPU bindings; what accounts use and pay; and
verified results. `schema` has the others. One file because each table is a few lines.
"""

from __future__ import annotations

from sqlalchemy import (
    Index,
    Table,
    UniqueConstraint,
    text,
)

from gpool.server.store.schema_columns import (
    bytes_column,
    counter,
    id_column,
    int_column,
    maybe_int,
    maybe_text,
    metadata,
    note,
    partial_index,
    text_column,
)

# ---- login methods

wallets = Table(
    "wallets",
    metadata,
    text_column("address", primary_key=True),
    int_column("user_id"),
    int_column("linked_at"),
    counter("payout"),
    Index("ix_wallets_user_id", "user_id"),
)

oidc_identities = Table(
    "oidc_identities",
    metadata,
    text_column("issuer", primary_key=True),
    text_column("subject", primary_key=True),
    int_column("user_id"),
    Index("ix_oidc_identities_user_id", "user_id"),
)

sign_in_nonces = Table(
    "sign_in_nonces",
    metadata,
    text_column("nonce", primary_key=True),
    int_column("expires_at"),
    note("purpose"),
    Index("ix_sign_in_nonces_expires_at", "expires_at"),
)

user_invites = Table(
    "user_invites",
    metadata,
    text_column("hashed", primary_key=True),
    int_column("made_by"),
    text_column("permissions"),
    maybe_int("team_id"),
    maybe_text("role"),
    int_column("expires_at"),
    int_column("created_at"),
    maybe_int("used_at"),
    maybe_int("used_by"),
)

signing_keys = Table(
    "signing_keys",
    metadata,
    text_column("kid", primary_key=True),
    bytes_column("sealed", nullable=True),
    text_column("public"),
    int_column("created_at"),
    int_column("signs_from"),
    maybe_int("verifies_until"),
)
"""`sealed` is NULL once the key only verifies."""

receipt_keys = Table(
    "receipt_keys",
    metadata,
    text_column("id", primary_key=True),
    bytes_column("sealed", nullable=True),
    text_column("public"),
    int_column("from_ms"),
    text_column("endorsement"),
)
"""History of the keys that sign receipts (`wallet.receipt_keys`), kept for ever; only the newest has `sealed`."""

sessions = Table(
    "sessions",
    metadata,
    text_column("id", primary_key=True),
    int_column("user_id"),
    bytes_column("seed_sealed"),
    int_column("generation"),
    int_column("rotated_at"),
    int_column("idle_until"),
    int_column("created_at"),
    int_column("expires_at"),
    maybe_int("ended_at"),
    maybe_text("ended_why"),
    note("label"),
    Index("ix_sessions_idle_until", "idle_until"),
)
partial_index("ix_sessions_live", sessions.c.user_id, where="ended_at IS NULL")

# ---- teams and quotas

teams = Table(
    "teams",
    metadata,
    id_column(),
    text_column("name"),
    int_column("created_at"),
    UniqueConstraint("name"),
)

team_names = Table(
    "team_names",
    metadata,
    text_column("name", primary_key=True),
    int_column("team_id"),
)
"""Every name that a team has or had, of deleted teams too: no other team gets it."""

retired_names = Table(
    "retired_names",
    metadata,
    text_column("hashed", primary_key=True),
)
"""SHA-256 of the names of deleted accounts: owners' policies name users, so nobody else gets such a name."""

memberships = Table(
    "memberships",
    metadata,
    int_column("team_id", primary_key=True),
    int_column("user_id", primary_key=True),
    text_column("role"),
    int_column("since"),
    Index("ix_memberships_user_id", "user_id"),
)

team_invitations = Table(
    "team_invitations",
    metadata,
    int_column("team_id", primary_key=True),
    text_column("invitee", primary_key=True),
    maybe_int("user_id"),
    text_column("role"),
    int_column("made_by"),
    int_column("created_at"),
    int_column("expires_at"),
    Index("ix_team_invitations_user_id", "user_id"),
)
"""Invitations that wait for the invited user's consent. `invitee`: name or id as the owner wrote it; `user_id` is NULL
if no account has it, so that owners cannot tell names that exist from others."""

quotas = Table(
    "quotas",
    metadata,
    text_column("kind", primary_key=True),
    int_column("id", primary_key=True),
    maybe_int("running_gpu_milli"),
    maybe_int("queued_tasks"),
    maybe_int("storage_bytes"),
    maybe_int("guaranteed_gpu_milli"),
)

stored = Table(
    "stored",
    metadata,
    text_column("kind", primary_key=True),
    int_column("id", primary_key=True),
    text_column("sha256", primary_key=True),
    Index("ix_stored_sha256", "sha256"),
)
"""Users and teams that an artifact counts for, once however often they refer to it."""

storage = Table(
    "storage",
    metadata,
    text_column("kind", primary_key=True),
    int_column("id", primary_key=True),
    int_column("shard", primary_key=True),
    int_column("size_bytes"),
)
"""Bytes charged to a user or team: the artifacts of `stored`, the rows' `stored_bytes`, and `uploads`; in shards so that
concurrent writers do not wait for each other."""

uploads = Table(
    "uploads",
    metadata,
    text_column("uploader", primary_key=True),
    text_column("sha256", primary_key=True),
    int_column("number", primary_key=True),
    text_column("kind"),
    int_column("account"),
    int_column("size_bytes"),
    int_column("at"),
    note("object"),
    note("upload_id"),
    counter("writer"),
    Index("ix_uploads_at", "at"),
)
"""Room reserved for uploads in progress. `number` 0: an upload in parts; -1: one straight to the object store, as the
multipart upload `upload_id` of the key `object`; else one request. `writer`: replica that writes a part now, else 0.
"""

# ---- audit log, secrets, bindings

audit = Table(
    "audit",
    metadata,
    int_column("number", primary_key=True),
    int_column("at"),
    text_column("actor"),
    text_column("action"),
    text_column("thing"),
    text_column("outcome"),
    text_column("address"),
    text_column("facts"),
    bytes_column("hash"),
)

audit_head = Table(
    "audit_head",
    metadata,
    id_column(),
    int_column("number"),
    bytes_column("hash", nullable=True),
)
"""One row, locked by an append, so that numbers have no gaps. No hash while the log is empty."""

data_keys = Table(
    "data_keys",
    metadata,
    text_column("id", primary_key=True),
    bytes_column("wrapped"),
    int_column("created_at"),
    maybe_int("retired_at"),
)

account_keys = Table(
    "account_keys",
    metadata,
    text_column("kind", primary_key=True),
    int_column("id", primary_key=True),
    text_column("key_id"),
    bytes_column("wrapped"),
    Index("ix_account_keys_key_id", "key_id", unique=True),
)
"""Data keys of users and teams whose data is encrypted, wrapped by the master key (`encryption.account_keys`)."""

task_secrets = Table(
    "task_secrets",
    metadata,
    int_column("spec_id", primary_key=True),
    text_column("name", primary_key=True),
    bytes_column("sealed"),
)

named_secrets = Table(
    "named_secrets",
    metadata,
    text_column("holder_kind", primary_key=True),
    int_column("holder_id", primary_key=True),
    text_column("name", primary_key=True),
    bytes_column("sealed"),
    int_column("created_at"),
    int_column("updated_at"),
)
"""Secrets of users and teams that submissions copy by name."""

gpu_bindings = Table(
    "gpu_bindings",
    metadata,
    text_column("uuid", primary_key=True),
    int_column("owner_id"),
    maybe_text("wallet"),
    int_column("bound_at"),
    maybe_int("settled_at"),
)

# ---- verified results

verifications = Table(
    "verifications",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("user_id"),
    int_column("siblings"),
    maybe_int("decided_at"),
    note("outcome"),
    maybe_int("rerun_id"),
)
"""Verified tasks. `siblings`: as in their requirements; `decided_at`: NULL while their answers are awaited. `outcome`:
`accepted`, `no_quorum`, `not_compared` (the consumer's comparator failed), `cancelled` or, when its node was caught
later, `withdrawn` (`rerun_id`: the task that runs it again) or `refunded`."""
partial_index(
    "ix_verifications_open",
    verifications.c.user_id,
    verifications.c.task_id,
    where="decided_at IS NULL",
)
partial_index(
    "ix_verifications_withdrawn",
    verifications.c.task_id,
    where="outcome = 'withdrawn' AND rerun_id IS NULL",
)

siblings = Table(
    "siblings",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("parent_id"),
    int_column("number"),
    int_column("node_id"),
    int_column("owner_id"),
    text_column("state"),
    maybe_text("digest"),
    Index("ix_siblings_parent_id_number", "parent_id", "number", unique=True),
)
"""Runs of a verified task, on the node drawn for each. `state`: `open`, `void` (no answer), `agreed`, `differed`, or
`unchecked` (accepted without a spot check). `digest`: of the answer, once it was compared."""
Index(
    "ix_siblings_owner",
    siblings.c.parent_id,
    siblings.c.owner_id,
    unique=True,  # no two answers of a task are from one owner
    sqlite_where=text("state <> 'void'"),
    postgresql_where=text("state <> 'void'"),
)

partial_index("ix_siblings_unchecked", siblings.c.node_id, where="state = 'unchecked'")

failed_checks = Table(
    "failed_checks",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("node_id"),
    int_column("at"),
    text_column("wanted"),
    text_column("found"),
    Index("ix_failed_checks_node_id_at", "node_id", "at"),
)
"""Answers of a node that differed from the accepted one, for its owner."""

standings = Table(
    "standings",
    metadata,
    int_column("node_id", primary_key=True),
    counter("suspicion"),
    counter("as_sibling"),
    counter("offences"),
    counter("banned_until"),
    maybe_int("last_start"),
    int_column("changed_at"),
)
"""Standing of nodes by the checks of their answers (`core.trust.standing`)."""

check_records = Table(
    "check_records",
    metadata,
    int_column("node_id", primary_key=True),
    text_column("model", primary_key=True),
    text_column("environment", primary_key=True),
    counter("passed"),
)
"""Passed checks for each GPU model and environment of a node."""
# ---- use and charges

usage_totals = Table(
    "usage_totals",
    metadata,
    text_column("kind", primary_key=True),
    int_column("id", primary_key=True),
    int_column("month", primary_key=True),
    int_column("node_id", primary_key=True),
    text_column("model", primary_key=True),
    note("project", primary_key=True),
    counter("attempts"),
    counter("task_us"),
    counter("gpu_us"),
    Index("ix_usage_totals_node_id", "node_id", "month"),
)
"""Ended attempts of a user or team (`kind`, `id`) in a month (year x 12 + month - 1) on a node, with their run time and
the time of their GPUs (a half GPU counts half). `model`: of the GPUs; empty: none.
`project`: label of its tasks."""

projects = Table(
    "projects",
    metadata,
    text_column("kind", primary_key=True),
    int_column("id", primary_key=True),
    text_column("name", primary_key=True),
)
"""Project labels that a user or team (`kind`, `id`) has used; their number is limited (`operations/tasks/projects.py`)."""

meters = Table(
    "meters",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("epoch", primary_key=True),
    int_column("rank", primary_key=True),
    int_column("node_id"),
    int_column("number"),
    int_column("payer_id"),
    int_column("pending_id"),
    int_column("owner_id"),
    int_column("rate"),
    int_column("minimum"),
    counter("fee_ppm"),
    text_column("gpus"),
    int_column("until"),
    counter("charged_us"),
    counter("charged"),
    counter("posted"),
    int_column("reserved"),
    counter("roll"),
    counter("leases"),
    int_column("renew_at"),
    maybe_int("closed_at"),
    Index("ix_meters_renew_at", "renew_at"),
)
"""Meters of allocations with a price, one for each allocation of a gang; deleted when they are settled.

Task, epoch and rank are those of the lease that opened it. `payer_id`, `pending_id`, `owner_id`: accounts of the ledger.
`rate` and `minimum` are frozen. `until`, `charged_us`, `charged`: `core.money.charging.AllocationMeter`. `posted`: part of
`charged` that earlier pending transfers have paid. `reserved`: `posted` and the amount of the open pending transfer, whose
number is `roll`. `leases`: held ones on it. `renew_at`: when the reservation is looked at again. `closed_at`: its last lease has ended."""
partial_index("ix_meters_open", meters.c.node_id, meters.c.number, where="closed_at IS NULL")
partial_index("ix_meters_closed", meters.c.closed_at, where="closed_at IS NOT NULL")

charges = Table(
    "charges",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("epoch", primary_key=True),
    int_column("node_id", primary_key=True),
    int_column("payer_id"),
    int_column("owner_id"),
    maybe_int("started_at"),
    int_column("ended_at"),
    counter("charged_us"),
    counter("microcredits"),
    counter("fee"),
    int_column("rate"),
    int_column("minimum"),
    text_column("reason"),
    text_column("gpus"),
    text_column("reserve_id"),
    maybe_text("transfer_id"),
    text_column("state"),
    maybe_int("vests_at"),
    note("project"),
)
"""One row for each ended lease on a metered allocation, of a gang one for each member; kept for ever, with opaque ids only.

`payer_id`, `owner_id`: accounts of the ledger. `fee`: part of `microcredits`. `reserve_id`: pending transfer in which it is
set aside. `transfer_id`: the post that paid it. `state`: `metered` (to be posted), `held` (until a verdict), `posted`,
`void` (nothing is charged), `vested`, `forfeited`. `project`: the payer's label, blanked with the payer's account."""
partial_index("ix_charges_open", charges.c.reserve_id, where="state IN ('metered', 'held')")
partial_index(
    "ix_charges_vesting", charges.c.vests_at, where="state = 'posted' AND vests_at IS NOT NULL"
)
partial_index(
    "ix_charges_unreceipted", charges.c.ended_at, where="state = 'posted' AND vests_at IS NULL"
)
Index("ix_charges_owner_id", charges.c.owner_id, charges.c.ended_at)
Index("ix_charges_payer_id", charges.c.payer_id, charges.c.ended_at)
partial_index("ix_charges_of_node", charges.c.node_id, where="state = 'posted'")

# ---- receipts, earnings, payouts

work_signatures = Table(
    "work_signatures",
    metadata,
    int_column("task_id", primary_key=True),
    int_column("epoch", primary_key=True),
    int_column("node_id", primary_key=True),
    text_column("node_key"),
    bytes_column("signature"),
    text_column("result"),
    text_column("gpus"),
    int_column("at"),
    bytes_column("path", nullable=True),
    Index("ix_work_signatures_at", "at"),
)
"""Signatures of ended, priced leases, until their receipt is issued. `result`: its SHA-256. `gpus`: as the node
signed them (JSON). `path`: as in `wallet.receipt_keys.WorkProof`; NULL: empty."""

receipts = Table(
    "receipts",
    metadata,
    id_column(),
    int_column("task_id"),
    int_column("epoch"),
    int_column("node_id"),
    int_column("payer_id"),
    int_column("owner_id"),
    int_column("month"),
    int_column("issued_at"),
    bytes_column("body"),
    UniqueConstraint("task_id", "epoch", "node_id", name="uq_receipts_lease"),
    Index("ix_receipts_payer_id", "payer_id", "id"),
    Index("ix_receipts_owner_id", "owner_id", "id"),
    Index("ix_receipts_month", "month", "id"),
)
"""Canonical bytes of receipts (`wallet.receipts`), kept for ever. `payer_id`, `owner_id`: accounts of the ledger, the
owner's that of vesting earnings. `month`: in which it was issued."""

wallet_changes = Table(
    "wallet_changes",
    metadata,
    int_column("user_id", primary_key=True),
    int_column("number", primary_key=True),
    int_column("at"),
    maybe_text("address"),
)
"""History of a user's payout wallet. `address` NULL: none from then on."""

rewards = Table(
    "rewards",
    metadata,
    int_column("month", primary_key=True),
    int_column("account_id", primary_key=True),
    int_column("weight"),
    int_column("microcredits"),
    int_column("at"),
)
"""Shares of the operator's reward pools. `account_id`: the owner's account in the ledger."""

payouts = Table(
    "payouts",
    metadata,
    int_column("number", primary_key=True),
    int_column("month"),
    int_column("closed_at"),
    int_column("accounts"),
    text_column("total_due"),
    maybe_text("root"),
    text_column("receipts_root"),
    bytes_column("body"),
)
"""Closed periods. `body`: the payout file (`wallet.payouts`)."""
Index("uq_payouts_month", payouts.c.month, unique=True)

payout_lines = Table(
    "payout_lines",
    metadata,
    int_column("number", primary_key=True),
    int_column("account_id", primary_key=True),
    text_column("payee"),
    int_column("microcredits"),
    Index("ix_payout_lines_account_id", "account_id", "number"),
)
"""Amount of each owner's account in a period, and to which wallet or id it is paid."""

deposit_cursors = Table(
    "deposit_cursors",
    metadata,
    int_column("chain_id", primary_key=True),
    text_column("token", primary_key=True),
    text_column("address", primary_key=True),
    int_column("block"),
    note("block_hash"),
    int_column("changed_at"),
    maybe_int("halted_at"),
    note("why"),
)
"""Last block scanned for deposits, with its hash; empty: not known. `halted_at`: the hash has changed since, and an
operator has not resumed; `why` has both."""

deposits = Table(
    "deposits",
    metadata,
    int_column("chain_id", primary_key=True),
    text_column("tx", primary_key=True),
    int_column("log_index", primary_key=True),
    text_column("token"),
    text_column("address"),
    int_column("block"),
    text_column("block_hash"),
    text_column("sender"),
    text_column("amount"),
    text_column("status"),
    maybe_int("account_id"),
    int_column("changed_at"),
    Index("ix_deposits_account_id", "account_id", "block"),
)
"""Transfers to the pool's address. `amount`: decimal, in units of the token. `status`: credited, unmatched (no account
has the sender's wallet), held (an operator decides: more than the ledger moves at once, or seen in another block
before). `account_id`: of the ledger."""
partial_index("ix_deposits_sender", deposits.c.sender, where="status <> 'credited'")
