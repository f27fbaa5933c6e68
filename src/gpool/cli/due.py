"""`--by` as click is told it: a time to come, in the words of `gpool.client.times`."""

from __future__ import annotations

import click

from gpool.client import times


def due(context: click.Context, option: click.Parameter, text: str | None) -> str | None:  # noqa: ARG001 - a callback
    return None if text is None else times.due(text)
