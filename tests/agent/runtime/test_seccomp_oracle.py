"""libseccomp as the oracle of the system call filter: a filter compiled by it from the same rules gives the same verdicts."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable
from functools import cache
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.runtime.bubblewrap import seccomp
from gpool.agent.runtime.bubblewrap.seccomp import ABSENT, ALLOW, ERRNO, KILL_PROCESS, MACHINES
from gpool.agent.runtime.docker.confinement import profile

BADARCH = 2  # SCMP_FLTATR_ACT_BADARCH
OPERATORS = {"SCMP_CMP_NE": 1, "SCMP_CMP_EQ": 4, "SCMP_CMP_GT": 6, "SCMP_CMP_MASKED_EQ": 7}
UNKNOWN_NAME = -1  # __NR_SCMP_ERROR
WITH_ARGUMENTS = ("clone", "socket", "socketpair", "ioctl", "personality", "mknod", "mknodat")
WITH_ARGUMENTS += ("setsockopt",)
MAY_BE_UNKNOWN = {"open_tree_attr", "memfd_secret", "quotactl_fd", "mount_setattr"}
"""Newer than some releases of libseccomp, which ignore a rule for them."""

both = pytest.mark.parametrize("machine", list(MACHINES))


class Comparison(ctypes.Structure):
    """`struct scmp_arg_cmp`."""

    _fields_ = (
        ("index", ctypes.c_uint),
        ("op", ctypes.c_int),
        ("first", ctypes.c_uint64),
        ("second", ctypes.c_uint64),
    )


@pytest.fixture(autouse=True)
def _library(require: Callable[[str], None]) -> None:
    require("libseccomp")


@cache
def library() -> ctypes.CDLL:
    loaded = ctypes.CDLL("libseccomp.so.2")
    loaded.seccomp_init.restype = ctypes.c_void_p
    return loaded


def ok(code: int) -> None:
    assert code == 0, os.strerror(-code)


@cache
def compiled(machine: str) -> tuple[tuple[int, int, int, int], ...]:
    """The profile's rules as libseccomp compiles them."""
    lib, audit = library(), MACHINES[machine].audit
    context = ctypes.c_void_p(lib.seccomp_init(ctypes.c_uint32(ALLOW)))
    try:
        ok(lib.seccomp_attr_set(context, BADARCH, ctypes.c_uint32(KILL_PROCESS)))
        native = ctypes.c_uint32(lib.seccomp_arch_native())
        if native.value != audit:
            ok(lib.seccomp_arch_remove(context, native))
            ok(lib.seccomp_arch_add(context, ctypes.c_uint32(audit)))
        for rule in profile(machine)["syscalls"]:
            compared = (Comparison * len(rule["args"]))(
                *(
                    Comparison(
                        each["index"], OPERATORS[each["op"]], each["value"], each["valueTwo"]
                    )
                    for each in rule["args"]
                )
            )
            for name in rule["names"]:
                number = lib.seccomp_syscall_resolve_name(name.encode())
                if number != UNKNOWN_NAME:
                    action = ctypes.c_uint32(ERRNO | rule["errnoRet"])
                    ok(
                        lib.seccomp_rule_add_array(
                            context, action, number, ctypes.c_uint(len(compared)), compared
                        )
                    )
        made = os.memfd_create("filter")
        try:
            ok(lib.seccomp_export_bpf(context, made))
            text = os.pread(made, os.fstat(made).st_size, 0)
        finally:
            os.close(made)
    finally:
        lib.seccomp_release(context)
    return tuple(struct.iter_unpack("<HBBI", text))


@cache
def assembled(machine: str) -> tuple[tuple[int, int, int, int], ...]:
    return tuple(struct.iter_unpack("<HBBI", seccomp.program(machine)))


def run(program: tuple[tuple[int, int, int, int], ...], data: bytes) -> int:
    """Interpret a classic BPF program over `struct seccomp_data`; return the action."""
    at = held = 0
    while True:
        code, yes, no, value = program[at]
        at += 1
        if code == 0x20:
            held = struct.unpack_from("<I", data, value)[0]
        elif code == 0x54:
            held &= value
        elif code == 0x06:
            return value
        elif code == 0x05:
            at += value
        else:
            tests = {
                0x15: held == value,
                0x25: held > value,
                0x35: held >= value,
                0x45: bool(held & value),
            }
            at += yes if tests[code] else no


