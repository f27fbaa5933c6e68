"""Verbs `gpus`, `top`, `whoami`, and `node` for owners of machines.

One file because all of them show or change the same documents of nodes and GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from gpool.cli.command import (
    SectionedCommand,
    as_json,
    client_of,
    complete_nodes,
    examples,
    is_joined,
    listed,
    listing,
    node_id,
    option_section,
    principal_names,
    shared_names,
    shown_as,
)
from gpool.cli.listings import gpu_notes, node_notes, show_node_tasks, watch_until_interrupted
from gpool.cli.main import FAILED
from gpool.cli.printing import age, emit_json, fields, gib, local_time, table
from gpool.cli.tasks import whose, whose_tasks
from gpool.core.errors import Forbidden, Invalid, NotFound, NotSignedIn
from gpool.core.terminal import plain

if TYPE_CHECKING:
    from gpool.client.client import Client

_GPU_NAME = re.compile(r"(?:(?P<node>[^/]+)/)?gpu(?P<index>\d{1,4})")


@click.command()
@listing
@click.pass_context
def gpus(ctx: click.Context, as_json: bool, everything: bool, limit: int) -> None:
    """List GPUs with their state."""
    found = listed(client_of(ctx), "resources", everything=everything, limit=limit)
    if as_json:
        emit_json(found)
        return
    shared = shared_names((one["node"], one.get("node_name")) for one in found)
    rows = [
        (
            one["id"],
            one["model"] + _proof(one),
            gib(one["memory_bytes"]),
            gib(one["memory_free_bytes"]),
            "flagged" if one.get("flagged") else one["status"],
            *_reading(one.get("reading") or {}),
            shown_as(one["node"], one.get("node_name"), shared),
            ",".join(one.get("tiers") or []),
            _price(one.get("price_microcredits") or 0),
            ",".join(one.get("labels") or []) or "-",
        )
        for one in found
    ]
    columns = [
        "id",
        "model",
        "memory",
        "free",
        "status",
        "busy",
        "used",
        "watts",
        "°C",
        "node",
        "tier",
        "price",
        "labels (claimed)",
    ]
    table(columns, rows, "No GPUs in the pool yet; add this machine with: gpool join LINK")
    for one in found:
        for note in gpu_notes(one):
            click.echo(plain(f"{one['id']} {note}."), err=True)


def _proof(gpu: dict[str, Any]) -> str:
    if gpu.get("simulated"):
        return " (simulated)"
    return "" if gpu.get("kind") == "cpu" or gpu.get("verified") else " (unverified)"


def _price(microcredits: int) -> str:
    from gpool.core.specs.fields import format_price

    return format_price(microcredits) if microcredits else "-"


def _reading(reading: dict[str, Any]) -> tuple[str, str, str, str]:
    percent, used = reading.get("utilisation_percent"), reading.get("memory_used_bytes")
    watts, celsius = reading.get("power_watts"), reading.get("temperature_celsius")
    return (
        "-" if percent is None else f"{percent} %",
        "-" if used is None else gib(used),
        "-" if watts is None else f"{watts:.0f}",
        "-" if celsius is None else str(celsius),
    )


select, display = option_section("Selection"), option_section("Display")

Tasks = dict[tuple[str, int], list[dict[str, Any]]]
"""Running tasks by node and index of the GPU."""


@click.command(
    cls=SectionedCommand,
    epilog=examples("gpool top", "gpool top --once", "gpool top --everybody --every 5"),
)
@partial(whose, option=select)
@display(
    "--every",
    "every_s",
    type=click.FloatRange(min=0.5),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Time between two readings.",
)
@display("--once", is_flag=True, help="Print once and exit.")
@as_json
@click.pass_context
def top(
    ctx: click.Context,
    team: str | None,
    everybody: bool,
    every_s: float,
    once: bool,
    as_json: bool,
) -> None:
    """Watch GPUs: utilisation, memory, temperature, task and user.

    Prints again until Ctrl-C; --json prints once. Tasks are yours, unless --team or --everybody asks for others.
    """
    client = client_of(ctx)
    filters = whose_tasks(client, team, everybody)

    def refresh() -> Callable[[], None]:
        gpus = listed(client, "resources", everything=True, limit=1000, kind="gpu")
        tasks = _by_gpu(
            listed(
                client,
                "tasks",
                everything=True,
                limit=1000,
                on_page=None,
                status="running",
                **filters,
            )
        )
        names = principal_names(client) if everybody else {}
        if as_json:
            found = [{**one, "tasks": tasks.get((one["node"], one["index"]), [])} for one in gpus]
            return partial(emit_json, found)
        return partial(show_top, gpus, tasks, names if everybody else None)

    watch_until_interrupted(ctx, refresh, None if once or as_json else every_s)


def _by_gpu(running: list[dict[str, Any]]) -> Tasks:
    found: Tasks = {}
    for task in running:
        for part in task.get("slices") or ():
            found.setdefault((task["node"], part["index"]), []).append(task)
    return found


def show_top(
    gpus: list[dict[str, Any]],
    tasks: Tasks,
    names: dict[str, str] | None,
    width: int | None = None,
) -> None:
    """Print a summary and one line per GPU; `names` of users if they are a column."""
    if gpus:
        click.echo(_summary(gpus))
    shared = shared_names((one["node"], one.get("node_name")) for one in gpus)
    rows = []
    for one in gpus:
        here = tasks.get((one["node"], one["index"]), [])
        reading = one.get("reading") or {}
        percent, celsius = reading.get("utilisation_percent"), reading.get("temperature_celsius")
        users = (
            [] if names is None else [str(names.get(task["user"], task["user"])) for task in here]
        )
        rows.append(
            (
                f"{shown_as(one['node'], one.get('node_name'), shared)}/gpu{one['index']}",
                one["model"] + (" (simulated)" if one.get("simulated") else ""),
                one["status"],
                "-" if percent is None else f"{percent} %",
                _used(one),
                "-" if celsius is None else celsius,
                _first_of(here[0]["id"] if here else "-", len(here)),
                *(() if names is None else [", ".join(dict.fromkeys(users)) or "-"]),
            )
        )
    columns = ("gpu", "model", "status", "busy", "memory", "°C", "task")
    empty = "No GPUs in the pool yet; add this machine with: gpool join LINK"
    table((*columns, *(() if names is None else ["user"])), rows, empty, width)


def _first_of(task: str, count: int) -> str:
    return task if count < 2 else f"{task} +{count - 1}"


def _used(gpu: dict[str, Any]) -> str:
    """Memory in use as measured, else as allocated."""
    used = (gpu.get("reading") or {}).get("memory_used_bytes")
    if used is None:
        used = gpu["memory_bytes"] - gpu["memory_free_bytes"]
    return f"{gib(used).removesuffix(' GiB').replace('-', '0')}/{gib(gpu['memory_bytes'])}"


def _summary(gpus: list[dict[str, Any]]) -> str:
    online = [one for one in gpus if one["status"] != "offline"]
    taken = sum(one["status"] in ("busy", "shared") for one in online)
    readings = [one.get("reading") or {} for one in online]
    known = [each["utilisation_percent"] for each in readings if each.get("utilisation_percent") is not None]  # fmt: skip
    mean = f", {sum(known) / len(known):.0f} % utilised on average" if known else ""
    offline = f", {len(gpus) - len(online)} offline" if len(online) < len(gpus) else ""
    return f"{len(gpus)} GPUs: {taken} with tasks, {len(online) - taken} without{offline}{mean}"


@click.command()
@as_json
@click.pass_context
def whoami(ctx: click.Context, as_json: bool) -> None:
    """Show the account in use."""
    client = client_of(ctx)
    document = client.api.get_json("/v1/me")
    if as_json:
        emit_json(document)
        return
    fields({**document, "server": client.url}, ("id", "name", "wallets", "permissions", "server"))


@click.group()
def node() -> None:
    """List and manage nodes."""


@node.command("ls")
@listing
@click.pass_context
def node_ls(ctx: click.Context, as_json: bool, everything: bool, limit: int) -> None:
    """List nodes."""
    client = client_of(ctx)
    try:
        found = listed(client, "nodes", everything=everything, limit=limit)
    except NotSignedIn:
        if not _list_here(as_json):
            raise
        return
    if as_json:
        emit_json(found)
        return
    date = client.api.date
    rows = [
        (
            one["id"],
            one["name"],
            one["status"],
            one["availability"] if one.get("cordoned") is None else "cordoned",
            f"{one['cpu_free_milli'] / 1000:g}/{one['cpu_milli'] / 1000:g}",
            len(one.get("gpus") or []),
            one.get("running", 0),
            age(one["last_beat_at"], date) if one.get("last_beat_at") else "-",
        )
        for one in found
    ]
    columns = ("id", "name", "status", "availability", "cpus free", "gpus", "running", "seen")
    table(columns, rows, "No nodes yet; create a join link with: gpool node invite")
    for one in found:
        for note in node_notes(one):
            click.echo(plain(f"{one['id']} ({one['name']}): {note}"), err=True)


def _list_here(as_json: bool) -> bool:
    """List the nodes that this machine is; False if it has joined no pool."""
    if not is_joined():
        return False
    from gpool.cli.lending.machine import OWNER_NOTE, lent_nodes

    rows = [
        (one.id, one.name, one.url, "paused here" if one.paused else "lent") for one in lent_nodes()
    ]
    if as_json:
        emit_json([dict(zip(("id", "name", "url", "state"), row, strict=True)) for row in rows])
    else:
        table(("id", "name", "pool", "state"), rows, "")
    click.echo(OWNER_NOTE, err=True)
    return True


@node.command("show")
@click.argument("what", metavar="[NODE]", required=False, shell_complete=complete_nodes)
@click.option(
    "--history",
    type=click.IntRange(1, 200),
    default=10,
    show_default=True,
    metavar="N",
    help="Ended tasks to show, for owners.",
)
@as_json
@click.pass_context
def node_show(ctx: click.Context, what: str | None, history: int, as_json: bool) -> None:
    """Show one node: resources, allowed users, problems; for its owner also its tasks.

    The owner sees whose tasks run and ran there, since when and with which resources, not what they compute.
    """
    client = client_of(ctx)
    id_ = node_id(client, what, own=True)
    document = client.api.get_json(f"/v1/nodes/{id_}")
    try:
        tasks = client.api.get_json(f"/v1/nodes/{id_}/tasks?limit={history}")
    except (Forbidden, NotFound):  # not the caller's node, or an older server
        tasks = None
    if as_json:
        emit_json({**document, "tasks": tasks})
        return
    if document.get("cordoned") is not None:
        document["cordoned"] = document["cordoned"] or "yes"
    audience = document.get("audience")
    document["audience"] = "some" if audience is None else audience or "anyone"
    document["gpus"] = [one["model"] for one in document.get("gpus") or []]
    document["cpus"] = f"{document['cpu_milli'] / 1000:g}"
    document["memory"] = gib(document["memory_bytes"])
    document["price"] = _price(document.get("price_microcredits") or 0)
    document["min_charge"] = _price(document.get("min_charge_microcredits") or 0).removesuffix("/h")
    notice = document.get("notice_s")
    document["notice"] = f"{notice} s" if notice else "-"
    names = (
        "id name owner site status availability closed cordoned problems audience tiers labels price min_charge free_for notice networks pythons "
        "environments builds cpus memory gpus running last_beat_at"
    )
    fields(document, names.split())
    if tasks is not None:
        show_node_tasks(tasks, client.api.date)


def _set(
    ctx: click.Context, what: str | None, availability: str, as_json: bool, now: bool = False
) -> None:
    client = client_of(ctx)
    try:
        gpu = _gpu(client, what)
        found = node_id(client, what, own=True) if gpu is None else ""
    except NotSignedIn:
        if availability == "draining" or now or not _pause_here(what, availability == "paused"):
            raise
        return
    if gpu is not None:
        if availability == "draining":
            raise Invalid(
                f"{what} is a GPU, and drain takes a node; use gpool node pause for a single GPU"
            )
        document = _set_gpu(client, gpu, availability == "available", now)
    elif now:
        raise Invalid(
            "--now reclaims one GPU, e.g. gpu0; to reclaim a whole node at once, stop its agent"
        )
    else:
        wanted = {"availability": availability}
        document = client.api.send_json("PATCH", f"/v1/nodes/{found}", wanted)
    if as_json:
        emit_json(document)
    else:
        label = document.get("name") or document.get("model")
        click.echo(f"{document['id']} ({plain(str(label))}) is {availability} now")


def _pause_here(what: str | None, paused: bool) -> bool:
    """Pause by the machine's own file, for a person who lends it without an account; False if it joined no pool."""
    if not is_joined():
        return False
    from gpool.cli.lending.machine import lent_node

    node = lent_node(what)
    node.pause(paused)
    done = "paused here: it takes no new tasks" if paused else "lent again, unless paused elsewhere"
    click.echo(f"{node.id} ({plain(node.name)}) of {node.url} is {done}, within ten seconds")
    return True


