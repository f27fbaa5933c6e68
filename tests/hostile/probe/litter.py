"""Outputs as a hostile task leaves them, each in a folder of its own; and processes that change them while they are taken.

litter.py leave '{"secret": PATH, "group": ""}'      makes every case of a group beneath o/, then ends
litter.py change '{"secret": PATH}'     keeps changing what lies beneath r/, until it is killed
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import io
import json
import os
import signal
import socket
import stat
import sys
import tarfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass

REFUSED, TAKEN, EITHER = "refused", "taken", "either"
SECRET = {"path": "/etc/shadow"}
TERABYTE = 1 << 40


@dataclass(frozen=True, slots=True)
class Case:
    """`wanted` is asked for beneath the case's folder; "" for the folder itself."""

    make: Callable[[], object]
    wanted: str = "out"
    becomes: str = REFUSED
    group: str = ""
    """"deep": a watchdog may end the task that makes it, which is a refusal too."""


def link(target: str, name: str = "out") -> Callable[[], None]:
    return lambda: os.symlink(target, name)


def file(name: str | bytes = "out", data: bytes = b"x") -> None:
    with open(name, "wb") as made:
        made.write(data)


def named(*names: str | bytes) -> Callable[[], None]:
    def make() -> None:
        os.mkdir("d")
        for name in names:
            held = os.open(
                b"d/" + (name if isinstance(name, bytes) else name.encode()),
                os.O_CREAT | os.O_WRONLY,
                0o644,
            )
            os.write(held, b"x")
            os.close(held)

    return make


def in_folder(act: Callable[[], object]) -> Callable[[], None]:
    def make() -> None:
        os.mkdir("d")
        os.chdir("d")
        act()

    return make


def chain() -> None:
    file("0")
    for number in range(60):
        os.symlink(str(number), str(number + 1))
    os.rename("60", "out")


def long_chain() -> None:
    """Each link's target is close to the longest path there is."""
    os.mkdir("a")
    for number in range(20):
        os.symlink("a/../" * 800 + f"{number}", f"{number + 1}")
    os.rename("20", "out")


def make_socket() -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind("out")


def device(kind: int, numbers: tuple[int, int]) -> Callable[[], None]:
    def make() -> None:
        with contextlib.suppress(OSError):
            os.mknod("out", kind | 0o666, os.makedev(*numbers))

    return make


def waiting_fifo(flags: int) -> Callable[[], None]:
    def make() -> None:
        os.mkfifo("out")
        if os.fork() == 0:
            os.open("out", flags)
            signal.pause()

    return make


def deep(levels: int, name: str) -> Callable[[], None]:
    def make() -> None:
        os.mkdir("d")
        os.chdir("d")
        for _ in range(levels):
            os.mkdir(name)
            os.chdir(name)
        file()

    return make


def many() -> None:
    os.mkdir("d")
    for number in range(10_050):
        os.close(os.open(f"d/{number}", os.O_CREAT | os.O_WRONLY))


def huge(size: int) -> Callable[[], None]:
    """A hole as large as it gets."""

    def make() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with open("out", "wb") as hole:
            for each in (size, size >> 4, 72 << 20):
                try:
                    hole.truncate(each)
                except OSError:
                    continue
                return

    return make


def two_holes() -> None:
    os.mkdir("d")
    for name in ("d/a", "d/b"):
        with open(name, "wb") as hole:
            hole.truncate(72 << 20)


def rights(mode: int, *, folder: bool) -> Callable[[], None]:
    def make() -> None:
        os.mkdir("d")
        file("d/out")
        os.chmod("d" if folder else "d/out", mode)

    return make


