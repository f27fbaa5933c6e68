"""Private container engines for tests: a real dockerd or Podman service in a directory of its own, and an image for it.

Nothing is pulled: the image is a tar of this machine's own Python, a few programs and their libraries, made once a
process and imported. An engine ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
import docker  # type: ignore[import-untyped]

import gpool
from tests.leftovers import engine_prefix

IMAGE = "gpool-test/python:latest"
BARE_IMAGE = "gpool-test/bare:latest"
READY_WITHIN_S = 400.0
PROGRAMS = [
    "sh",
    "cat",
    "echo",
    "env",
    "false",
    "head",
    "id",
    "kill",
    "ls",
    "mkdir",
    "mknod",
    "mount",
    "printf",
    "pwd",
    "readlink",
    "rm",
    "setsid",
]
PROGRAMS += ["seq", "sleep", "sort", "stat", "tail", "touch", "true", "uname", "wc"]
LEFT_OUT = {"site-packages", "test", "idlelib", "tkinter", "lib2to3", "ensurepip"}
LEFT_OUT |= {"pydoc_data", "distutils", "turtledemo"}
LEFT_OUT_FILES = re.compile(r"\.a$|\.opt-\d\.pyc$|/_(tkinter|test)[^/]*\.so$")
LIBRARY = re.compile(r"(/\S+) \(0x")
ULIMITS = "1024:1024"  # this machine's own hard limits may be lower than Podman's wish
DIE_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)\n"
    "os.execvp(sys.argv[1], sys.argv[1:])"
)
SOURCE = Path(gpool.__file__).resolve().parent
Kept = Callable[[tarfile.TarInfo], tarfile.TarInfo | None]


@dataclass(frozen=True, slots=True)
class PrivateEngine:
    """An engine that listens at `address`; `images` are imported already."""

    kind: str
    address: str
    root: Path
    pid: int


def _program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        raise FileNotFoundError(name)
    return found


def _libraries(program: Path) -> set[str]:
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False)
    return set(LIBRARY.findall(said.stdout))


def _kept(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    parts = set(Path(info.name).parts)
    return None if parts & LEFT_OUT or LEFT_OUT_FILES.search(info.name) else info


def _kept_package(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return None if "__pycache__" in Path(info.name).parts else info


def _add_programs(tar: tarfile.TarFile, names: list[str]) -> set[str]:
    """The programs beneath /bin; what they need of libraries is returned."""
    needed: set[str] = set()
    for name in names:
        path = Path(_program(name)).resolve()
        tar.add(path, f"bin/{name}", filter=_kept)
        needed |= _libraries(path)
    return needed


def _add_libraries(tar: tarfile.TarFile, needed: set[str]) -> None:
    for path in sorted(needed):
        tar.add(Path(path).resolve(), path.lstrip("/"), filter=_kept)


def _add_tree(tar: tarfile.TarFile, path: Path, name: str, kept: Kept) -> None:
    """Without what comes and goes meanwhile: other processes write the modules they compile under passing names."""
    try:
        info = tar.gettarinfo(path, name)
        below = sorted(os.listdir(path)) if info.isdir() else []
        with open(path, "rb") if info.isreg() else contextlib.nullcontext() as file:
            if file is not None:
                info = tar.gettarinfo(arcname=name, fileobj=file)  # what it is once it is held
            if kept(info) is None:
                return
            tar.addfile(info, file)
    except FileNotFoundError:
        return
    for each in below:
        _add_tree(tar, path / each, f"{name}/{each}", kept)


def _add_link(tar: tarfile.TarFile, name: str, target: str) -> None:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = tarfile.SYMTYPE, target
    tar.addfile(info)


def _add_text(tar: tarfile.TarFile, name: str, text: str) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(text), 0o644
    tar.addfile(info, io.BytesIO(text.encode()))


def _write_bare(file: Path) -> None:
    with tarfile.open(file, "w") as tar:
        _add_libraries(tar, _add_programs(tar, PROGRAMS))


def _write_python(file: Path) -> None:
    base = Path(sys.base_prefix).resolve()
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = base / "lib" / minor
    with tarfile.open(file, "w") as tar:
        needed = _add_programs(tar, PROGRAMS) | _libraries(base / "bin" / minor)
        for extension in (library / "lib-dynload").glob("*.so"):
            if not LEFT_OUT_FILES.search(str(extension)):
                needed |= _libraries(extension)
        tar.add(base / "bin" / minor, f"usr/local/bin/{minor}", filter=_kept)
        for name in ("python", "python3"):
            _add_link(tar, f"usr/local/bin/{name}", minor)
        _add_tree(tar, library, f"usr/local/lib/{minor}", _kept)
        for folder in ("site-packages", "dist-packages"):  # Debian's own Python looks in the second
            packages = f"usr/local/lib/{minor}/{folder}"
            source = Path(cloudpickle.__file__).parent
            _add_tree(tar, source, f"{packages}/cloudpickle", _kept_package)
            _add_tree(tar, SOURCE, f"{packages}/gpool", _kept_package)
        _add_text(tar, "etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
        # where the loader looks without a cache
        own = {path for path in needed if path.startswith(str(base))}
        _add_libraries(tar, needed - own)
        for path in own:
            tar.add(Path(path).resolve(), f"usr/lib/{Path(path).name}", filter=_kept)


_WRITERS: Mapping[str, Callable[[Path], None]] = {IMAGE: _write_python, BARE_IMAGE: _write_bare}


@functools.cache
def image_tar(name: str) -> Path:
    """The image as a tar, made once a machine and interpreter; several test processes share it."""
    key = f"{name}{sys.version}{SOURCE}{os.geteuid()}".encode()
    folder = Path(tempfile.gettempdir()) / f"gpool-images-{os.geteuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    newest = max(int(path.stat().st_mtime_ns) for path in (SOURCE / "__init__.py", Path(__file__)))
    file = folder / (hashlib.sha256(key + str(newest).encode()).hexdigest()[:16] + ".tar")
    if not file.exists():
        unfinished = file.with_suffix(f".{os.getpid()}")
        _WRITERS[name](unfinished)
        unfinished.rename(file)
    return file


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as channel:
        try:
            channel.connect(str(path))
            channel.sendall(b"GET /_ping HTTP/1.0\r\nHost: engine\r\n\r\n")
            return b"200" in channel.recv(64)
        except OSError:
            return False


def _docker(root: Path) -> list[str]:
    settings: dict[str, object] = {}
    runsc = shutil.which("runsc")
    if runsc:
        platform = ["--platform=ptrace", "--network=none"]
        settings["runtimes"] = {"runsc": {"path": runsc, "runtimeArgs": platform}}
    (root / "daemon.json").write_text(json.dumps(settings))
    words = [_program("dockerd"), "--config-file", str(root / "daemon.json")]
    words += ["--data-root", str(root / "data"), "--exec-root", str(root / "exec")]
    words += ["--pidfile", str(root / "pid"), "-H", f"unix://{root / 'socket'}"]
    words += ["--iptables=false", "--ip6tables=false", "--ip-forward=false", "--bridge=none"]
    return [*words, "--storage-driver", "overlay2", "--cgroup-parent", f"gpool-{root.name}"]


def _podman(root: Path) -> list[str]:
    # crun fails on hybrid control groups; runc works
    words = [_program("podman"), "--root", str(root / "data"), "--runroot", str(root / "run")]
    words += ["--tmpdir", str(root / "tmp"), "--runtime", "runc", "--cgroup-manager", "cgroupfs"]
    words += ["--storage-driver", "overlay", "--events-backend", "file"]
    return [*words, "system", "service", "--time", "0", f"unix://{root / 'socket'}"]


def _podman_settings(root: Path) -> Path:
    file = root / "containers.conf"
    limits = [f"nofile={ULIMITS}", f"nproc={ULIMITS}"]
    file.write_text(
        f'[containers]\ndefault_ulimits = {json.dumps(limits)}\n[engine]\nlock_type = "file"\n'
    )
    return file


def _short_folder() -> Path:
    """A socket's path must stay under 108 letters, which a test's own directory may not."""
    return Path(tempfile.mkdtemp(prefix=engine_prefix()))


@contextlib.contextmanager
def engine(kind: str) -> Iterator[PrivateEngine]:
    """`docker` or `podman`; with both images imported."""
    root = _short_folder()
    environ = {"PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin", "HOME": str(root)}
    if kind == "podman":
        words = _podman(root)
        environ["CONTAINERS_CONF"] = str(_podman_settings(root))
    else:
        words = _docker(root)
    with (root / "log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-c", DIE_WITH_PARENT, *words],
            stdout=log,
            stderr=log,
            env=environ,
            cwd=root,  # conmon leaves a file `oom` in its working directory
            start_new_session=True,
        )
    try:
        waiting = threading.Event()
        for _ in range(int(READY_WITHIN_S / 0.05)):
            if _answers(root / "socket") or child.poll() is not None:
                break
            waiting.wait(0.05)
        if child.poll() is not None or not _answers(root / "socket"):
            raise RuntimeError(f"{kind} did not start: {(root / 'log').read_text()[-2000:]}")
        made = PrivateEngine(kind, f"unix://{root / 'socket'}", root, child.pid)
        for name in _WRITERS:
            import_image(made, image_tar(name), name)
        yield made
    finally:
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(60)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        _clear_away(root)


def import_image(made: PrivateEngine, file: Path, name: str, *changes: str) -> None:
    """What `docker import` does, with the same client for both engines."""
    repository, _, tag = name.rpartition(":")
    with docker_client(made) as api:
        api.import_image(str(file), repository=repository, tag=tag, changes=list(changes))


@contextlib.contextmanager
def docker_client(made: PrivateEngine) -> Iterator[Any]:
    api = docker.APIClient(base_url=made.address, version="auto", timeout=300)
    try:
        yield api
    finally:
        api.close()


def _clear_away(root: Path) -> None:
    """What an engine left behind: processes that name its directory, mounts (deepest first), the directory."""
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError, ValueError):
            if f"{root}/".encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                os.kill(int(name), signal.SIGKILL)
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    for mount in sorted((m for m in mounts if m.startswith(str(root) + "/")), reverse=True):
        subprocess.run(["umount", "-l", mount], capture_output=True, check=False)
    for group in Path("/sys/fs/cgroup").glob("*/libpod_parent"):
        with contextlib.suppress(OSError):  # in use by another Podman
            group.rmdir()
    for top, _, _ in os.walk("/sys/fs/cgroup", topdown=False):  # children first
        if f"/gpool-{root.name}" in top:
            with contextlib.suppress(OSError):  # a killed process is still in it
                os.rmdir(top)
    shutil.rmtree(root, ignore_errors=True)


_shared: dict[str, PrivateEngine] = {}
_held = contextlib.ExitStack()


def _variable(kind: str) -> str:
    return "GPOOL_TEST_ENGINE_" + kind.upper().replace(" ", "_")


def shared_engine(kind: str) -> PrivateEngine:
    """One of each kind for this process, started when first asked for; `end_shared` ends them, at the latest the process's end.

    A test's own child process is given its parent's by `GPOOL_TEST_ENGINE_<KIND>`.
    """
    variable = _variable(kind)
    given = os.environ.get(variable)
    if given:
        return PrivateEngine(kind, given, Path(given.removeprefix("unix://")).parent, 0)
    if kind not in _shared:
        if not _shared:
            atexit.register(end_shared)
        _shared[kind] = _held.enter_context(engine(kind))
        os.environ[variable] = _shared[kind].address
    return _shared[kind]


def end_shared() -> None:
    """Before a worker says that it is done: pytest-xdist gives it ten seconds from then on, and engines may take longer."""
    for kind in [*_shared]:
        del _shared[kind]
        os.environ.pop(_variable(kind), None)
    _held.close()
