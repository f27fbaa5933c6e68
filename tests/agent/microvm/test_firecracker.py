"""Firecracker is told only what its published description allows, in an order it accepts. It never ran here."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest
import yaml

from gpool.agent.runtime.microvm import guest
from gpool.agent.runtime.microvm.guest_link import GuestConnection
from gpool.agent.runtime.microvm.guest_outputs import GuestPipes
from gpool.agent.runtime.microvm.monitors.firecracker import api
from gpool.agent.runtime.microvm.monitors.firecracker.monitor import Firecracker
from gpool.agent.runtime.microvm.monitors.protocol import GuestDisk, GuestMachine
from gpool.agent.runtime.protocol import SandboxFailed
from tests.tools.runtimes import PATIENCE_S, within

DESCRIPTION = Path(__file__).parents[4] / "shared" / "specs" / "firecracker-api.yaml"
NAMES = {
    "/machine-config": "MachineConfiguration",
    "/boot-source": "BootSource",
    "/drives": "Drive",
    "/entropy": "EntropyDevice",
    "/vsock": "Vsock",
    "/actions": "InstanceActionInfo",
}
TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
RECORDED: dict[str, Any] = {
    "MachineConfiguration": {
        "required": ["mem_size_mib", "vcpu_count"],
        "properties": {
            "mem_size_mib": WHOLE,
            "vcpu_count": {"type": "integer", "minimum": 1, "maximum": 32},
            "smt": FLAG,
        },
    },
    "BootSource": {
        "required": ["kernel_image_path"],
        "properties": {"kernel_image_path": TEXT, "initrd_path": TEXT, "boot_args": TEXT},
    },
    "Drive": {
        "required": ["drive_id", "is_root_device"],
        "properties": {
            "drive_id": TEXT,
            "path_on_host": TEXT,
            "is_root_device": FLAG,
            "is_read_only": FLAG,
            "cache_type": {"type": "string", "enum": ["Unsafe", "Writeback"]},
        },
    },
    "EntropyDevice": {"properties": {}},
    "Vsock": {
        "required": ["guest_cid", "uds_path"],
        "properties": {"guest_cid": {"type": "integer", "minimum": 3}, "uds_path": TEXT},
    },
    "InstanceActionInfo": {
        "required": ["action_type"],
        "properties": {
            "action_type": {
                "type": "string",
                "enum": ["FlushMetrics", "InstanceStart", "SendCtrlAltDel"],
            }
        },
    },
}
"""What the description said when it was read, for where it does not lie beside the repository."""

MACHINE = GuestMachine(
    "/disks/vmlinux",
    "/disks/archive",
    ("gpool.control=vsock",),
    (GuestDisk("system", "/disks/system", True), GuestDisk("work", "/work.img", False)),
    512,
    2,
)


def described() -> dict[str, Any]:
    if not DESCRIPTION.exists():
        return RECORDED
    return dict(yaml.safe_load(DESCRIPTION.read_text())["definitions"])


def check(path: str, document: object, definitions: Mapping[str, Any]) -> None:
    """As Firecracker does: the types, the required, and no field it does not know."""
    name = NAMES["/" + path.split("/")[1]]
    schema = dict(definitions[name]) | {"definitions": dict(definitions)}
    jsonschema_rs.validate(schema | {"additionalProperties": False}, document)


class FakeFirecracker:
    """Listens where Firecracker would, holds requests to the description and to the order, and dials as a guest would."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.definitions = described()
        self.told: list[str] = []
        self.started = asyncio.Event()
        self.closed = asyncio.Event()

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(self.answer, self.folder / api.API_NAME)

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, path, _ = head.split(" ", 2)
                length = int(head.lower().partition("content-length:")[2].split("\r\n")[0])
                refusal = self.refusal(method, path, json.loads(await reader.readexactly(length)))
                body = json.dumps({"fault_message": refusal}).encode() if refusal else b""
                code = "400 Bad Request" if refusal else "204 No Content"
                told = f"HTTP/1.1 {code}\r\nContent-Length: {len(body)}\r\n\r\n"
                writer.write(told.encode() + body)
                await writer.drain()
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
            self.closed.set()

    def refusal(self, method: str, path: str, document: Any) -> str:
        try:
            check(path, document, self.definitions)
        except (jsonschema_rs.ValidationError, KeyError) as wrong:
            return str(wrong)[:200]
        if method != "PUT":
            return f"{method} is not for {path}"
        if self.started.is_set():
            return "the instance was started: pre-boot only"
        if path == "/actions":
            if not {"/machine-config", "/boot-source"} <= set(self.told):
                return "there is nothing to boot"
            self.started.set()
        if path.startswith("/drives/") and path != f"/drives/{document['drive_id']}":
            return "path and body name different drives"
        self.told.append(path)
        return ""


