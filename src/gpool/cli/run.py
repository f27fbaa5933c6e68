"""`gpool run`: submit a command, stream its output, download its files, exit with its code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpool.cli.command import (
    SectionedCommand,
    as_json,
    client_of,
    examples,
    into_option,
    option_section,
)
from gpool.cli.interrupts import Reading, unless_interrupted
from gpool.cli.main import GPOOL_FAULT, INTERRUPTED, print_error
from gpool.cli.printing import ProgressLine, on_stderr, print_outcome, progress_bar, show_output
from gpool.cli.submission import script_of, secrets, standard_input, unread_input, variables
from gpool.core.errors import GpoolError, Unprocessable

if TYPE_CHECKING:
    from gpool.client.client import Client
    from gpool.client.runs import Printed, Run
    from gpool.client.values import Result

TAIL_LETTERS = 16_384
"""End of the output in which an error's text is looked for, so that it is not printed twice."""

SECOND_CHANCE_S = 2.0
"""Seconds after the first Ctrl-C within which a second one cancels the task."""

resources = option_section("Resources")
placement = option_section("Placement")
files = option_section("Files")
environment = option_section("Environment")
scheduling = option_section("Scheduling")
gangs = option_section("Several nodes (gangs)")


class VerifyChoice(click.Choice[str]):
    """Values of `--verify`; "check" is refused with the way to use it."""

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if value == "check":
            self.fail(
                "a check function needs a function's value and is given in Python: "
                '@gpool.task(verify="check", check=is_right). For a command use 2 or 3.',
                param,
                ctx,
            )
        return super().convert(value, param, ctx)


def _deadline(ctx: click.Context, option: click.Parameter, text: str | None) -> str | None:  # noqa: ARG001 - click's signature
    from gpool.client import times

    return None if text is None else times.due(text)


