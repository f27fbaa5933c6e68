"""`gpool admin`: what operators do."""

from __future__ import annotations

import click

from gpool.cli.operating import audit, keys


@click.group()
def admin() -> None:
    """For operators: users, keys, the audit record."""


admin.add_command(keys)
admin.add_command(audit)