def _set_gpu(client: Client, gpu: str, available: bool, now: bool) -> dict[str, Any]:
    """Resuming ends a quarantine too, unless the agent reports the GPU as unhealthy."""
    path = f"/v1/resources/{gpu}"
    if available and client.api.get_json(path).get("quarantined"):
        client.api.send_json("PATCH", path, {"quarantined": None})
    wanted = {"available": available, **({"reclaim": True} if now else {})}
    return dict(client.api.send_json("PATCH", path, wanted))


def _gpu(client: Client, what: str | None) -> str | None:
    """Id from an id, `gpu0` (of the only node) or `NODE/gpu0`; None: not a GPU."""
    if what is None or what.startswith("g-"):
        return what
    found = _GPU_NAME.fullmatch(what)
    if found is None:
        return None
    node = client.api.get_json(f"/v1/nodes/{node_id(client, found['node'], own=True)}")
    ids = {one["index"]: str(one["id"]) for one in node.get("gpus") or []}
    index = int(found["index"])
    if index not in ids:
        there = ", ".join(f"gpu{one}" for one in sorted(ids)) or "none"
        raise NotFound(f"{node['name']} has no gpu{index}; there are: {there}")
    return ids[index]


which = click.argument("what", metavar="[NODE|GPU]", required=False, shell_complete=complete_nodes)


