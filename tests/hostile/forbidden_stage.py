"""A host, its LAN and the internet in namespaces of their own; run as root, as a script. Prints what a lane reached as JSON.

    forbidden_stage.py root|rootless KIND

KIND is the runtime whose sandbox is tried.

The world beyond the host is one namespace that owns every outside address and answers on each; a packet socket there sees
all that arrives. Each target is tried from the host itself (no lane), from a lane without its filter, and from a lane.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
import tempfile
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import uvloop

from gpool.agent.network import firewall_rules, host
from gpool.agent.network.policy import Egress, EgressPolicy, Only, parse_target
from gpool.agent.network.root_networks import RootNetworks, read_sysctl
from gpool.agent.network.rootless_networks import RootlessNetworks, slirp_arguments
from gpool.agent.network.sandbox_network import Networks, OpenSandboxNetwork
from gpool.agent.runtime.protocol import CommandJob, Runtime, StagedInput
from tests.hostile import reaching
from tests.hostile.lanes_world import (
    CLONE_NEWNET,
    CLONE_NEWNS,
    CLONE_NEWUSER,
    GATEWAY,
    MS_REC,
    MS_SLAVE,
    NOBODY,
    OF_HOST,
    ON_HOST,
    OUTSIDE,
    OUTSIDE_6,
    PUBLIC,
    SPOKEN,
    arrived,
    build_world,
    fingerprint,
    libc,
    listening_in,
    must,
    open_the_way,
    open_tun,
    setns,
    settled,
)
from tests.hostile.reaching import PORT, attempt
from tests.tools.runtimes import LIMITS, MAKERS

Order = dict[str, Any]
TAG = "57a6e"
LISTED = "a private machine behind the gateway"
FOR_A_GUEST_S = 10.0  # an emulated machine needs seconds to send all of it
PATIENCE_S = 60.0  # for what must answer; it ends as soon as all have


def entered(opened: OpenSandboxNetwork, order: Order) -> Any:
    """In a child that has entered the lane and lost every capability there, but has no other wall around it."""
    out, into = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for descriptor in opened.lane.namespaces:
                setns(descriptor)
            if os.geteuid() == 0 and len(opened.lane.namespaces) == 1:
                os.setresuid(NOBODY, NOBODY, NOBODY)
            else:
                must(libc.unshare(CLONE_NEWUSER), "unshare")
            os.write(into, json.dumps(reaching.work(order)).encode())
        finally:
            os._exit(0)
    os.close(into)
    with os.fdopen(out) as said:
        text = said.read()
    os.waitpid(child, 0)
    return json.loads(text)


async def from_lane(opened: OpenSandboxNetwork, order: Order) -> Any:
    """The resolver answers on the loop meanwhile."""
    return await asyncio.to_thread(entered, opened, order)


async def from_sandbox(runtime: Runtime, opened: OpenSandboxNetwork, order: Order) -> Any:
    """As a task does: by a command of its own in a real sandbox."""
    script = Path(reaching.__file__)
    job = CommandJob(
        ("python", script.name, json.dumps(order)),
        (),
        (StagedInput(script.name, script, False),),
        (),
        LIMITS,
        network=opened.lane,
    )
    sandbox = await runtime.start_command(job)
    text = b"".join([data async for _, data in sandbox.output()])
    await sandbox.remove()
    return json.loads(text)


def no_protection(holder: int, ready: int, ending: int) -> list[str]:
    return [
        each
        for each in slirp_arguments(holder, ready, ending)
        if each not in ("--disable-host-loopback",)
    ]


async def take_filter_away(mode: str, opened: OpenSandboxNetwork) -> None:
    """The control: the same lane, but nobody judges."""
    if mode == "root":
        table = f"inet {firewall_rules.PREFIX}_{TAG}"
        chains = ("judge", "arriving", "through", "from_host")
    else:
        table = f"inet {firewall_rules.PREFIX}"
        chains = ("judge", "counted", "coming", "leaving")
    text = "".join(f"flush chain {table} {chain}\n" for chain in chains)
    if mode == "root":
        await host.load(text)
        return

    def run() -> None:
        child = os.fork()
        if child == 0:
            for descriptor in opened.lane.namespaces:
                setns(descriptor)
            out, into = os.pipe()
            os.write(into, text.encode())
            os.close(into)
            os.dup2(out, 0)
            path = host.nft_program("nft") or "nft"
            os.execve(path, [path, "-f", "-"], {})
        if os.waitpid(child, 0)[1] != 0:
            raise OSError("the filter could not be taken away")

    await asyncio.to_thread(run)


def networks(mode: str, policy: EgressPolicy, *, guarded: bool = True) -> Networks:
    servers = ((GATEWAY, 53),)
    if mode == "root":
        return RootNetworks(policy, TAG, servers=servers)
    attach = slirp_arguments if guarded else no_protection
    return RootlessNetworks(policy, servers=servers, attach=attach)


def inside_targets(mode: str) -> dict[str, str]:
    """What only a lane has near it."""
    if mode == "rootless":
        return {"the host's loopback by the way out": "10.0.2.2"}
    return {}


async def agent(mode: str, kind: str, capture: socket.socket, place: Path) -> dict[str, Any]:
    scope = socket.if_nametoindex("up0")
    outside = {**OUTSIDE, **OUTSIDE_6}
    spoken = {name: address.format(scope=scope) for name, address in SPOKEN.items()}
    told: dict[str, Any] = {}
    await host.nft("--version")  # the loop opens what it needs for children, once
    before = fingerprint()

    arrived(capture)
    told["from the host"] = attempt({**outside, **ON_HOST, "public": PUBLIC}, PATIENCE_S)
    attempt(spoken)
    told["names without resolver"] = [reaching.ask("rebind.example", at=GATEWAY) for _ in range(4)]
    told["spoken from the host"] = sorted(set(arrived(capture)))

    runtime = MAKERS[kind](place)
    await runtime.sweep()
    several = networks(mode, EgressPolicy())
    await several.start()
    opened, other = await several.open(Egress()), await several.open(Egress())
    for each in (opened, other):  # the world's name server may have to wait for its turn
        each.resolver.names = replace(each.resolver.names, within_s=PATIENCE_S)
    lines: list[str] = []
    many: list[str] = []
    other.report_to(lines.append)
    opened.report_to(many.append)
    near = inside_targets(mode)
    with contextlib.ExitStack() as stack:
        if mode == "root":
            near["another lane"] = stack.enter_context(listening_in(other))
            near["the host by its lane"] = str(
                IPv4Address(int(IPv4Address(near["another lane"])) & ~0xFFF | 1)
            )
        lane_spoken = {**spoken, "multicast by IPv6": "ff02::fb%2"}
        forbidden = {**outside, **OF_HOST, **near, **lane_spoken}
        refused = await several.refused_packets()
        told["from a lane"] = await from_lane(opened, {"targets": forbidden})
        told["host's loopback from a lane"] = await from_lane(
            opened, {"targets": {"the host's loopback": "127.0.0.1"}, "within_s": 0.3}
        )
        tries = {"targets": forbidden, "within_s": FOR_A_GUEST_S if kind == "microvm" else 0.6}
        told["from a sandbox"] = await from_sandbox(runtime, opened, tries)
        told["packets out"] = arrived(capture)
        told["refused packets"] = await several.refused_packets() - refused
        told["public"] = await from_lane(
            opened, {"targets": {"public": PUBLIC}, "within_s": PATIENCE_S}
        )
        told["public from a sandbox"] = await from_sandbox(
            runtime, opened, {"targets": {"public": PUBLIC}, "within_s": PATIENCE_S}
        )
        arrived(capture)
        told["names"] = await from_lane(opened, {"names": True})
        tally = opened.resolver.tally
        told["tally"] = {
            "refused": tally.refused,
            "stripped": tally.stripped,
            "forwarded": tally.forwarded,
        }
        asked = ["good.example", "inside.example"]
        told["names from a sandbox"] = await from_sandbox(runtime, other, {"resolved": asked})
        await from_sandbox(runtime, other, {"targets": {LISTED: OUTSIDE[LISTED], "public": PUBLIC}})

        listed = Only(
            (parse_target(f"{OUTSIDE[LISTED]}:{PORT}"),),
            {"index.example": (IPv4Address(OUTSIDE[LISTED]),)},
        )
        async with await several.open(listed) as only:
            targets = {**OUTSIDE, **OF_HOST, "public": PUBLIC}
            there = {name: targets.pop(name) for name in [LISTED]}
            told["from a listed lane"] = {
                **await from_lane(only, {"targets": there, "within_s": PATIENCE_S}),
                **await from_lane(only, {"targets": targets}),
            }
        await opened.close()
        await other.close()
        told["lines"], told["many lines"] = lines, many
        await several.close()

        arrived(capture)
        unguarded = networks(mode, EgressPolicy(), guarded=False)
        await unguarded.start()
        async with await unguarded.open(Egress()) as bare, await unguarded.open(Egress()) as other:
            await take_filter_away(mode, bare)
            if mode == "root":
                near["another lane"] = stack.enter_context(listening_in(other))
            told["from a lane without filter"] = await from_lane(
                bare, {"targets": {**OUTSIDE, **OF_HOST, **near}, "within_s": PATIENCE_S}
            )
            told["packets out without filter"] = sorted(set(arrived(capture)))
        await unguarded.close()

    await runtime.close()
    told["changed"] = await settled(before)
    told["forwarding"] = read_sysctl("ipv4/conf/up0/forwarding")
    return told


def main() -> int:
    mode, kind = sys.argv[1:3]
    must(libc.unshare(CLONE_NEWNET | CLONE_NEWNS), "unshare")
    must(libc.mount(b"none", b"/", None, MS_REC | MS_SLAVE, None), "slave")
    with tempfile.TemporaryDirectory() as place:
        if mode == "rootless":
            open_tun(Path(place))
            source = Path(__file__).resolve().parents[2]
            open_the_way(Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), source)
        data = Path(place) / "agent"
        data.mkdir()
        if mode == "rootless":
            Path(place).chmod(0o711)
            os.chown(data, NOBODY, NOBODY)
        capture = build_world()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if mode == "rootless":
                    os.setgroups([])
                    os.setresgid(NOBODY, NOBODY, NOBODY)
                    os.setresuid(NOBODY, NOBODY, NOBODY)
                    libc.prctl(
                        4, 1, 0, 0, 0
                    )  # PR_SET_DUMPABLE: as a process started by that user is
                told = uvloop.run(agent(mode, kind, capture, data))
                sys.stdout.write(json.dumps(told))
                sys.stdout.flush()
                code = 0
            except BaseException:  # noqa: BLE001 - a forked child must never return
                sys.excepthook(*sys.exc_info())
            os._exit(code)
        status = os.waitpid(child, 0)[1]
        must(libc.umount2(b"/dev/net/tun", 2) if mode == "rootless" else 0, "umount")
    return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
