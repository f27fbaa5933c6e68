"""The `gpool` command: the table of verbs; errors become messages and exit codes.

A verb's module is imported when the verb is used: this module imports none, nor an HTTP library.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import click

from gpool.cli.command import examples, needs_extra
from gpool.core.errors import (
    BadGpuSpec,
    Forbidden,
    GpoolError,
    Invalid,
    NotFound,
    NotSignedIn,
    TooLarge,
    Unreachable,
)

FAILED, USAGE, REFUSED, NOT_FOUND, UNREACHABLE = 1, 2, 3, 4, 5
GPOOL_FAULT, INTERRUPTED = 125, 130

SECTIONS = {
    "Tasks": {
        "run": ("gpool.cli.run", "Run a command on the pool."),
        "quote": (
            "gpool.cli.market.prices",
            "Show what a command would cost and when it would start.",
        ),
        "ps": ("gpool.cli.listings", "List tasks, newest first."),
        "queue": (
            "gpool.cli.listings",
            "List running and waiting tasks with expected start and reason.",
        ),
        "status": ("gpool.cli.tasks", "Show one task or batch."),
        "logs": ("gpool.cli.tasks", "Print the output of a task."),
        "wait": ("gpool.cli.tasks", "Wait for tasks to end; exit with their exit code."),
        "cancel": ("gpool.cli.tasks", "Cancel tasks or batches."),
        "delete": ("gpool.cli.listings", "Delete ended tasks or batches with their data."),
        "result": ("gpool.cli.tasks", "Download the output files of a finished task."),
        "explain": ("gpool.cli.tasks", "Explain why a task waits and estimate its start."),
        "catalogue": (
            "gpool.cli.project.catalogue",
            "List, show and run the tasks that gpool ships.",
        ),
        "events": ("gpool.cli.notices.events", "Show events of your tasks, nodes and funds."),
    },
    "Pool and nodes": {
        "gpus": ("gpool.cli.pool", "List GPUs with their state."),
        "top": ("gpool.cli.pool", "Watch GPUs: utilisation, memory, temperature, task and user."),
        "offers": ("gpool.cli.market.prices", "List what GPUs cost, by model and price."),
        "node": ("gpool.cli.pool", "List and manage nodes."),
        "up": ("gpool.cli.lending.up", "Start a server and an agent on this machine."),
        "server": ("gpool.cli.lending.up", "Start a server without an agent."),
        "join": ("gpool.cli.lending.join", "Join this machine to a pool and run its agent."),
        "service": ("gpool.cli.lending.service", "Run agent or server as a systemd service."),
    },
    "Account": {
        "register": ("gpool.cli.account", "Create an account and sign in."),
        "login": (
            "gpool.cli.account",
            "Sign in with a password, a wallet or an identity provider.",
        ),
        "logout": ("gpool.cli.account", "Sign out."),
        "whoami": ("gpool.cli.pool", "Show the account in use."),
        "keys": ("gpool.cli.account", "Manage API keys."),
        "secret": ("gpool.cli.account", "Store secrets that tasks use by name."),
        "team": ("gpool.cli.team", "Manage teams and their members."),
        "wallet": ("gpool.cli.wallet", "Manage the wallets of your account."),
        "webhook": ("gpool.cli.notices.webhooks", "Send events to web addresses."),
        "notify": ("gpool.cli.notices.events", "Send events to mail addresses."),
        "artifacts": ("gpool.cli.listings", "List and delete stored artifacts."),
        "storage": ("gpool.cli.listings", "Show what takes your storage."),
        "account": ("gpool.cli.listings", "Export or delete your account."),
    },
    "Market": {
        "usage": (
            "gpool.cli.market.usage",
            "Show the GPU time and credits that you used and earned.",
        ),
        "invoice": (
            "gpool.cli.market.statements",
            "Write the charges of a month, each with its receipt, task and timeline, as HTML or CSV.",
        ),
        "receipts": (
            "gpool.cli.market.statements",
            "List receipts of charged attempts, newest first.",
        ),
        "receipt": ("gpool.cli.market.receipts", "Fetch receipts; verify them offline."),
        "earnings": (
            "gpool.cli.market.statements",
            "Show what your nodes have earned, by month, node and GPU.",
        ),
        "payout": ("gpool.cli.market.payouts", "List, build and verify payouts; claim them."),
        "balance": (
            "gpool.cli.market.ledger",
            "Show your balance, pending funds and recent entries.",
        ),
        "deposit": (
            "gpool.cli.market.deposits",
            "Show where to send tokens, and your deposits.",
        ),
        "budget": (
            "gpool.cli.market.ledger",
            "Show or set the monthly budget of your account or team.",
        ),
    },
    "Other": {
        "admin": ("gpool.cli.admin", "Manage users, quotas, policy and keys (operators)."),
        "completion": ("gpool.cli.main", "Print a shell completion script."),
    },
}
"""Verbs by section of `gpool --help`: (module, help line). A test compares each line with the verb's own."""

