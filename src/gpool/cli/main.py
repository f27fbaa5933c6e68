"""`gpool`: the verbs, loaded when used, and the one place where errors become lines and exit codes."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import click

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

# verb: (module, one line for --help, which must not load the module; a test holds them equal)
VERBS = {
    "up": ("gpool.cli.lending.up", "Start a server and an agent on this machine."),
    "run": ("gpool.cli.run", "Run a command in the pool."),
    "ps": ("gpool.cli.tasks", "List tasks, newest first."),
    "queue": ("gpool.cli.queue", "List what runs and waits, with when it starts and why not yet."),
    "status": ("gpool.cli.tasks", "Show one task."),
    "logs": ("gpool.cli.tasks", "Print what a task wrote."),
    "wait": ("gpool.cli.tasks", "Wait for a task; exit with its code."),
    "cancel": ("gpool.cli.tasks", "Cancel tasks."),
    "result": ("gpool.cli.tasks", "Fetch a finished task's outputs."),
    "explain": (
        "gpool.cli.tasks",
        "Say why a task waits, when it will start, and what would start it now.",
    ),
    "gpus": ("gpool.cli.pool", "List what the pool has, free and busy."),
    "register": ("gpool.cli.account", "Make an account, and sign in."),
    "login": ("gpool.cli.account", "Sign in, with a password or a wallet."),
    "logout": ("gpool.cli.account", "Sign out."),
    "whoami": ("gpool.cli.pool", "Show the account of the key in use."),
    "keys": ("gpool.cli.account", "API keys: list, make, end."),
    "wallet": ("gpool.cli.wallet", "Wallets of your account: list, link, unlink."),
    "team": ("gpool.cli.team", "Teams: list, make, invite, join, leave."),
    "node": ("gpool.cli.pool", "For owners: list, pause, resume, drain, invite, remove nodes."),
    "server": ("gpool.cli.lending.up", "Start a server alone."),
    "join": ("gpool.cli.lending.join", "Lend this machine to a pool."),
    "admin": ("gpool.cli.admin.users", "For operators: users, keys, the audit record, the policy."),
    "completion": ("gpool.cli.completion", "Print the completion script of a shell."),
}


ELSEWHERE = {
    "attach": "logs -f",
    "delete": "cancel",
    "exec": "run",
    "info": "status",
    "jobs": "ps",
    "kill": "cancel",
    "launch": "run",
    "list": "ps",
    "ls": "ps",
    "nodes": "node ls",
    "sbatch": "run -d",
    "scancel": "cancel",
    "show": "status",
    "sinfo": "node ls",
    "squeue": "queue",
    "srun": "run",
    "stop": "cancel",
    "submit": "run -d",
    "tasks": "ps",
    "teams": "team ls",
    "why": "explain",
}
"""What other tools call it, and what it is called here. Suggested, not obeyed: one thing has one name."""


class LazyVerbs(click.Group):
    """Loads a verb's module when the verb is used; translates our errors once, here."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if cmd_name not in VERBS:
            return None
        module = importlib.import_module(VERBS[cmd_name][0])
        command = getattr(module, cmd_name)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Click, with a suggestion: it knows only the verbs that are loaded, and we load none."""
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
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except GpoolError as error:
            if os.environ.get("GPOOL_DEBUG"):
                raise
            say_error(error)
            ctx.exit(exit_code_of(error))


def exit_code_of(error: GpoolError) -> int:
    """DESIGN §7: 1 failed, 2 usage, 3 not signed in or refused, 4 not found, 5 server unreachable."""
    if isinstance(error, Invalid | TooLarge):
        return USAGE
    if isinstance(error, NotSignedIn | Forbidden):
        return REFUSED
    if isinstance(error, NotFound):
        return NOT_FOUND
    return UNREACHABLE if isinstance(error, Unreachable) else FAILED


def say_error(error: GpoolError) -> None:
    """One or two lines: what was wrong, and where to look next."""
    from gpool.cli.output.printing import plain

    click.echo(f"gpool: {plain(error.detail)}", err=True)
    if isinstance(error, BadGpuSpec) and error.text and "^" not in error.detail:
        click.echo(f"  {plain(error.text)}\n  {' ' * error.position}^", err=True)
    elif isinstance(error, NotSignedIn):
        click.echo(
            "  Sign in with: gpool login (new here: gpool register NAME). Or set GPOOL_URL and GPOOL_KEY, "
            "or start a pool: gpool up",
            err=True,
        )
    elif isinstance(error, Forbidden):
        click.echo("  Who you are here, and what you may: gpool whoami", err=True)
    elif isinstance(error, Unreachable) and "CERTIFICATE_VERIFY_FAILED" in error.detail:
        click.echo(
            "  No authority that this machine trusts vouches for it. If it has a certificate of its own, take its "
            "fingerprint from whoever runs it (join links end with it) and set GPOOL_FINGERPRINT",
            err=True,
        )
    elif isinstance(error, Unreachable):
        click.echo(
            "  Start one with: gpool up. Another address: gpool --url URL, or GPOOL_URL", err=True
        )


@click.group(
    cls=LazyVerbs,
    epilog="Example: gpool run --gpu 24GB --input train.py --output model/ -- python train.py",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--url", metavar="URL", help="The pool's address (default: from the configuration).")
@click.option(
    "--key", metavar="KEY", help="Your API key. It shows in process lists: prefer GPOOL_KEY."
)
@click.version_option(package_name="gpool", prog_name="gpool")
@click.pass_context
def cli(ctx: click.Context, url: str | None, key: str | None) -> None:
    """Pool GPUs: lend idle ones, run code on everyone's."""
    if ctx.obj is None:  # a test passes its own
        ctx.obj = {"url": url, "key": key}


def _no_traceback(
    kind: type[BaseException], error: BaseException, at: TracebackType | None
) -> None:
    if os.environ.get("GPOOL_DEBUG"):
        sys.__excepthook__(kind, error, at)
        return
    click.echo(
        f"gpool: {kind.__name__}: {error}\n  This is a fault in gpool; GPOOL_DEBUG=1 shows where.",
        err=True,
    )


def main(args: Sequence[str] | None = None) -> None:
    """The console script."""
    sys.excepthook = _no_traceback
    cli.main(args=args, prog_name="gpool")
