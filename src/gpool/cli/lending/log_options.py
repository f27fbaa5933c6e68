"""Option `--log-format` of `up`, `server` and `join`, and their messages in that format."""

from __future__ import annotations

import os

import click

from gpool.cli.command import option_section

_VARIABLES = ("GPOOL_SERVER_LOG_FORMAT", "GPOOL_AGENT_LOG_FORMAT")


def _set(ctx: click.Context, option: click.Parameter, value: str | None) -> None:  # noqa: ARG001
    """Set the variables that server and agent read; they inherit the environment."""
    if value is not None:
        for name in _VARIABLES:
            os.environ[name] = value


log_format_option = option_section("Logs")(
    "--log-format",
    type=click.Choice(["text", "json"]),
    callback=_set,
    expose_value=False,
    help="Log lines for people, or ECS JSON for log shippers (default: GPOOL_SERVER_LOG_FORMAT and "
    "GPOOL_AGENT_LOG_FORMAT, else text).",
)


def announce(text: str) -> None:
    """Print on standard error; as a log line if the log is JSON, so that a shipper can parse the whole stream."""
    if all(os.environ.get(name) != "json" for name in _VARIABLES):
        click.echo(text, err=True)
        return
    import logging

    from gpool.observability.logs import LogSource, write_line

    write_line("json", LogSource("gpool-cli", ""), logging.INFO, text)