VERBS = {verb: entry for verbs in SECTIONS.values() for verb, entry in verbs.items()}

EXTRA_OF = {
    "up": "server,agent",
    "server": "server",
    "join": "agent",
    "node": "agent",
    "service": "agent",
    "login": "wallet",
    "wallet": "wallet",
    "receipt": "wallet",
    "payout": "wallet",
}
"""Extra of gpool with the packages that a verb needs beyond the base install."""

ELSEWHERE = {
    "attach": "logs -f",
    "bash": "run",
    "config": "whoami",
    "doctor": "node doctor",
    "exec": "run",
    "help": "--help",
    "info": "status",
    "jobs": "ps",
    "kill": "cancel",
    "launch": "run",
    "list": "ps",
    "ls": "ps",
    "nodes": "node ls",
    "rm": "delete",
    "secrets": "secret ls",
    "sbatch": "run -d",
    "scancel": "cancel",
    "shell": "run",
    "show": "status",
    "sinfo": "node ls",
    "squeue": "queue",
    "srun": "run",
    "ssh": "run",
    "stop": "cancel",
    "submit": "run -d",
    "tasks": "ps",
    "teams": "team ls",
    "version": "--version",
    "why": "explain",
}
"""Command names of other tools and the gpool command to suggest for each. They are not aliases."""


