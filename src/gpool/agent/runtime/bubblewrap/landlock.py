"""Landlock as a second confinement behind the mounts, applied inside by the last program before the command.

Landlock still holds if a mount is wrong. A domain cannot be applied from outside, nor to bwrap, which could no longer
mount: so a few lines of Perl (part of every Debian and Ubuntu; one millisecond) read the variables from a descriptor,
apply the domain and exec the command. Perl starts with an empty environment, so no variable of the task affects it.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
from collections.abc import Sequence

CREATE_RULESET, PRLIMIT = 444, {"x86_64": 302, "aarch64": 261}
ASK_VERSION = 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1, 2, 4, 8
MAKE_CHAR, MAKE_BLOCK = 64, 2048
REFER, TRUNCATE, IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
FIRST_RIGHTS = (1 << 13) - 1
ADDED_RIGHTS = ((2, REFER), (3, TRUNCATE), (5, IOCTL_DEV))
SCOPES_FROM, SCOPES = 6, 0b11  # abstract sockets and signals are limited to the domain
WRITABLE = ("/work", "/values", "/tmp", "/dev/shm")

CONFINE = r"""
my ($env, $nproc, $size, $handled, $scoped, $limit, $rules) = splice @ARGV, 0, 7;
open(my $given, "<&=", $env) or die "gpool: variables: $!\n";
{ local $/; my $text = <$given>; %ENV = $text eq "" ? () : map { split /=/, $_, 2 } split /\0/, $text; }
close $given;
if ($nproc) { syscall($limit + 0, 0, 6, pack("QQ", $nproc, $nproc), 0) == 0 or die "gpool: prlimit: $!\n"; }
if ($size) {
    my $set = syscall(444, substr(pack("QQQ", $handled, 0, $scoped), 0, $size), $size + 0, 0);
    $set >= 0 or die "gpool: landlock: $!\n";
    for my $rule (split /:/, $rules) {
        my ($path, $rights) = split /=/, $rule;
        sysopen(my $at, $path, 0x280000) or next;
        syscall(445, $set, 1, pack("Ql", $rights, fileno $at), 0) == 0 or die "gpool: landlock: $path: $!\n";
    }
    syscall(446, $set, 0) == 0 or die "gpool: landlock: $!\n";
    open(my $done, "<&=", $set); close $done;
}
my $name = $ARGV[0];
exec { $name } @ARGV;
my $why = $! + 0;
print STDERR "gpool: $name: $!\n";
exit($why == 2 || $why == 20 ? 127 : 126);
"""


def version() -> int:
    """Kernel's Landlock ABI version; 0: none."""
    libc = ctypes.CDLL(None, use_errno=True)
    found: int = libc.syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint(ASK_VERSION))
    return max(0, found)


def rules(known: int, *, names_threads: bool = False) -> tuple[int, tuple[tuple[str, int], ...]]:
    """Return (handled rights, rights granted per path) under Landlock version `known`.

    `names_threads`: the sandbox may write to its own /proc entries, as the kernel allows.
    """
    handled = FIRST_RIGHTS
    for since, right in ADDED_RIGHTS:
        handled |= right if known >= since else 0
    look = EXECUTE | READ_FILE | READ_DIR
    devices = (look | WRITE_FILE | TRUNCATE | IOCTL_DEV) & handled
    all_but_devices = handled & ~(MAKE_CHAR | MAKE_BLOCK)
    given = [("/", look), ("/dev", devices), *((path, all_but_devices) for path in WRITABLE)]
    if names_threads:
        given.append(("/proc", (look | WRITE_FILE | TRUNCATE) & handled))
    return handled, tuple(given)


def perl() -> str:
    """ "" if the host has none in /usr."""
    found = shutil.which("perl", path="/usr/bin:/bin")
    return "/usr/bin/perl" if found and os.path.exists("/usr/bin/perl") else ""


def command(
    variables_at: int, processes: int, known: int, *, names_threads: bool = False
) -> Sequence[str]:
    """Words before the command. Variables come from descriptor `variables_at`; 0 processes: no limit."""
    handled, given = rules(known, names_threads=names_threads)
    scoped = SCOPES if known >= SCOPES_FROM else 0
    size = 0 if not known else (8 if known < 4 else 16 if known < SCOPES_FROM else 24)
    numbers = (variables_at, processes, size, handled, scoped, PRLIMIT[platform.machine()])
    listed = ":".join(f"{path}={rights}" for path, rights in given)
    return (perl(), "-e", CONFINE, *map(str, numbers), listed)
