"""Plants what a task must not find: secrets in every place an agent and its host keep something, gone afterwards."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

libc = ctypes.CDLL(None, use_errno=True)
PREFIX = "gpool-planted-"
HOME_FILES = (
    ".ssh/id_ed25519",
    ".aws/credentials",
    ".netrc",
    ".config/gpool/profile.toml",
    ".bash_history",
    ".docker/config.json",
    ".kube/config",
    ".pgpass",
    ".git-credentials",
    ".gnupg/private-keys-v1.d/key",
)
AGENT_FILES = (
    "node.key",
    "agent.toml",
    "leases.json",
    "cache/artifact",
    "agent.sqlite",
    "agent.log",
    "agent.lock",
)
SHARED_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
HOST_FOLDERS = ("/run", "/var/lib", "/root", "/srv", "/opt", "/etc", "/home", "/var/log")
NAMED_VARIABLES = ("GPOOL_TOKEN", "AWS_SECRET_ACCESS_KEY", "DATABASE_URL", "PGPASSWORD")


def token() -> str:
    return PREFIX + secrets.token_hex(12)


@dataclass(slots=True)
class Plants:
    """`words` says where each secret lies; `known` is what the attacks are told, so that they can prove reach."""

    words: dict[str, str] = field(default_factory=dict)
    known: dict[str, Any] = field(default_factory=dict)
    roots: set[str] = field(default_factory=set)
    held: list[object] = field(default_factory=list)  # what must live as long as the plants

    def new(self, where: str) -> str:
        self.words[where] = made = token()
        return made


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    held = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
    with os.fdopen(held, "w") as file:
        file.write(text)


def plant_files(plants: Plants, base: Path, cleaning: contextlib.ExitStack) -> None:
    secret = plants.known["secret"]
    files: dict[str, str] = {}
    for name in (*(f"home/{name}" for name in HOME_FILES), *(f"agent/{n}" for n in AGENT_FILES)):
        write(base / name, f"{plants.new(name)} {secret}\n")
    for short, name in {
        "ssh": "home/.ssh/id_ed25519",
        "cloud": "home/.aws/credentials",
        "key": "agent/node.key",
        "settings": "agent/agent.toml",
        "lease": "agent/leases.json",
        "open": "agent/agent.lock",
    }.items():
        files[short] = str(base / name)
    marker = "marker-" + secrets.token_hex(8)
    for folder in (*SHARED_FOLDERS, *HOST_FOLDERS):
        if not os.access(folder, os.W_OK):
            continue
        path = Path(folder) / f".{PREFIX}{secrets.token_hex(4)}"
        write(path, f"{plants.new('file in ' + folder)} {secret}\n")
        cleaning.callback(path.unlink)
        plants.roots.add(str(path))
        files[
            {"/tmp": "tmp", "/dev/shm": "shm", "/run": "run", "/var/lib": "var"}.get(folder, folder)
        ] = str(path)
        if folder == "/root":
            plants.known["in root's home"] = path.name
    odd = base / "odd"
    odd.mkdir(mode=0o700)
    (odd / plants.new("a file's name")).touch()
    (odd / "link").symlink_to("/" + plants.new("a link's target"))
    write(odd / "attributes", "x")
    with contextlib.suppress(OSError):
        os.setxattr(odd / "attributes", "user.note", plants.new("an attribute").encode())
    with (odd / "sparse").open("wb") as sparse:
        sparse.seek(1 << 19)
        sparse.write(plants.new("the end of a sparse file").encode())
    (odd / "nothing for anybody").write_text(plants.new("a file without rights"))
    (odd / "nothing for anybody").chmod(0 if os.geteuid() == 0 else 0o400)
    write(base / "cwd" / marker, plants.new("the working directory"))
    facts = os.stat(files["key"])
    plants.known |= {
        "files": files,
        "marker": marker,
        "facts": {"ino": facts.st_ino, "dev": facts.st_dev},
    }
    plants.roots.add(str(base))


def plant_descriptors(plants: Plants, base: Path) -> None:
    held = os.open(plants.known["files"]["open"], os.O_RDONLY)
    os.set_inheritable(held, True)
    plants.known["descriptor"] = held
    with tempfile.TemporaryFile(dir=base) as file:
        file.write(plants.new("a file that has no name").encode())
        file.flush()
        deleted = os.dup(file.fileno())
    os.set_inheritable(deleted, True)
    directory = os.open(base / "cwd", os.O_RDONLY | os.O_DIRECTORY)
    os.set_inheritable(directory, True)
    memory = os.memfd_create("note")
    os.write(memory, plants.new("a memory file").encode())
    out, into = os.pipe()
    os.write(into, plants.new("a pipe").encode())
    os.chdir(base / "cwd")
    plants.held += [held, deleted, directory, memory, out, into]


def plant_memory(plants: Plants) -> None:
    secret = plants.known["secret"].encode()
    kept = ctypes.create_string_buffer(secret)
    page = mmap.mmap(-1, mmap.PAGESIZE)
    page.write(plants.new("a page of the agent's").encode())
    plants.held += [
        kept,
        page,
        ctypes.create_string_buffer(plants.new("the agent's heap").encode()),
    ]
    mapped = open(plants.known["files"]["lease"], "rb")  # noqa: SIM115 - it stays open
    plants.held += [mapped, mmap.mmap(mapped.fileno(), 0, prot=mmap.PROT_READ)]
    plants.known |= {"address": ctypes.addressof(kept), "pid": os.getpid(), "mapped": mapped.name}


def answer(listening: socket.socket, word: bytes) -> None:
    def serve() -> None:
        while True:
            try:
                dialled, _ = listening.accept()
            except OSError:
                return
            # A caller that leaves before it reads must not end the service for the callers after it.
            with dialled, contextlib.suppress(OSError):
                dialled.sendall(word)

    threading.Thread(target=serve, daemon=True).start()


def plant_sockets(plants: Plants, base: Path) -> None:
    abstract = secrets.token_hex(8)
    for where, family, address in (
        ("a unix socket", socket.AF_UNIX, str(base / "socket")),
        ("an engine's socket", socket.AF_UNIX, str(base / "docker.sock")),
        ("an abstract socket", socket.AF_UNIX, "\0" + abstract),
        ("a service on the loopback", socket.AF_INET, ("127.0.0.1", 0)),
        ("a service on the IPv6 loopback", socket.AF_INET6, ("::1", 0)),
    ):
        listening = socket.socket(family)
        listening.bind(address)
        listening.listen(64)
        answer(listening, plants.new(where).encode())
        plants.held.append(listening)
    plants.known |= {
        "socket": str(base / "socket"),
        "engine": str(base / "docker.sock"),
        "abstract": abstract,
    }


def plant_ipc(plants: Plants, cleaning: contextlib.ExitStack) -> None:
    key = secrets.randbelow(1 << 30) + 1
    libc.shmat.restype = ctypes.c_void_p
    segment = libc.shmget(key, 4096, 0o1666)
    ctypes.memmove(
        libc.shmat(segment, None, 0),
        (plants.known["secret"] + plants.new("a shared segment")).encode(),
        90,
    )
    cleaning.callback(libc.shmctl, segment, 0, None)
    queue = libc.msgget(key, 0o1666)
    text = plants.new("a message in a queue").encode()
    message = (1).to_bytes(8, "little") + text
    libc.msgsnd(queue, message, len(text), 0)
    cleaning.callback(libc.msgctl, queue, 0, None)
    plants.known["segment"] = key


def plant_keys(plants: Plants, cleaning: contextlib.ExitStack) -> None:
    """In a session keyring of our own and in the user's."""
    libc.syscall(250, 1, None)
    libc.syscall(
        250, 8, ctypes.c_long(-4), ctypes.c_long(-3)
    )  # as a login does: whoever has one has both
    name = secrets.token_hex(8)
    for ring, where in ((-3, "the session keyring"), (-4, "the user keyring")):
        text = (plants.known["secret"] + plants.new(where)).encode()
        key = libc.syscall(
            248, b"user\0", name.encode() + b"\0", text, len(text), ctypes.c_long(ring)
        )
        if key < 0:
            del plants.words[where]
            continue
        libc.syscall(250, 5, key, ctypes.c_long(0x3F3F3F3F))  # even with every right to it
        cleaning.callback(libc.syscall, 250, 9, key, ctypes.c_long(ring))
    plants.known["key name"] = name


@contextlib.contextmanager
def planted(base: Path, plants: Plants) -> Iterator[Plants]:
    """In this process and around it; what was given to it at its start is told by `plants` already."""
    plants.known["secret"] = secrets.token_hex(16)
    with contextlib.ExitStack() as cleaning:
        plant_files(plants, base, cleaning)
        plant_descriptors(plants, base)
        plant_memory(plants)
        plant_sockets(plants, base)
        plant_ipc(plants, cleaning)
        plant_keys(plants, cleaning)
        yield plants
