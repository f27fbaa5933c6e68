"""`gpool admin`. A new verb is added to the list below."""

from __future__ import annotations

import click

from gpool.cli.admin import alerts, keys_and_audit, policy, users


@click.group()
def admin() -> None:
    """Manage users, quotas, policy and keys (operators)."""


for _verb in (
    users.users,
    users.invite,
    users.teams,
    keys_and_audit.keys,
    keys_and_audit.audit,
    alerts.alerts,
    keys_and_audit.replicas,
    policy.policy,
    policy.cordon,
    policy.uncordon,
    policy.drain,
    policy.certify,
    policy.preempt,
    policy.reservations,
):
    admin.add_command(_verb)