class LazyVerbs(click.Group):
    """Imports a verb's module at its use; translates `GpoolError` to an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in VERBS:
            return None
        try:
            module = importlib.import_module(VERBS[cmd_name][0])
        except ModuleNotFoundError as error:
            raise _named_extra(error, cmd_name) from error
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Add a suggestion: click compares with loaded verbs only, and none is loaded."""
        word = args[0]
        if word not in VERBS and not word.startswith("-") and not ctx.resilient_parsing:
            like = difflib.get_close_matches(word, VERBS, 1)
            meant = ELSEWHERE.get(word) or (like[0] if like else None)
            ctx.fail(
                f"No such command {word!r}."
                + (f" Did you mean: gpool {meant}" if meant is not None else "")
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - click's signature
        width = max(map(len, VERBS))
        for title, verbs in SECTIONS.items():
            with formatter.section(title):
                formatter.write_dl([(verb.ljust(width), line) for verb, (_, line) in verbs.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GpoolError as error:
            if os.environ.get("GPOOL_DEBUG"):
                raise
            print_error(error, ctx.invoked_subcommand)
            ctx.exit(exit_code_of(error))
        except ModuleNotFoundError as error:
            found = _named_extra(error, ctx.invoked_subcommand or "")
            if not isinstance(found, GpoolError) or os.environ.get("GPOOL_DEBUG"):
                raise
            print_error(found)
            ctx.exit(exit_code_of(found))


def _named_extra(error: ModuleNotFoundError, verb: str) -> Exception:
    """The extra to install for a verb, or the error itself if a module of gpool is missing."""
    extra, module = EXTRA_OF.get(verb), error.name or ""
    if extra is None or module.partition(".")[0] == "gpool":
        return error
    return needs_extra(extra, f"gpool {verb}", module)


def exit_code_of(error: GpoolError) -> int:
    """1 failed, 2 usage, 3 not signed in or not allowed, 4 not found, 5 server unreachable."""
    if isinstance(error, Invalid | TooLarge):
        return USAGE
    if isinstance(error, NotSignedIn | Forbidden):
        return REFUSED
    if isinstance(error, NotFound):
        return NOT_FOUND
    return UNREACHABLE if isinstance(error, Unreachable) else FAILED


TASKS = "your tasks with: gpool ps"
LISTED_BY = dict.fromkeys(
    ("status", "logs", "wait", "cancel", "delete", "result", "explain"), TASKS
) | {
    "node": "nodes with: gpool node ls",
    "team": "your teams with: gpool team ls",
    "keys": "your keys with: gpool keys ls",
    "secret": "your secrets with: gpool secret ls",
    "wallet": "your wallets with: gpool wallet ls",
    "artifacts": "your artifacts with: gpool artifacts ls",
}
"""Listing to suggest when a verb did not find the object that it was given."""


def print_error(error: GpoolError, verb: str | None = None) -> None:
    from gpool.core.terminal import plain

    click.echo(f"gpool: {plain(error.detail)}", err=True)
    if isinstance(error, BadGpuSpec) and error.text and "^" not in error.detail:
        click.echo(f"  {plain(error.text)}\n  {' ' * error.position}^", err=True)
    elif isinstance(error, NotSignedIn):
        click.echo(
            "  Sign in with: gpool login (without an account: gpool register NAME). Or set GPOOL_URL and GPOOL_KEY, "
            "or start a pool: gpool up",
            err=True,
        )
    elif isinstance(error, NotFound) and verb in LISTED_BY and "gpool " not in error.detail:
        click.echo(f"  List {LISTED_BY[verb]}", err=True)
    elif isinstance(error, Forbidden):
        click.echo("  Show your account and its permissions: gpool whoami", err=True)
    elif isinstance(error, Unreachable) and "CERTIFICATE_VERIFY_FAILED" in error.detail:
        click.echo(
            "  The server's certificate is not signed by an authority that this machine trusts. If it is self-signed, "
            "ask the pool's operator for its fingerprint (join links end with it) and set GPOOL_FINGERPRINT",
            err=True,
        )
    elif isinstance(error, Unreachable):
        click.echo(
            "  Start a server with: gpool up. Use another address with: gpool --url URL, or GPOOL_URL",
            err=True,
        )


@click.group(
    cls=LazyVerbs,
    epilog=examples(
        "gpool run -- python -c 'print(6*7)'",
        "gpool run --gpu 24GB --input train.py --output model/ -- python train.py",
        "gpool COMMAND --help",
    ),
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--url", metavar="URL", help="Address of the pool (default: GPOOL_URL, then the profile)."
)
@click.option("--key", metavar="KEY", help="API key; visible in process lists, prefer GPOOL_KEY.")
@click.version_option(package_name="gpool", prog_name="gpool", help="Show the version and exit.")
@click.pass_context
def cli(ctx: click.Context, url: str | None, key: str | None) -> None:
    """Run code on pooled GPUs, and lend your own."""
    if ctx.obj is None:  # a test passes its own
        ctx.obj = {"url": url, "key": key}


@click.command(
    epilog=examples(
        "gpool completion bash >> ~/.bashrc",
        "gpool completion fish > ~/.config/fish/completions/gpool.fish",
    )
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a shell completion script."""
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(cli, {}, "gpool", "_GPOOL_COMPLETE").source())


def _no_traceback(
    kind: type[BaseException], error: BaseException, at: TracebackType | None
) -> None:
    if os.environ.get("GPOOL_DEBUG"):
        sys.__excepthook__(kind, error, at)
        return
    click.echo(
        f"gpool: {kind.__name__}: {error}\n  This is a bug in gpool; set GPOOL_DEBUG=1 to print the traceback.",
        err=True,
    )


def main(args: Sequence[str] | None = None) -> None:
    sys.excepthook = _no_traceback
    cli.main(args=args, prog_name="gpool")