@click.command(
    cls=SectionedCommand,
    context_settings={"allow_interspersed_args": False},
    epilog=examples(
        "gpool run -- python -c 'print(6*7)'",
        "gpool run --gpu A100 --input train.py --output model/ -- python train.py",
        "gpool run --pip torch --workdir . train.py --lr 1",
        "gpool run --nodes 2 --gpu 8 --engine torchrun --pip torch train.py",
    ),
)
@resources("--gpu", metavar="SPEC", help="GPUs: 1, H100:2, 24GB or 0.5 (default: none).")
@resources("--vram", metavar="SIZE", help="GPU memory on a GPU that may be shared, e.g. 6GB.")
@resources(
    "--cpus",
    type=float,
    metavar="N",
    help="CPU cores (default: with GPUs their part of the node, else 1).",
)
@resources("--memory", metavar="SIZE", help="Memory, e.g. 4GB.")
@resources("--disk", metavar="SIZE", help="Disk space, e.g. 20GB.")
@resources("--timeout", metavar="TIME", help="Time limit, e.g. 2h (default: 24h).")
@placement(
    "--label",
    "labels",
    multiple=True,
    metavar="LABEL",
    help="Only nodes with this label (repeatable).",
)
@placement(
    "--on",
    metavar="OWNER",
    help="Only nodes of: me, team (yours and your teams'), team:NAME, user:NAME; or anyone.",
)
@placement("--max-price", metavar="PRICE", help="Maximum price per node, e.g. 0.40/h.")
@placement(
    "--max-cost", metavar="CREDITS", help="Maximum cost of a task over all its attempts, e.g. 2.00."
)
@placement(
    "--tier",
    type=click.Choice(["none", "container", "vm"]),
    help="Minimum isolation; none: only nodes of your own that allow it.",
)
@files(
    "--input",
    "inputs",
    multiple=True,
    metavar="PATH",
    help="File or directory to upload (repeatable).",
)
@files(
    "--output",
    "outputs",
    multiple=True,
    metavar="PATH",
    help="File or directory (DIR/) to download afterwards (repeatable).",
)
@into_option(files)
@files(
    "--workdir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Upload this directory, without files in .gitignore and .gpoolignore, and start there.",
)
@files(
    "--ignore",
    multiple=True,
    metavar="PATTERN",
    help="Files to leave out of --workdir (repeatable).",
)
@files("-i", "--stdin", is_flag=True, help="Send standard input, read to its end first.")
@files("--checkpoint", metavar="DIR/", help="Directory to save and restore between attempts.")
@files("--checkpoint-every", metavar="TIME", help="Checkpoint interval (default: 10m).")
@environment("--python", metavar="MINOR", help="Python version, e.g. 3.12.")
@environment(
    "--pip", multiple=True, metavar="PACKAGE", help="Package, e.g. 'numpy>=2' (repeatable)."
)
@environment(
    "--requirements",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="Requirements file.",
)
@environment("--image", metavar="IMAGE", help="Container image, preferably with its digest.")
@environment(
    "--env",
    multiple=True,
    metavar="K[=V]",
    help="Variable (repeatable); K alone copies your value.",
)
@environment(
    "--secret",
    "secret",
    multiple=True,
    metavar="K[=@FILE]",
    help="Variable that is stored encrypted (repeatable); K alone takes your value, else the stored one.",
)
@environment(
    "--network",
    type=click.Choice(["none", "egress"]),
    help="egress: public internet, no private addresses (default: none).",
)
@scheduling(
    "--priority", type=click.IntRange(-100, 100), metavar="N", help="Higher starts earlier."
)
@scheduling("--by", metavar="TIME", callback=_deadline, help="Deadline: 18:00, 2h, or a date.")
@scheduling("--retries", type=click.IntRange(0, 20), metavar="N", help="Attempts after a failure.")
@scheduling("--preemptible", is_flag=True, default=None, help="Allow preemption and restart.")
@scheduling("--grace", metavar="TIME", help="Time from SIGTERM to SIGKILL (default: 10s).")
@scheduling("--team", metavar="TEAM", help="Submit for this team of yours.")
@scheduling("--project", metavar="LABEL", help="Label of the task in your statements.")
@placement(
    "--verify",
    type=VerifyChoice(["2", "3", "spot"]),
    callback=lambda _ctx, _option, word: int(word) if word in ("2", "3") else word,
    help="Accept the result only if nodes of 2 or 3 other owners agree; spot: check some results.",
)
@gangs("--nodes", type=click.IntRange(1, 1024), metavar="N", help="Run on N nodes at once.")
@gangs(
    "--engine",
    type=click.Choice(["none", "torchrun", "ray"]),
    help="Launcher on each node (default: none; the rank is in the environment).",
)
@gangs(
    "--on-loss",
    type=click.Choice(["reform", "end"]),
    help="After a lost node: restart on other nodes (default), or fail.",
)
@placement("--must-fit", is_flag=True, help="Cancel the task if no node of the pool could run it.")
@click.option("--name", metavar="NAME", help="Name shown in listings.")
@click.option("-d", "--detach", is_flag=True, help="Print the task id and exit.")
@click.option("--dry-run", is_flag=True, help="Show the expected cost and start; submit nothing.")
@as_json
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
@click.pass_context
def run(
    ctx: click.Context,
    /,
    env: tuple[str, ...],
    secret: tuple[str, ...],
    inputs: tuple[str, ...],
    outputs: tuple[str, ...],
    workdir: Path | None,
    ignore: tuple[str, ...],
    stdin: bool,
    must_fit: bool,
    into: Path,
    detach: bool,
    dry_run: bool,
    as_json: bool,
    command: tuple[str, ...],
    **wanted: object,
) -> None:
    """Run a command on the pool.

    Streams the output, downloads output files and exits with the command's exit code. Ctrl-C detaches; a second
    Ctrl-C cancels the task. A local Python file as first word is uploaded and run with the packages of its inline
    script metadata (PEP 723). `:NAME` runs a task of the project's gpool.toml; `:NAME --help` shows its parameters.
    """
    from gpool.client.local_files import shipment
    from gpool.client.options import Options

    if command[0].startswith(":") and "--help" in command[1:]:
        from gpool.cli.project.project_tasks import help_of, project_template

        click.echo(help_of(project_template(command[0])[1]))
        return
    client = client_of(ctx)
    shipped = shipment(workdir, ignore, inputs)
    own_env: dict[str, str] = {}
    script = None
    if command[0].startswith(":"):
        from gpool.cli.project.project_tasks import project_task

        chosen = project_task(command)
        command, wanted = chosen.command, chosen.options(wanted)
        shipped, outputs = [*shipped, *chosen.files()], (*chosen.template.outputs, *outputs)
        own_env = dict(chosen.template.env)
        if chosen.script is not None:
            wanted["script"] = chosen.script
    else:
        script = script_of(command, workdir)
    if script is not None:
        command = ("python", script.path, *command[1:])
        shipped = [*shipped, script]
        wanted["script"] = script.source
    elif not (wanted["image"] or wanted["pip"] or wanted["requirements"] or "script" in wanted):
        _warn_missing_script(command[0])
    options = Options.of({**wanted, "env": own_env | variables(env), "secrets": secrets(secret)})
    if dry_run:
        from gpool.cli.market.prices import show_quote
        from gpool.client.client import quote_command

        show_quote(quote_command(client, command, options), as_json=as_json)
        return
    with standard_input(stdin) as sent, progress_bar() as progress:
        if sent is not None:
            command, shipped = sent.redirected(command), [*shipped, sent.file]
        submitted = unless_interrupted(
            lambda: client.submit_command(
                command, inputs=shipped, outputs=outputs, options=options, progress=progress
            )
        )
    if submitted is None:
        click.echo(
            "\nInterrupted before the server confirmed the submission. "
            "Run `gpool ps` to see whether the task exists.",
            err=True,
        )
        ctx.exit(INTERRUPTED)
    if must_fit and (reason := submitted.misfit()):
        submitted.cancel()
        raise Unprocessable(f"no node of the pool can run it: {reason} Cancelled {submitted.id}")
    if shipped and submitted.on == "anyone" and not as_json:
        on_stderr(
            f"gpool: the owner of the node that runs {submitted.id} can read its inputs; "
            "--on me or --on team:NAME limits whose nodes that are"
        )
    if detach:
        if as_json:
            _print_document(submitted)
        else:
            click.echo(submitted.id)
        return
    try:
        code = follow_run(client, submitted, into, quiet=as_json)
        if as_json:
            _print_document(submitted)
        if not stdin and unread_input():
            on_stderr("gpool: standard input had data, which was not sent; send it with --stdin")
    except KeyboardInterrupt:  # between two readings
        code = detached(submitted, lambda _: False)
    except GpoolError as error:
        if os.environ.get("GPOOL_DEBUG"):
            raise
        print_error(error)
        click.echo(
            f"  Task {submitted.id} may still run; check with: gpool status {submitted.id}",
            err=True,
        )
        code = GPOOL_FAULT
    ctx.exit(code)


