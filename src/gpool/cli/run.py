"""`gpool run`: submit a command, stream what it prints, fetch what it leaves, exit as it did."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpool.cli.calling import as_json, client_of, into
from gpool.cli.due import due
from gpool.cli.main import GPOOL_FAULT, INTERRUPTED, say_error
from gpool.cli.output.following import say_how_it_ended, show
from gpool.cli.output.interrupts import Reading, unless_interrupted
from gpool.cli.output.progress import ProgressLine, on_stderr, progress_bar
from gpool.core.errors import GpoolError, Invalid

if TYPE_CHECKING:
    from gpool.client.client import Client
    from gpool.client.files.artifacts import LocalFile
    from gpool.client.logs import Printed
    from gpool.client.results import Result
    from gpool.client.runs import Run

SECOND_CHANCE_S = 2.0
"""How long after the first Ctrl-C a second one cancels."""


@click.command(
    context_settings={"allow_interspersed_args": False},
    epilog="Examples: gpool run -- python -c 'print(6*7)'   "
    "gpool run --gpu A100 --input train.py --output model/ -- python train.py   "
    "gpool run --pip torch --workdir . train.py --lr 1   "
    "gpool run --nodes 2 --gpu 8 --engine torchrun --pip torch train.py",
)
@click.option("--gpu", metavar="SPEC", help="GPUs, e.g. 1, H100:2, 24GB, 0.5 (default: none).")
@click.option("--vram", metavar="SIZE", help="So much memory of any GPU, shared, e.g. 6GB.")
@click.option("--cpus", type=float, metavar="N", help="Processors (default 1).")
@click.option("--memory", metavar="SIZE", help="Memory, e.g. 4GB.")
@click.option("--disk", metavar="SIZE", help="Disk, e.g. 20GB.")
@click.option(
    "--tier",
    type=click.Choice(["none", "container", "vm"]),
    help="The weakest isolation you accept; none: only on a node of your own that allows it.",
)
@click.option("--timeout", metavar="TIME", help="Stop it after, e.g. 2h (default 24h).")
@click.option("--priority", type=click.IntRange(-100, 100), help="Higher goes first.")
@click.option("--retries", type=click.IntRange(0, 20), help="Further tries when it fails.")
@click.option("--env", multiple=True, metavar="K=V", help="A variable; K alone copies yours.")
@click.option(
    "--secret",
    "secret",
    multiple=True,
    metavar="K[=@FILE]",
    help="A variable that is never shown: yours, or what a file holds.",
)
@click.option(
    "--input", "inputs", multiple=True, metavar="PATH", help="A file or folder to send along."
)
@click.option(
    "--output",
    "outputs",
    multiple=True,
    metavar="PATH",
    help="A file or folder (FOLDER/) to bring back.",
)
@into
@click.option(
    "--workdir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    metavar="DIR",
    help="Ship this folder's files (without what .gitignore and .gpoolignore name); the command starts there.",
)
@click.option("--ignore", multiple=True, metavar="PATTERN", help="Leave out of --workdir.")
@click.option("--python", metavar="MINOR", help="A Python, e.g. 3.12.")
@click.option("--pip", multiple=True, metavar="PACKAGE", help="A package, e.g. 'numpy>=2'.")
@click.option(
    "--requirements",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    metavar="FILE",
    help="A requirements file.",
)
@click.option("--image", help="A container image, best with its digest.")
@click.option(
    "--network",
    type=click.Choice(["none", "egress"]),
    help="egress: the public internet, never private addresses (default: none).",
)
@click.option(
    "--preload", multiple=True, metavar="MODULE", help="A module to have ready before the start."
)
@click.option(
    "--checkpoint", metavar="DIR/", help="A folder that is saved and kept between attempts."
)
@click.option("--checkpoint-every", metavar="TIME", help="How often it is saved (default 10m).")
@click.option(
    "--grace", metavar="TIME", help="Between SIGTERM and the end when it is stopped (default 10s)."
)
@click.option(
    "--preemptible", is_flag=True, default=None, help="May be stopped for others and begun anew."
)
@click.option(
    "--by", metavar="TIME", callback=due, help="Wanted by then (18:00, or a date with time)."
)
@click.option(
    "--nodes", type=click.IntRange(1, 1024), metavar="N", help="Run on N nodes at once: a gang."
)
@click.option(
    "--engine",
    type=click.Choice(["none", "torchrun", "ray"]),
    help="What starts a gang's command (default: none, it is told its rank).",
)
@click.option(
    "--on-loss",
    type=click.Choice(["reform", "end"]),
    help="When a gang loses a node: begin anew on others (default), or fail.",
)
@click.option("--label", "labels", multiple=True, metavar="L", help="Only on nodes labelled so.")
@click.option("--max-price", metavar="PRICE", help="At most that on one node, e.g. 0.40/h.")
@click.option("--team", metavar="TEAM", help="In the name of this team of yours.")
@click.option("--name", help="A name for listings.")
@click.option("-d", "--detach", is_flag=True, help="Print the id and do not wait.")
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
    into: Path,
    detach: bool,
    as_json: bool,
    command: tuple[str, ...],
    **wanted: object,
) -> None:
    """Run a command in the pool.

    Streams its output, fetches its outputs and exits with its code. Ctrl-C detaches; a second one cancels.
    A Python file as the first word is shipped and run, with the packages its own block (PEP 723) names.
    """
    from gpool.client.files.local_files import shipment
    from gpool.client.options import Options

    client = client_of(ctx)
    shipped = shipment(workdir, ignore, inputs)
    script = script_of(command, workdir)
    if script is not None:
        command = ("python", script.path, *command[1:])
        shipped = [*shipped, script]
        wanted["script"] = script.source
    elif not (wanted["image"] or wanted["pip"] or wanted["requirements"]):
        _warn_of_a_missing_script(command[0])
    options = Options.of({**wanted, "env": variables(env), "secrets": secrets(secret)})
    with progress_bar() as progress:
        submitted = unless_interrupted(
            lambda: client.submit_command(
                command, inputs=shipped, outputs=outputs, options=options, progress=progress
            )
        )
    if submitted is None:
        click.echo(
            "\nStopped before the task had an id; whether the pool took it says: gpool ps", err=True
        )
        ctx.exit(INTERRUPTED)
    if detach:
        if as_json:
            _print_document(submitted)
        else:
            click.echo(submitted.id)
        return
    try:
        code = attend(client, submitted, into, quiet=as_json)
        if as_json:
            _print_document(submitted)
    except KeyboardInterrupt:  # between two readings
        code = detached(submitted, lambda _: False)
    except GpoolError as error:
        if os.environ.get("GPOOL_DEBUG"):
            raise
        say_error(error)
        click.echo(f"  Task {submitted.id} may go on: gpool status {submitted.id}", err=True)
        code = GPOOL_FAULT
    ctx.exit(code)


def attend(client: Client, submitted: Run, into: Path, *, quiet: bool) -> int:
    """Stream logs, wait, fetch outputs; the code to exit with."""

    def follow(say: Callable[[Printed | str], None]) -> Result:
        tell = ProgressLine(say, submitted, phases=sys.stderr.isatty())
        for piece in submitted.printed(follow=True, on_progress=tell):
            say(piece)
        return submitted.wait()

    with Reading(follow) as reading:
        try:
            result = reading.show(partial(show, quiet=quiet))
        except BrokenPipeError:  # `| head`: nobody reads any more
            on_stderr(
                f"gpool: nobody reads what task {submitted.id} prints; it goes on. "
                f"Stop it with: gpool cancel {submitted.id}"
            )
            raise
        if result is None:
            return detached(submitted, reading.is_pressed_again)
    say_how_it_ended(result)
    from gpool.client.results import exit_code

    if not result.outputs:
        return exit_code(result)
    kept = f"its outputs are kept. Fetch them with: gpool result {submitted.id} --into FOLDER"
    try:
        with progress_bar() as progress:
            told = [progress] if progress else []
            fetched = unless_interrupted(
                lambda: client.artifacts.fetch(result.outputs, into, *told)
            )
    except GpoolError as error:
        if os.environ.get("GPOOL_DEBUG"):
            raise
        say_error(error)
        click.echo(f"  The task has ended and {kept}", err=True)
        return GPOOL_FAULT
    if fetched is None:
        click.echo(f"\nThe task has ended and {kept}", err=True)
        return INTERRUPTED
    return exit_code(result)


def script_of(command: tuple[str, ...], workdir: Path | None) -> LocalFile | None:
    """The Python file that the command begins with, under the name it gets there.

    Its name may be the one in the shipped folder, where the command starts, or the one here.
    """
    base = Path(os.path.normpath(Path() if workdir is None else workdir)).absolute()
    here = Path(os.path.normpath(Path(command[0]).absolute()))
    there = Path(os.path.normpath(base / command[0]))
    source = next((file for file in (there, here) if file.suffix == ".py" and file.is_file()), None)
    if source is None:
        return None
    from gpool.client.files.artifacts import LocalFile

    is_inside = source.is_relative_to(base)
    name = source.relative_to(base).as_posix() if is_inside else source.name
    about = source.stat()
    return LocalFile(name, source, about.st_size, bool(about.st_mode & stat.S_IXUSR))


def _warn_of_a_missing_script(word: str) -> None:
    """It may be a program there; most often it is a slip, which a node would say much later."""
    if word.endswith(".py") and not Path(word).is_absolute():
        on_stderr(f"gpool: there is no {word} here to send, so it is taken for a program there")


def detached(submitted: Run, is_pressed_again: Callable[[float], bool]) -> int:
    """After the first Ctrl-C: say how to come back; a second one cancels."""
    click.echo(
        f"\nDetached; task {submitted.id} goes on. Come back with: gpool logs -f {submitted.id}\n"
        f"Stop it with: gpool cancel {submitted.id} (or press Ctrl-C again now)",
        err=True,
    )
    if is_pressed_again(SECOND_CHANCE_S):
        submitted.cancel()
        click.echo(f"Cancelled {submitted.id}.", err=True)
    return INTERRUPTED


def variables(given: tuple[str, ...]) -> dict[str, str]:
    """`K=V`, or `K` for the caller's own value of it."""
    found = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name:
            raise Invalid(f"--env {one!r} has no name; write --env NAME=VALUE")
        if not equals:
            if name not in os.environ:
                raise Invalid(
                    f"--env {name}: there is no such variable here; write --env {name}=VALUE"
                )
            value = os.environ[name]
        found[name] = value
    return found


def secrets(given: tuple[str, ...]) -> dict[str, str]:
    """`K` for the caller's own value of it, `K=@FILE` for a file's. Never `K=VALUE`: others see command lines."""
    found = {}
    for one in given:
        name, equals, source = one.partition("=")
        if not name or (equals and not source.startswith("@")):
            raise Invalid(
                f"--secret {name or one[:20]!r}: write --secret NAME (from your environment) or --secret NAME=@FILE; "
                "a value on the command line is seen by everybody on this machine"
            )
        if equals:
            try:
                found[name] = Path(source[1:]).read_text().removesuffix("\n")
            except (OSError, UnicodeDecodeError) as error:
                raise Invalid(f"--secret {name}: {source[1:]} cannot be read: {error}") from None
        elif name in os.environ:
            found[name] = os.environ[name]
        else:
            raise Invalid(
                f"--secret {name}: there is no such variable here; set it, or write --secret {name}=@FILE"
            )
    return found


def _print_document(submitted: Run) -> None:
    from gpool.cli.output.printing import emit_json

    emit_json(submitted.document())
