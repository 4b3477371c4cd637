"""The filter says of every call what its table says: played on a machine of our own, for both processors."""

import errno
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from environments.sandbox import seccomp
from kit.settings import RunError

ALLOW, KILL = "allow", "kill"
MACHINES = sorted(seccomp.MACHINES)


def verdict(program: bytes, abi: int, number: int, arguments: tuple[int, ...] = ()) -> str:
    """Plays a classic BPF program over the data of a call, as the kernel does."""
    words = [*arguments, *[0] * (6 - len(arguments))]
    data = struct.pack("<IIQ6Q", number, abi, 0, *(word % 2**64 for word in words))
    at, value = 0, 0
    while True:
        code, then, otherwise, k = struct.unpack_from("<HBBI", program, 8 * at)
        at += 1
        if code == 0x20:
            value = struct.unpack_from("<I", data, k)[0]
        elif code == 0x54:
            value &= k
        elif code in (0x15, 0x35, 0x45):
            holds = {0x15: value == k, 0x35: value >= k, 0x45: bool(value & k)}[code]
            at += then if holds else otherwise
        elif code == 0x06:
            action = {0x7FFF0000: ALLOW, 0x80000000: KILL, 0x00050000: "errno"}[k & 0xFFFF0000]
            return errno.errorcode[k & 0xFFFF] if action == "errno" else action
        else:
            raise AssertionError(f"no instruction of a filter: {code:#x}")


def expected(machine: seccomp.Machine, number: int, arguments: tuple[int, int, int]) -> str:
    """The table in words, without a filter."""
    first, second, third = (argument % 2**32 for argument in arguments)
    if machine.x32 and number >= 2**30:
        return KILL
    if number > 456 or number in seccomp.refused(machine):
        return "ENOSYS"
    if number == machine.clone:
        return "EPERM" if first & 0x7E020000 else ALLOW
    if number == machine.ioctl:
        return "EPERM" if second in (0x5412, 0x541C) else ALLOW
    if number in machine.itself:
        return "EPERM" if first else ALLOW
    if number in dict(machine.priority):
        return "EPERM" if first != dict(machine.priority)[number] or second else ALLOW
    if number in (machine.socket, machine.socketpair):
        refused = "EPERM" if second & 15 == 3 else "EPROTONOSUPPORT" if third not in (0, 6, 17) else ALLOW
        return "EAFNOSUPPORT" if first not in (1, 2, 10) else refused
    return ALLOW


@pytest.mark.parametrize("name", MACHINES)
@given(
    st.one_of(st.integers(0, 500), st.integers(0, 2**32 - 1)),
    st.tuples(*[st.integers(0, 2**64 - 1)] * 3)
    | st.tuples(st.integers(0, 45), st.integers(0, 15), st.integers(0, 300)),
)
@example(2**30 + 1, (0, 0, 0))
def test_the_filter_is_the_table(name, number, arguments):
    machine = seccomp.MACHINES[name]
    assert verdict(seccomp.program(name), machine.audit, number, arguments) == expected(machine, number, arguments)


@pytest.mark.parametrize("name", MACHINES)
def test_all_that_is_named_is_refused_and_what_programs_live_on_is_not(name):
    machine, program = seccomp.MACHINES[name], seccomp.program(name)
    for number, call in seccomp.refused(machine).items():
        assert verdict(program, machine.audit, number) == "ENOSYS", call
    living = {
        "x86_64": {
            "read": 0,
            "mmap": 9,
            "execve": 59,
            "fork": 57,
            "clone": 56,
            "futex": 202,
            "openat": 257,
            "getrandom": 318,
            "rseq": 334,
        },
        "aarch64": {
            "read": 63,
            "mmap": 222,
            "execve": 221,
            "clone": 220,
            "futex": 98,
            "openat": 56,
            "getrandom": 278,
            "rseq": 293,
        },
    }
    for call, number in living[name].items():
        assert verdict(program, machine.audit, number, (17,)) == ALLOW, call


@pytest.mark.parametrize("name", MACHINES)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
@example(0x40000003, 1)  # a 32-bit program on x86-64
def test_another_abi_ends_the_process(name, abi, number):
    machine = seccomp.MACHINES[name]
    if abi != machine.audit:
        assert verdict(seccomp.program(name), abi, number) == KILL