@node.command(
    epilog=examples(
        "gpool node pause", "gpool node pause gpu0 --now", "gpool node pause studio/gpu1"
    )
)
@which
@click.option("--now", is_flag=True, help="Preempt the tasks on this GPU.")
@as_json
@click.pass_context
def pause(ctx: click.Context, what: str | None, now: bool, as_json: bool) -> None:
    """Take no new tasks; running tasks continue.

    With --now the tasks on a GPU are preempted: SIGTERM, checkpoint, back into the queue.
    """
    _set(ctx, what, "paused", as_json, now)


@node.command()
@which
@as_json
@click.pass_context
def resume(ctx: click.Context, what: str | None, as_json: bool) -> None:
    """Take tasks again; ends the quarantine of a GPU."""
    _set(ctx, what, "available", as_json)


@node.command()
@click.argument("what", metavar="[NODE]", required=False, shell_complete=complete_nodes)
@as_json
@click.pass_context
def drain(ctx: click.Context, what: str | None, as_json: bool) -> None:
    """Take no new tasks; pause the node when the last one has ended."""
    _set(ctx, what, "draining", as_json)


@node.command("remove")
@click.argument("what", metavar="NODE", shell_complete=complete_nodes)
@click.confirmation_option(
    prompt="The node is removed for good and can return only with a new join link. Remove it?"
)
@click.option(
    "--force",
    is_flag=True,
    help="Remove it although tasks run there; they are queued again.",
)
@click.pass_context
def node_remove(ctx: click.Context, what: str, force: bool) -> None:
    """Remove a node of yours from the pool for good."""
    client = client_of(ctx)
    found = node_id(client, what, own=True)
    client.api.send("DELETE", f"/v1/nodes/{found}" + ("?force=true" if force else ""))
    click.echo(f"{plain(what)} removed")