def verdicts(machine: str, number: int, arguments: tuple[int, ...] = ()) -> tuple[int, int]:
    """The action of our filter, and of libseccomp's."""
    padded = (*arguments, *([0] * (6 - len(arguments))))
    data = struct.pack("<IIQ6Q", number, MACHINES[machine].audit, 0, *padded)
    return run(assembled(machine), data), run(compiled(machine), data)


def unknown_numbers(machine: str) -> set[int]:
    column = MACHINES[machine].column
    found = {
        numbers[column]: name
        for table in (seccomp.REFUSED, ABSENT)
        for name, numbers in table.items()
        if library().seccomp_syscall_resolve_name(name.encode()) == UNKNOWN_NAME
    }
    assert set(found.values()) <= MAY_BE_UNKNOWN
    return set(found)


@both
def test_every_name_has_libseccomp_s_number(machine: str) -> None:
    table = MACHINES[machine]
    numbered = {name: numbers[table.column] for name, numbers in (seccomp.REFUSED | ABSENT).items()}
    numbered |= {name: getattr(table, name) for name in WITH_ARGUMENTS}
    resolve = library().seccomp_syscall_resolve_name_arch
    for name, number in numbered.items():
        found = resolve(ctypes.c_uint32(table.audit), name.encode())
        if found == UNKNOWN_NAME:
            assert name in MAY_BE_UNKNOWN
        elif number < 0:
            assert found < 0, name  # a pseudo number: this architecture has no such call
        else:
            assert found == number, name


@both
def test_every_system_call_number_gets_the_same_verdict(machine: str) -> None:
    unknown, socket = unknown_numbers(machine), MACHINES[machine].socket
    refused = 0
    for number in range(seccomp.LAST_KNOWN + 1):
        ours, theirs = verdicts(machine, number)
        if number in unknown:
            assert theirs == ALLOW
            continue
        assert (ours == ALLOW) == (theirs == ALLOW), number
        if number != socket:  # two rules match its arguments 0, 0, 0: libseccomp takes either
            assert ours == theirs, number
        refused += ours != ALLOW
    assert refused > 50  # the control: both filters do refuse


@both
def test_another_architecture_s_calls_are_killed_by_both(machine: str) -> None:
    for other in MACHINES.values():
        data = struct.pack("<IIQ6Q", 0, other.audit, 0, *([0] * 6))
        alike = run(assembled(machine), data), run(compiled(machine), data)
        expected = ALLOW if other is MACHINES[machine] else KILL_PROCESS
        assert alike == (expected, expected)
    if machine == "x86_64":
        assert verdicts(machine, seccomp.X32_BIT | 39) == (KILL_PROCESS, KILL_PROCESS)


@both
def test_sockets_of_every_family_type_and_protocol_get_the_same_verdict(machine: str) -> None:
    flags = (0, 0o2000000)
    for family, kind, flag, protocol in product(
        range(46), range(12), flags, (0, 1, 6, 16, 17, 132)
    ):
        arguments = (family, kind | flag, protocol)
        ours, theirs = verdicts(machine, MACHINES[machine].socket, arguments)
        assert (ours == ALLOW) == (theirs == ALLOW), arguments


words = st.one_of(
    st.integers(0, 64),
    st.integers(0, 2**32 - 1),
    st.integers(0, 31).map(lambda bit: 1 << bit),
    st.sampled_from([*seccomp.PERSONALITIES, seccomp.TIOCSTI, seccomp.TIOCLINUX]),
    st.sampled_from([seccomp.TIOCSETD, seccomp.SOL_TCP, seccomp.TCP_ULP, 0o020600, 0o060600]),
)


@both
@given(name=st.sampled_from(WITH_ARGUMENTS), arguments=st.tuples(*[words] * 6))
def test_arguments_get_the_same_verdict(
    machine: str, name: str, arguments: tuple[int, ...]
) -> None:
    number = getattr(MACHINES[machine], name)
    if number >= 0:
        ours, theirs = verdicts(machine, number, arguments)
        assert (ours == ALLOW) == (theirs == ALLOW)


@both
@given(name=st.sampled_from(WITH_ARGUMENTS), arguments=st.tuples(*[st.integers(0, 2**64 - 1)] * 6))
def test_arguments_past_32_bits_are_never_judged_more_mildly_by_libseccomp(
    machine: str, name: str, arguments: tuple[int, ...]
) -> None:
    number = getattr(MACHINES[machine], name)
    if number >= 0:
        ours, theirs = verdicts(machine, number, arguments)
        assert ours == ALLOW or theirs != ALLOW