def test_numbers_are_those_of_the_kernel():
    """By hand from arch/x86/entry/syscalls/syscall_64.tbl and include/uapi/asm-generic/unistd.h."""
    numbers = {name: both for calls in seccomp.REFUSED.values() for name, both in calls.items()}
    known = {
        "ptrace": (101, 117),
        "mount": (165, 40),
        "unshare": (272, 97),
        "setns": (308, 268),
        "bpf": (321, 280),
        "keyctl": (250, 219),
    }
    known |= {
        "open_by_handle_at": (304, 265),
        "io_uring_setup": (425, 425),
        "clone3": (435, 435),
        "userfaultfd": (323, 282),
        "iopl": (172, None),
    }
    assert {name: numbers[name] for name in known} == known
    for machine in seccomp.MACHINES.values():
        column = [both[machine.column] for both in numbers.values() if both[machine.column] is not None]
        assert len(set(column)) == len(column)
        taken = {
            machine.socket,
            machine.socketpair,
            machine.clone,
            machine.ioctl,
            *machine.itself,
            *dict(machine.priority),
        }
        assert len(taken) == 10 and not taken & set(column)
    known = [machine.itself + tuple(dict(machine.priority)) for _, machine in sorted(seccomp.MACHINES.items())]
    assert known == [(261, 118, 119, 274, 140, 30), (302, 142, 144, 314, 141, 251)]


@pytest.mark.parametrize("name", MACHINES)
def test_calls_with_arguments_of_their_own(name):
    """Each of them with what programs pass, and with what would reach another process or load a module."""
    machine, program = seccomp.MACHINES[name], seccomp.program(name)
    for number in machine.itself:
        assert (
            verdict(program, machine.audit, number, (0, 5)) == ALLOW
            and verdict(program, machine.audit, number, (1, 5)) == "EPERM"
        )
    for number, process in machine.priority:
        assert verdict(program, machine.audit, number, (process, 0, 5)) == ALLOW
        assert (
            verdict(program, machine.audit, number, (process, 1, 5))
            == verdict(program, machine.audit, number, (2, 0, 5))
            == "EPERM"
        )
    for protocol, says in (
        (0, ALLOW),
        (6, ALLOW),
        (17, ALLOW),
        (132, "EPROTONOSUPPORT"),
        (262, "EPROTONOSUPPORT"),
        (1, "EPROTONOSUPPORT"),
    ):
        assert verdict(program, machine.audit, machine.socket, (2, 1 | 0o2000000, protocol)) == says


@pytest.mark.parametrize("name", MACHINES)
def test_every_family_type_and_new_call(name):
    """All of them, since few of the calls that are drawn above are one that makes a socket: AF_VSOCK would lead to the
    machine below."""
    machine, program = seccomp.MACHINES[name], seccomp.program(name)
    flags = 0o2000000 | 0o4000
    for number in (machine.socket, machine.socketpair):
        for family in range(64):
            says = verdict(program, machine.audit, number, (family, 1 | flags, 0))
            assert says == (ALLOW if family in (1, 2, 10) else "EAFNOSUPPORT"), family
        for kind in range(16):
            for more in (0, 0o4000, 0o2000000, flags):
                assert verdict(program, machine.audit, number, (2, kind | more, 0)) == (
                    "EPERM" if kind == 3 else ALLOW
                ), (kind, more)
    for number in range(400, 500):
        assert verdict(program, machine.audit, number) == expected(machine, number, (0, 0, 0)), number
    assert expected(machine, 456, (0, 0, 0)) == ALLOW and expected(machine, 457, (0, 0, 0)) == "ENOSYS"
    special = [
        machine.socket,
        machine.socketpair,
        machine.clone,
        machine.ioctl,
        *machine.itself,
        *dict(machine.priority),
    ]
    for number in special:  # an argument is never taken for the number of a call
        for word in (*special, *seccomp.refused(machine)):
            for arguments in ((word, 1, 0), (0, word, 0), (2, 1, word), (word, word, word)):
                assert verdict(program, machine.audit, number, arguments) == expected(machine, number, arguments), (
                    number,
                    arguments,
                )


def test_clone_may_start_threads_and_processes_and_no_namespace():
    machine, program = seccomp.MACHINES["x86_64"], seccomp.program("x86_64")
    thread, child = 0x3D0F00, 0x01200011  # what the C library passes
    assert verdict(program, machine.audit, 56, (thread,)) == verdict(program, machine.audit, 56, (child,)) == ALLOW
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(program, machine.audit, 56, (child | flag,)) == "EPERM"


def test_a_processor_without_a_table_is_refused():
    with pytest.raises(RunError, match="riscv64"):
        seccomp.program("riscv64")