def follow_run(client: Client, submitted: Run, into: Path, *, quiet: bool) -> int:
    from gpool.client.values import exit_code

    tail = ""

    def follow(emit: Callable[[Printed | str], None]) -> Result:
        nonlocal tail
        on_progress = ProgressLine(emit, submitted, phases=sys.stderr.isatty())
        for piece in submitted.printed(follow=True, on_progress=on_progress):
            tail = (tail + piece.text)[-TAIL_LETTERS:]
            emit(piece)
        return submitted.wait()

    with Reading(follow) as reading:
        try:
            result = reading.show(partial(show_output, quiet=quiet))
        except BrokenPipeError:  # `| head`
            on_stderr(
                f"gpool: standard output was closed; task {submitted.id} continues. "
                f"Stop it with: gpool cancel {submitted.id}"
            )
            raise
        if result is None:
            return detached(submitted, reading.is_pressed_again)
    print_outcome(result, shown=tail)
    if not result.outputs:
        return exit_code(result)
    kept = f"its outputs are kept. Download them with: gpool result {submitted.id} --into DIR"
    try:
        with progress_bar() as progress:
            callbacks = [progress] if progress else []
            fetched = unless_interrupted(
                lambda: client.artifacts.fetch(result.outputs, into, *callbacks)
            )
    except GpoolError as error:
        if os.environ.get("GPOOL_DEBUG"):
            raise
        print_error(error)
        click.echo(f"  The task has ended and {kept}", err=True)
        return GPOOL_FAULT
    if fetched is None:
        click.echo(f"\nThe task has ended and {kept}", err=True)
        return INTERRUPTED
    return exit_code(result)


def _warn_missing_script(word: str) -> None:
    if word.endswith(".py") and not Path(word).is_absolute():
        on_stderr(f"gpool: no local file {word} to upload; the node runs it as a program")


def detached(submitted: Run, is_pressed_again: Callable[[float], bool]) -> int:
    click.echo(
        f"\nDetached; task {submitted.id} continues. Attach again with: gpool logs -f {submitted.id}\n"
        f"Cancel it with: gpool cancel {submitted.id} (or press Ctrl-C again now)",
        err=True,
    )
    if is_pressed_again(SECOND_CHANCE_S):
        submitted.cancel()
        click.echo(f"Cancelled {submitted.id}.", err=True)
    return INTERRUPTED


def _print_document(submitted: Run) -> None:
    from gpool.cli.printing import emit_json

    emit_json(submitted.document())
