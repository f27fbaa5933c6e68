"""The host files of a guest's system disk. Writes nothing.

All of `/usr` would be gigabytes that change with every upgrade. With dpkg, a guest gets the packages that Debian marks
essential, required or important, some that tasks expect, and dependencies; else `/usr` without documentation.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

EXPECTED = [
    "bzip2",
    "ca-certificates",
    "curl",
    "diffutils",
    "file",
    "findutils",
    "git",
    "less",
    "libgomp1",
    "libstdc++6",
    "make",
    "openssl",
    "patch",
    "perl-base",
    "procps",
    "psmisc",
    "rsync",
    "time",
    "tree",
    "unzip",
    "wget",
    "xz-utils",
    "zip",
    "zlib1g",
    "zstd",
]
UNNEEDED = (
    "/usr/share/doc/",
    "/usr/share/doc-base/",
    "/usr/share/man/",
    "/usr/share/info/",
    "/usr/share/locale/",
    "/usr/share/lintian/",
    "/usr/share/bug/",
    "/usr/src/",
    "/usr/lib/modules/",
    "/usr/lib/debug/",
    "/usr/lib/systemd/",
    "/usr/lib/udev/",
    "/usr/lib/firmware/",
)
DPKG = Path("/var/lib/dpkg")
_FIELD = re.compile(r"^(Package|Status|Essential|Priority|Depends|Pre-Depends|Provides): (.*)$")


@dataclass(frozen=True, slots=True)
class DebianPackage:
    name: str
    always: bool  # essential, required or important
    needs: tuple[tuple[str, ...], ...]  # alternatives of each dependency
    provides: tuple[str, ...]


def packages(status: str) -> dict[str, DebianPackage]:
    found = {}
    for paragraph in status.split("\n\n"):
        fields: dict[str, str] = {
            match[1]: match[2] for line in paragraph.splitlines() if (match := _FIELD.match(line))
        }
        if not fields.get("Status", "").endswith(" installed"):
            continue
        always = fields.get("Essential") == "yes" or fields.get("Priority") in (
            "required",
            "important",
        )
        wanted = [fields[name] for name in ("Depends", "Pre-Depends") if name in fields]
        needs = tuple(
            tuple(_bare(one) for one in choice.split("|"))
            for choice in ",".join(wanted).split(",")
            if choice.strip()
        )
        provides = tuple(_bare(one) for one in fields.get("Provides", "").split(",") if one.strip())
        found[fields["Package"]] = DebianPackage(fields["Package"], always, needs, provides)
    return found


def _bare(word: str) -> str:
    return re.split(r"[\s:(\[]", word.strip(), maxsplit=1)[0]


def closure(known: Mapping[str, DebianPackage], expected: Iterable[str]) -> list[str]:
    providers = {name: package.name for package in known.values() for name in package.provides}
    pending = [package.name for package in known.values() if package.always]
    pending += [name for name in expected if name in known]
    chosen: set[str] = set()
    while pending:
        name = pending.pop()
        if name in chosen:
            continue
        chosen.add(name)
        for choice in known[name].needs:
            for one in choice:
                installed = one if one in known else providers.get(one)
                if installed is not None:
                    pending.append(installed)
                    break
    return sorted(chosen)


def _unneeded(path: str) -> bool:
    return path.startswith(UNNEEDED)


def system_files(expected: Iterable[str] = (), dpkg: Path = DPKG) -> list[str]:
    try:
        known = packages((dpkg / "status").read_text())
    except FileNotFoundError:
        found = []
        for folder, _, names in os.walk("/usr"):
            if not _unneeded(folder + "/"):
                found += [f"{folder}/{name}" for name in names]
        return sorted(found)
    chosen = closure(known, (*EXPECTED, *expected))
    resolved: dict[str, str] = {}
    paths = set()
    for name in chosen:
        for listing in (*dpkg.glob(f"info/{name}.list"), *dpkg.glob(f"info/{name}:*.list")):
            for path in listing.read_text().splitlines():
                folder, _, last = path.rpartition("/")
                if folder not in resolved:  # dpkg lists /bin, a link to /usr/bin
                    resolved[folder] = os.path.realpath(folder)
                real = f"{resolved[folder]}/{last}"
                if real.startswith("/usr/") and not _unneeded(real):
                    paths.add(real)
    return sorted(
        path
        for path in paths
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path))
    )


def linked_with(programs: Iterable[Path]) -> list[str]:
    words = [str(program) for program in programs]
    if not words:
        return []
    ran = subprocess.run(
        ["ldd", *words], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}, check=False
    )
    found = set()
    for asked in re.findall(r"=> (/\S+) \(0x", ran.stdout):
        folder, _, last = asked.rpartition("/")
        named = f"{os.path.realpath(folder)}/{last}"
        found |= {path for path in (named, os.path.realpath(named)) if path.startswith("/usr/")}
    return sorted(found)
