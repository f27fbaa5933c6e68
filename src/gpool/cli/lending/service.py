"""`gpool service`: systemd units that start the agent or the server at boot and again after a failure."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import click

from gpool.cli.command import examples
from gpool.core.errors import Conflict, Invalid

KINDS = {
    "agent": ("join", "Agent of a gpool node"),
    "server": ("server", "Server of a gpool pool"),
    "up": ("up", "Server and agent of a gpool pool"),
}
"""Service: the verb it runs, the unit's description."""

SYSTEM_UNITS = Path("/etc/systemd/system")
KEPT = ("GPOOL_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
"""Variables that decide where identity and data lie; copied into the unit."""


def unit_text(kind: str, arguments: tuple[str, ...], *, system: bool) -> str:
    """Text of the unit. `arguments` are those of the verb, e.g. `--price 0.31/h`."""
    verb, description = KINDS[kind]
    program = (sys.executable, "-m", "gpool", verb, *arguments)
    variables = {name: os.environ[name] for name in KEPT if os.environ.get(name)}
    if system:
        variables.setdefault("HOME", str(Path.home()))
    lines = [
        "[Unit]",
        f"Description={description}",
        *(["Wants=network-online.target", "After=network-online.target"] if system else []),
        "StartLimitIntervalSec=0",
        "",
        "[Service]",
        f"ExecStart={' '.join(map(_quoted, program))}",
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in variables.items()),
        "Restart=always",
        "RestartSec=5",
        "KillSignal=SIGTERM",
        "KillMode=mixed",
        "TimeoutStopSec=60",
        "Delegate=yes",
        "",
        "[Install]",
        f"WantedBy={'multi-user.target' if system else 'default.target'}",
        "",
    ]
    return "\n".join(lines)


def _quoted(word: str) -> str:
    """A word of a unit file: `%` and `$` have a meaning there."""
    if "\n" in word:
        raise Invalid(f"{word[:40]!r} has a line break, which no unit file can hold")
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"' if not text or any(letter in text for letter in " \t'\"\\;#") else text


def unit_folder(*, system: bool) -> Path:
    if system:
        return SYSTEM_UNITS
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base) / "systemd" / "user"


def _check(kind: str, arguments: tuple[str, ...]) -> None:
    """Parse the arguments as the verb would, so that a mistake is not found at the next boot."""
    from gpool.cli.main import cli

    verb = KINDS[kind][0]
    command = cli.get_command(click.Context(cli), verb)
    assert command is not None
    command.make_context(f"gpool {verb}", list(arguments))
    if kind == "agent" and not any(one.startswith("gpool://") for one in arguments):
        from gpool.cli.lending.join import saved_identity
        from gpool.client.config import home

        link = arguments[0] if arguments and "://" in arguments[0] else None
        saved_identity(home(), link)


@click.group()
def service() -> None:
    """Run agent or server as a systemd service."""


@service.command(
    context_settings={"ignore_unknown_options": True},
    epilog=examples(
        "gpool service install agent -- --policy /etc/gpool/rules.toml --price 0.31/h",
        "gpool service install server -- --host 0.0.0.0 --public-url https://pool.example:8642",
        "gpool service install agent --print",
    ),
)
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--system/--user", default=None, help="For the machine (as root), or for you.")
@click.option("--print", "is_printed", is_flag=True, help="Print the unit instead of writing it.")
@click.option("--force", is_flag=True, help="Replace a unit that differs.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- OPTION...]")
def install(
    kind: str,
    system: bool | None,
    is_printed: bool,
    force: bool,
    arguments: tuple[str, ...],
) -> None:
    """Write a unit that starts at boot and restarts after a failure.

    Options after -- are those of the verb it runs: gpool join (agent), gpool server or gpool up. The agent joins
    again without a link, so join the pool once before.
    """
    is_system = os.geteuid() == 0 if system is None else system
    _check(kind, arguments)
    text = unit_text(kind, arguments, system=is_system)
    if is_printed:
        click.echo(text, nl=False)
        return
    name = f"gpool-{kind}.service"
    file = unit_folder(system=is_system) / name
    if file.exists() and file.read_text() != text and not force:
        raise Conflict(f"{file} exists and differs; replace it with --force, or compare: --print")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    except OSError as exc:
        raise Invalid(f"cannot write {file} ({exc.strerror}); use --user, or run as root") from exc
    click.echo(f"Wrote {file}")
    ctl = "systemctl" if is_system else "systemctl --user"
    click.echo(f"Start it now and at every boot: {ctl} daemon-reload && {ctl} enable --now {name}")
    if not is_system:
        click.echo("To run it while you are signed out: loginctl enable-linger")
    click.echo(f"Its log: journalctl {'' if is_system else '--user '}-u {name} -f")
    if shutil.which("systemctl") is None:
        click.echo("gpool: this machine has no systemctl; the unit is for systemd", err=True)


@service.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.option("--system/--user", default=None, help="For the machine (as root), or for you.")
def remove(kind: str, system: bool | None) -> None:
    """Remove a unit that install has written."""
    is_system = os.geteuid() == 0 if system is None else system
    name = f"gpool-{kind}.service"
    file = unit_folder(system=is_system) / name
    if not file.exists():
        raise Conflict(f"{file} does not exist; nothing to remove")
    ctl = "systemctl" if is_system else "systemctl --user"
    file.unlink()
    click.echo(f"Removed {file}")
    click.echo(f"Stop it now: {ctl} disable --now {name}; {ctl} daemon-reload")
