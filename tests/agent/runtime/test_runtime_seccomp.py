"""The filter, run step by step by a small machine of our own: both processors, whichever this one is."""

from __future__ import annotations

import errno
import struct

import pytest

from gpool.agent.runtime.bubblewrap import seccomp
from gpool.agent.runtime.bubblewrap.seccomp import ALLOW, ERRNO, KILL_PROCESS, MACHINES, REFUSED

both = pytest.mark.parametrize("machine", list(MACHINES))
READ = {"x86_64": 0, "aarch64": 63}


def verdict(
    machine: str,
    number: int,
    *arguments: int,
    audit: int | None = None,
) -> int:
    """What the kernel would answer: the action of the return that is reached."""
    facts = MACHINES[machine]
    padded = [*arguments, *([0] * (6 - len(arguments)))]
    word = facts.audit if audit is None else audit
    data = struct.pack("<IIQ6Q", number, word, 0, *(value % 2**64 for value in padded))
    steps = list(struct.iter_unpack("<HBBI", seccomp.program(machine)))
    at = held = 0
    while True:
        code, yes, no, value = steps[at]
        at += 1
        if code == seccomp.LOAD:
            held = struct.unpack_from("<I", data, value)[0]
        elif code == seccomp.AND:
            held &= value
        elif code == seccomp.RETURN:
            return int(value)
        else:
            truths = {
                seccomp.JUMP_EQUAL: held == value,
                seccomp.JUMP_AT_LEAST: held >= value,
                seccomp.JUMP_ANY_BIT: bool(held & value),
            }
            at += yes if truths[code] else no


@both
def test_ordinary_calls_always_pass(machine: str) -> None:
    facts = MACHINES[machine]
    assert verdict(machine, READ[machine], 0, 0, 1) == ALLOW
    assert verdict(machine, facts.clone, 0x3D0F00) == ALLOW  # a thread
    assert verdict(machine, facts.clone, 17) == ALLOW  # a fork
    assert verdict(machine, facts.ioctl, 0, 0x5401) == ALLOW
    assert verdict(machine, facts.personality, 0xFFFFFFFF) == ALLOW
    assert verdict(machine, facts.mknodat, 0, 0, 0o010644) == ALLOW  # a FIFO
    for family in (1, 2, 10):
        for kind in (1, 2, 5, 1 | 0o2000000):
            assert verdict(machine, facts.socket, family, kind) == ALLOW
    for protocol in (6, 17):
        assert verdict(machine, facts.socket, 2, 1, protocol) == ALLOW
    assert verdict(machine, facts.setsockopt, 3, 6, 1) == ALLOW  # TCP_NODELAY
    assert verdict(machine, facts.setsockopt, 3, 1, 31) == ALLOW  # another level's 31
    for number in (444, 445, 446, 449, 462):  # Landlock, futex_waitv, mseal
        assert verdict(machine, number) == ALLOW


@both
def test_what_is_listed_is_never_allowed(machine: str) -> None:
    facts = MACHINES[machine]
    for name, numbers in REFUSED.items():
        if numbers[facts.column] >= 0:
            assert verdict(machine, numbers[facts.column]) == ERRNO | errno.EPERM, name
    assert verdict(machine, 435) == ERRNO | errno.ENOSYS
    assert verdict(machine, 425) == ERRNO | errno.ENOSYS


@both
def test_calls_of_a_newer_kernel_are_absent(machine: str) -> None:
    for number in (seccomp.LAST_KNOWN + 1, 500, 512, 0x3FFFFFFF):
        assert verdict(machine, number) == ERRNO | errno.ENOSYS


@both
def test_what_would_load_a_kernel_module_is_refused(machine: str) -> None:
    facts = MACHINES[machine]
    for protocol in (1, 33, 132, 136, 256, 262):
        absent = ERRNO | errno.EPROTONOSUPPORT
        assert verdict(machine, facts.socket, 2, 1, protocol) == absent
    assert verdict(machine, facts.ioctl, 0, 0x5423) == ERRNO | errno.EPERM  # line disciplines
    assert verdict(machine, facts.setsockopt, 3, 6, 31) == ERRNO | errno.EPERM  # TCP_ULP


@both
def test_arguments_that_reach_too_far_are_refused(machine: str) -> None:
    facts = MACHINES[machine]
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(machine, facts.clone, flag | 17) == ERRNO | errno.EPERM
    for family in (17, 38, 40, 44):
        assert verdict(machine, facts.socket, family, 3) == ERRNO | errno.EAFNOSUPPORT
    assert verdict(machine, facts.socket, 2, 3) == ERRNO | errno.EPERM
    assert verdict(machine, facts.socket, 2, 10) == ERRNO | errno.EPERM
    assert verdict(machine, facts.ioctl, 0, 0x5412) == ERRNO | errno.EPERM
    assert verdict(machine, facts.ioctl, 0, 0xABC_0000_541C) == ERRNO | errno.EPERM
    assert verdict(machine, facts.personality, 0x0400000) == ERRNO | errno.EPERM
    assert verdict(machine, facts.mknodat, 0, 0, 0o020666) == ERRNO | errno.EPERM
    assert verdict(machine, facts.mknodat, 0, 0, 0o060666) == ERRNO | errno.EPERM


@both
def test_another_machines_calls_end_the_process(machine: str) -> None:
    assert verdict(machine, READ[machine], audit=0x40000003) == KILL_PROCESS
    if machine == "x86_64":
        assert verdict(machine, 0x40000000 | 39) == KILL_PROCESS


def test_an_unknown_machine_has_no_filter_and_says_so() -> None:
    with pytest.raises(LookupError, match="no system call filter for pdp11"):
        seccomp.program("pdp11")


@both
def test_a_sandbox_may_ask_for_interfaces_and_nothing_else_of_netlink(machine: str) -> None:
    number = MACHINES[machine].socket
    raw, packet, route = 3 | 0o2000000, 17, 0
    assert verdict(machine, number, 16, raw, route) == ALLOW
    assert verdict(machine, number, 16, 2, route) == ALLOW
    for protocol in (2, 4, 6, 9, 12, 15, 16, 20):  # netfilter, audit, xfrm, generic netlink, …
        assert verdict(machine, number, 16, raw, protocol) != ALLOW
    assert verdict(machine, number, 2, raw, 0) == ERRNO | errno.EPERM
    assert verdict(machine, number, packet, raw, 0) == ERRNO | errno.EAFNOSUPPORT
    for family in (1, 2, 10):
        assert verdict(machine, number, family, 1) == ALLOW
