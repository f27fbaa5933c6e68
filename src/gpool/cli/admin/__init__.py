"""`gpool admin`. A new verb is added to the list below."""

from __future__ import annotations

import click

from gpool.cli.admin import alerts, gpus, keys_and_audit, ledger, payouts, policy, recovery, users


@click.group()
def admin() -> None:
    """Manage users, quotas, policy and keys (operators)."""


for _verb in (
    users.users,
    users.invite,
    users.teams,
    keys_and_audit.keys,
    keys_and_audit.receipt_keys,
    keys_and_audit.audit,
    alerts.alerts,
    keys_and_audit.replicas,
    recovery.backup,
    recovery.restore,
    recovery.check,
    recovery.read_only,
    policy.policy,
    policy.cordon,
    policy.uncordon,
    policy.drain,
    policy.certify,
    gpus.admit,
    gpus.gpu_models,
    policy.preempt,
    policy.reservations,
    ledger.ledger,
    payouts.payout,
    payouts.rewards,
):
    admin.add_command(_verb)