@node.command()
@click.option(
    "--expires",
    default="1h",
    show_default=True,
    metavar="TIME",
    help="Validity of the link.",
)
@as_json
@click.pass_context
def invite(ctx: click.Context, expires: str, as_json: bool) -> None:
    """Create a join link for one machine."""
    from gpool.client.times import seconds

    wanted = {"expires_in_s": int(seconds(expires))}
    document = client_of(ctx).api.send_json("POST", "/v1/nodes/invites", wanted)
    if as_json:
        emit_json(document)
    else:
        click.echo(f"gpool join {document['link']}")
        click.echo(
            f"  Valid for one machine, once, until {local_time(document['expires_at'])}.", err=True
        )


@node.command()
@as_json
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check whether this machine can be a node and reaches the pool."""
    from dataclasses import asdict

    from gpool.cli.lending.doctor import examine
    from gpool.client.config import data_home

    folder = data_home()
    if is_joined():
        from gpool.cli.lending.machine import lent_nodes

        folder = next((one.data for one in lent_nodes() if one.data.is_dir()), folder)
    findings = examine(client_of(ctx), folder)
    if as_json:
        emit_json([asdict(finding) for finding in findings])
    else:
        rows = [(f.mark, f.name, f.text, f.fix) for f in findings]
        table(("", "check", "finding", "what to do"), rows, "")
    ctx.exit(0 if all(finding.ok for finding in findings) else FAILED)