def test_every_request_is_one_the_description_allows() -> None:
    definitions = described()
    for method, path, document in api.requests(MACHINE):
        assert method == "PUT"
        check(path, document, definitions)


def test_the_check_itself_refuses_what_is_not_described() -> None:
    definitions = described()
    for path, wrong in (
        ("/machine-config", {"vcpu_count": 33, "mem_size_mib": 1}),
        ("/machine-config", {"vcpu_count": 1}),
        ("/boot-source", {"kernel_image_path": "/k", "kernel": "/k"}),
        ("/vsock", {"guest_cid": 2, "uds_path": "/v"}),
        ("/actions", {"action_type": "Start"}),
    ):
        with pytest.raises(jsonschema_rs.ValidationError):
            check(path, wrong, definitions)


def test_what_was_recorded_is_what_the_description_says() -> None:
    definitions = described()
    for name, facts in RECORDED.items():
        said = definitions[name]
        assert sorted(said.get("required", [])) == sorted(facts.get("required", []))
        for field, kind in facts["properties"].items():
            for word, value in kind.items():
                assert said["properties"][field].get(word) == value, (name, field, word)


def test_the_disks_come_in_the_order_the_guest_mounts_them() -> None:
    told = [path for _, path, _ in api.requests(MACHINE)]
    assert told[0] == "/machine-config"
    assert [path for path in told if path.startswith("/drives/")] == [
        "/drives/system",
        "/drives/work",
    ]
    assert told[-1] == "/actions"


def test_a_guest_is_configured_started_and_talked_to_over_its_vsock(tmp_path: Path) -> None:
    async def work() -> tuple[list[str], bytes, int]:
        line = Firecracker("firecracker").open_line(tmp_path, os.geteuid())
        os.close(line.descriptor)  # as the launch does
        fake = FakeFirecracker(tmp_path / "vmm")
        async with await fake.serve():
            connecting = asyncio.create_task(line.connect(MACHINE, PATIENCE_S))
            await fake.started.wait()
            where = fake.folder / f"{api.VSOCK_NAME}_{guest.AGENT_PORT}"
            dialled = asyncio.create_task(asyncio.open_unix_connection(where))
            connection = await connecting
            reader, writer = await dialled
            with pytest.raises(OSError, match="refused"):
                await asyncio.open_unix_connection(
                    where
                )  # a second one, by the task: nobody listens any more
            out, out_end = os.pipe()
            err, err_end = os.pipe()
            talk = GuestConnection(connection, GuestPipes(out_end, err_end))

            async def play() -> None:
                for word in ({"word": "hello", "version": guest.VERSION}, {"word": "started"}):
                    body = json.dumps(word).encode()
                    writer.write(guest.HEAD.pack(len(body), guest.WORDS) + body)
                writer.write(guest.HEAD.pack(2, guest.OUT) + b"hi")
                body = b'{"word": "ended", "code": 4, "oom": false}'
                writer.write(guest.HEAD.pack(len(body), guest.WORDS) + body)
                await writer.drain()
                await reader.read(65536)

            playing = asyncio.create_task(play())
            await talk.open(60)
            await talk.begin({"argv": ["true"]}, (), 60)
            exit = await talk.over
            await playing
            said = os.read(out, 100)
            await talk.close()
            writer.close()
            await writer.wait_closed()
            await fake.closed.wait()
            os.close(out)
            os.close(err)
            return fake.told, said, exit.code

    told, said, code = within(work())
    assert told == [path for _, path, _ in api.requests(MACHINE)]
    assert (said, code) == (b"hi", 4)


def test_a_request_that_is_refused_is_named(tmp_path: Path) -> None:
    async def work() -> None:
        fake = FakeFirecracker(tmp_path)
        async with await fake.serve():
            try:
                begin = [("PUT", "/actions", {"action_type": "InstanceStart"})]
                await api.configure(tmp_path, os.geteuid(), begin, PATIENCE_S)
            finally:
                await fake.closed.wait()

    with pytest.raises(SandboxFailed, match=r"refused /actions with 400: .*nothing to boot"):
        within(work())


def test_a_link_where_its_socket_should_be_is_not_followed(tmp_path: Path) -> None:
    async def work() -> None:
        real = tmp_path / "real"
        real.mkdir()
        async with await FakeFirecracker(real).serve():
            (tmp_path / api.API_NAME).symlink_to(real / api.API_NAME)
            made = api.requests(MACHINE)
            await api.configure(tmp_path, os.geteuid(), made, PATIENCE_S)

    with pytest.raises(SandboxFailed, match="not its own"):
        within(work())


def test_a_firecracker_that_never_answers_is_given_up(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match="did not answer"):
        within(api.configure(tmp_path, os.geteuid(), api.requests(MACHINE), 0.05))