def zip_bomb() -> None:
    with zipfile.ZipFile("out", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("big", bytes(8 << 20))


def gzip_bomb() -> None:
    file("out", gzip.compress(bytes(8 << 20)))


def tar_with(info: tarfile.TarInfo, data: bytes = b"") -> Callable[[], None]:
    def make() -> None:
        info.size = len(data)
        with tarfile.open("out", "w") as archive:
            archive.addfile(info, io.BytesIO(data))

    return make


def tar_link() -> tarfile.TarInfo:
    info = tarfile.TarInfo("x")
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/shadow"
    return info


def lease() -> None:
    """Whoever opens it waits until we let go, or for forty-five seconds."""
    file()
    if os.fork() == 0:
        signal.signal(signal.SIGIO, signal.SIG_IGN)
        held = os.open("out", os.O_RDWR)
        with contextlib.suppress(OSError):
            fcntl.fcntl(held, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        signal.pause()


def attributes() -> None:
    file()
    with contextlib.suppress(OSError):
        os.setxattr("out", "user.note", b"x" * 2000)


PICKLE = b"cos\nsystem\n(S'touch /tmp/ran'\ntR."
BIDI = ("\u202e", "\u202a", "\u2066", "\u200f", "\u061c")

LEFT: dict[str, Case] = {
    "link to a host file": Case(lambda: os.symlink(SECRET["path"], "out")),
    "link to the shadow file": Case(link("/etc/shadow")),
    "link to its own variables": Case(link("/proc/self/environ")),
    "link to another's variables": Case(link("/proc/1/environ")),
    "link to an endless device": Case(link("/dev/zero")),
    "link to standard input": Case(link("/dev/stdin")),
    "link upwards": Case(link("../../../../../../../../etc/passwd")),
    "link to nothing": Case(link("nowhere")),
    "link to itself": Case(link("out")),
    "chain of links": Case(chain),
    "chain past the longest path": Case(long_chain),
    "link to an own file": Case(lambda: (file("other"), os.symlink("other", "out"))),
    "link to a host folder": Case(
        lambda: os.symlink(os.path.dirname(SECRET["path"]), "out"), "out/"
    ),
    "link to the root": Case(link("/"), "out/"),
    "link in the middle": Case(
        lambda: os.symlink(os.path.dirname(SECRET["path"]), "m"), "m/node.key"
    ),
    "link within a folder": Case(in_folder(link("/etc/shadow")), "d/"),
    "link deep within a folder": Case(
        lambda: (os.makedirs("d/e/f"), os.symlink("/etc", "d/e/f/g")), "d/"
    ),
    "link to an open file": Case(link("/proc/self/fd/1")),
    "link through a process's root": Case(link("/proc/1/root/etc/passwd")),
    "link through a process's cwd": Case(link("/proc/self/cwd/x")),
    "link to a folder as a file": Case(link("/etc")),
    "link whose target has lines": Case(link("a\nb\x1b[2J")),
    "two names of one file": Case(
        lambda: (os.mkdir("d"), file("d/a"), os.link("d/a", "d/b")), "d/", TAKEN
    ),
    "hard link to a system file": Case(lambda: _try_link("/usr/bin/env")),
    "hard link to a program's settings": Case(lambda: _try_link("/etc/passwd")),
    "fifo": Case(lambda: os.mkfifo("out")),
    "fifo in a folder": Case(in_folder(lambda: os.mkfifo("out")), "d/"),
    "fifo with a writer": Case(waiting_fifo(os.O_WRONLY)),
    "fifo with a reader": Case(waiting_fifo(os.O_RDONLY)),
    "socket": Case(make_socket),
    "socket in a folder": Case(in_folder(make_socket), "d/"),
    "character device": Case(device(stat.S_IFCHR, (1, 5))),
    "block device": Case(device(stat.S_IFBLK, (254, 0))),
    "whiteout": Case(device(stat.S_IFCHR, (0, 0))),
    "folder as a file": Case(lambda: os.mkdir("out")),
    "file as a folder": Case(file, "out/"),
    "file in the middle": Case(file, "out/x"),
    "nothing": Case(lambda: None),
    "nothing, among hostile names": Case(
        lambda: [file(n) for n in (b"\xff", b"a\x1b[2Jb", "\u202e".encode())]
    ),
    "name with a line end": Case(named("a\nb"), "d/"),
    "name with a carriage return": Case(named("a\rb"), "d/"),
    "name with a tab": Case(named("a\tb"), "d/"),
    "name with an escape": Case(named("a\x1b]52;c;eA==\x07"), "d/"),
    "name with a delete": Case(named("a\x7fb"), "d/"),
    "name with a C1 control": Case(named("a\x9bb"), "d/"),
    **{f"name with U+{ord(mark):04X}": Case(named(f"a{mark}b"), "d/") for mark in BIDI},
    "name with a joiner": Case(named("a\u200db"), "d/"),
    "name with a line separator": Case(named("a\u2028b"), "d/"),
    "name that is not UTF-8": Case(named(b"\xff\xfe"), "d/"),
    "name in overlong UTF-8": Case(named(b"..\xc0\xafetc"), "d/"),
    "name of surrogates": Case(named(b"\xed\xa0\x80"), "d/"),
    "folder that is not UTF-8": Case(in_folder(lambda: (os.mkdir(b"\xff"), file(b"\xff/x"))), "d/"),
    "name of 255 bytes": Case(named("x" * 255), "d/", TAKEN),
    "name of 255 bytes in four each": Case(named("\U0001f600" * 63), "d/", TAKEN),
    "name of dots": Case(named("...", ".. ", " .."), "d/", TAKEN),
    "name with a backslash": Case(named("..\\..\\x"), "d/", EITHER),
    "name of a drive": Case(named("C:x", "CON", "aux.txt"), "d/", EITHER),
    "names that differ in case": Case(named("Model", "model"), "d/"),
    "names that differ in composition": Case(named("\u00e9", "e\u0301"), "d/"),
    "names that fold to more letters": Case(named("stra\u00dfe", "STRASSE"), "d/"),
    "folders that differ in case": Case(
        lambda: (os.makedirs("d/A"), os.makedirs("d/a"), file("d/A/x"), file("d/a/x")), "d/"
    ),
    "name that looks like an option": Case(named("-rf", "--help"), "d/", TAKEN),
    "name for a shell": Case(named("$(id)", "`id`", "a;b", "a'b\"c"), "d/", TAKEN),
    "name for a page": Case(named("<script>alert(1)<"), "d/", TAKEN),
    "name for a table": Case(named("=cmd()", "+1", "@x"), "d/", TAKEN),
    "name for a format": Case(named("%s%n{0}{x.y}"), "d/", TAKEN),
    "name of a file of the collector's": Case(
        named("collecting-0011223344556677", "0" * 64), "d/", TAKEN
    ),
    "folder too deep for a path": Case(deep(300, "abcdef"), "d/", group="deep"),
    "folder deeper than a program's stack": Case(deep(1500, "d"), "d/", group="deep"),
    "folder past the longest path": Case(deep(3000, "dd"), "d/", group="deep"),
    "more files than allowed": Case(many, "d/", group="deep"),
    "hole of a terabyte": Case(huge(TERABYTE), becomes=EITHER),
    "two holes over the limit": Case(two_holes, "d/"),
    "file without rights": Case(rights(0, folder=False), "d/", TAKEN),
    "folder without rights": Case(rights(0, folder=True), "d/", TAKEN),
    "folder that cannot be listed": Case(rights(0o311, folder=True), "d/", TAKEN),
    "file that would be root's": Case(rights(0o6755, folder=False), "d/", TAKEN),
    "empty folder": Case(lambda: os.mkdir("d"), "d/", TAKEN),
    "empty file": Case(lambda: file(data=b""), becomes=TAKEN),
    "zip bomb": Case(zip_bomb, becomes=TAKEN),
    "gzip bomb": Case(gzip_bomb, becomes=TAKEN),
    "archive that climbs": Case(tar_with(tarfile.TarInfo("../../../tmp/x"), b"x"), becomes=TAKEN),
    "archive with an absolute name": Case(tar_with(tarfile.TarInfo("/tmp/x"), b"x"), becomes=TAKEN),
    "archive with a link": Case(tar_with(tar_link()), becomes=TAKEN),
    "pickle that runs code": Case(lambda: file(data=PICKLE), becomes=TAKEN),
    "page with a script": Case(lambda: file(data=b"<script>alert(1)</script>"), becomes=TAKEN),
    "text for a terminal": Case(lambda: file(data=b"\x1b]52;c;eA==\x07\x1b[2J"), becomes=TAKEN),
    "file with attributes": Case(attributes, becomes=TAKEN),
    "file under a lease": Case(lease, becomes=TAKEN),
}
"""Left behind by a task that has ended. Of a lease nothing is left then; `CHANGING` has it alive."""

ASKED: dict[str, tuple[str, str]] = {
    "a way up": ("../x", REFUSED),
    "a way up in the middle": ("a/../../x", REFUSED),
    "an absolute path": ("/etc/passwd", REFUSED),
    "an absolute path, twice": ("//etc/passwd", REFUSED),
    "nothing at all": ("", REFUSED),
    "the folder itself": (".", REFUSED),
    "the folder above": ("..", REFUSED),
    "the folder above, as a folder": ("../", REFUSED),
    "an empty name": ("a//b", REFUSED),
    "a dot in the middle": ("o/./x", REFUSED),
    "a zero byte": ("a\0b", REFUSED),
    "a line end": ("a\nb", REFUSED),
    "a right-to-left mark": ("a\u202eb", REFUSED),
    "half a character": ("\ud800", REFUSED),
    "a name of 5000 letters": ("x" * 5000, REFUSED),
    "six hundred folders": ("d/" * 600 + "x", REFUSED),
    "a home": ("~/x", REFUSED),
    "only a slash": ("/", REFUSED),
}
"""Asked for by a consumer, whatever lies there."""


def _try_link(path: str) -> None:
    with contextlib.suppress(OSError):
        os.link(path, "out")


def leave(group: str) -> dict[str, str]:
    """What could not be made, and why."""
    failed: dict[str, str] = {}
    home = os.getcwd()
    top = os.open(".", os.O_RDONLY)
    for number, (name, case) in enumerate(LEFT.items()):
        if case.group != group:
            continue
        os.makedirs(f"o/{number}")
        os.chdir(f"o/{number}")
        try:
            case.make()
        except OSError as refused:
            failed[name] = str(refused)
        os.fchdir(top)
    os.close(top)
    assert os.getcwd() == home
    return failed


def swap(first: Callable[[str], object], second: Callable[[str], object]) -> Callable[[str], None]:
    def turn(name: str) -> None:
        for make in (first, second):
            with contextlib.suppress(OSError):
                make(name + ".new")
                os.rename(name + ".new", name)

    return turn


def grow(name: str) -> None:
    with open(name, "ab") as growing:
        growing.write(b"y" * 65536)
        if growing.tell() > 8 << 20:
            growing.truncate(0)


def storm(name: str) -> None:
    os.makedirs(f"{name}/a/b", exist_ok=True)
    file(f"{name}/a/b/c")
    os.rename(f"{name}/a", f"{name}/z")
    os.unlink(f"{name}/z/b/c")
    os.rmdir(f"{name}/z/b")
    os.rmdir(f"{name}/z")


def turn_rights(name: str) -> None:
    for mode in (0, 0o644, 0o200):
        os.chmod(name, mode)


def with_file(name: str) -> None:
    os.mkdir(name)
    file(f"{name}/node.key")


def turn_folder(name: str) -> None:
    """A folder, then in its place a link to one of the host's, then the folder again."""
    if not os.path.islink(f"{name}.link"):
        os.symlink(os.path.dirname(SECRET["path"]), f"{name}.link")
    os.rename(name, f"{name}.aside")
    os.rename(f"{name}.link", name)
    os.rename(name, f"{name}.link")
    os.rename(f"{name}.aside", name)


CHANGING: dict[str, tuple[Callable[[str], object], Callable[[str], None], str]] = {
    "file and link": (file, swap(file, lambda name: os.symlink(SECRET["path"], name)), ""),
    "file and fifo": (file, swap(file, os.mkfifo), ""),
    "folder and link": (with_file, turn_folder, "/node.key"),
    "folder walked and link": (with_file, turn_folder, "/"),
    "file that grows": (file, grow, ""),
    "file that shrinks": (
        file,
        lambda name: (file(name, b"z" * (1 << 20)), os.truncate(name, 0), None)[2],
        "",
    ),
    "folders that come and go": (os.mkdir, storm, "/"),
    "rights that come and go": (file, turn_rights, ""),
    "file and another's": (file, swap(file, lambda name: os.link("/etc/hosts", name)), ""),
}
"""(make it, change it once, what of it is asked for)"""


def change() -> None:
    os.mkdir("r")
    os.chdir("r")
    os.mkdir("lease")
    os.chdir("lease")
    lease()
    os.chdir("..")
    for number, (make, turn, _) in enumerate(CHANGING.values()):
        make(str(number))
        if os.fork() == 0:
            while True:
                with contextlib.suppress(OSError):
                    turn(str(number))
    os.write(1, b"changing\n")
    signal.pause()


def main(word: str, told: dict[str, str]) -> None:
    SECRET["path"] = told.get("secret", SECRET["path"])
    if word == "leave":
        os.write(1, json.dumps(leave(told.get("group", ""))).encode())
        os._exit(0)  # what waits on a fifo is left to the sandbox
    change()


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
