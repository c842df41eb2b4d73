"""The seccomp filter of a confined program, as BPF: the system calls that a single-process Python needs, and no other.

Anything that is not listed fails with ``EPERM``: new processes, programs, sockets, mounts, namespaces, signals to other
processes, tracing, keys, and every call that a later kernel adds. Some listed calls are allowed with certain arguments
only. Needs Linux on x86-64 or 64-bit ARM.
"""

from __future__ import annotations

import errno
import platform
import struct

_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``."""

_X32 = 0x40000000
"""On x86-64, numbers from here on are calls of another interface with other numbers."""

_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables below, and the architecture's name in the kernel."""

_CALLS: dict[str, tuple[int, int]] = {
    "read": (0, 63), "write": (1, 64), "close": (3, 57), "fstat": (5, 80), "newfstatat": (262, 79), "lseek": (8, 62),
    "mmap": (9, 222), "munmap": (11, 215), "mprotect": (10, 226), "brk": (12, 214), "mremap": (25, 216),
    "madvise": (28, 233), "futex": (202, 98), "openat": (257, 56), "clock_gettime": (228, 113),
    "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135), "rt_sigreturn": (15, 139), "getrandom": (318, 278),
    "getdents64": (217, 61), "exit": (60, 93), "exit_group": (231, 94), "open": (2, -1), "creat": (85, -1),
    "stat": (4, -1), "lstat": (6, -1), "statx": (332, 291), "access": (21, -1), "faccessat": (269, 48),
    "faccessat2": (439, 439), "readlink": (89, -1), "readlinkat": (267, 78), "getcwd": (79, 17), "chdir": (80, 49),
    "fchdir": (81, 50), "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "unlink": (87, -1),
    "unlinkat": (263, 35), "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "ftruncate": (77, 46),
    "truncate": (76, 45), "fsync": (74, 82), "fdatasync": (75, 83), "flock": (73, 32), "chmod": (90, -1),
    "fchmod": (91, 52), "utimensat": (280, 88), "umask": (95, 166), "statfs": (137, 43), "fstatfs": (138, 44),
    "readv": (19, 65), "writev": (20, 66), "pread64": (17, 67), "pwrite64": (18, 68), "fadvise64": (221, 223),
    "sendfile": (40, 71), "copy_file_range": (326, 285), "dup": (32, 23), "dup2": (33, -1), "dup3": (292, 24),
    "pipe": (22, -1), "pipe2": (293, 59), "close_range": (436, 436), "poll": (7, -1), "ppoll": (271, 73),
    "select": (23, -1), "pselect6": (270, 72), "epoll_create1": (291, 20), "epoll_ctl": (233, 21),
    "epoll_wait": (232, -1), "epoll_pwait": (281, 22), "eventfd2": (290, 19), "sendto": (44, 206),
    "recvfrom": (45, 207), "shutdown": (48, 210), "getsockopt": (55, 209), "rt_sigpending": (127, 136),
    "rt_sigtimedwait": (128, 137), "sigaltstack": (131, 132), "alarm": (37, -1), "setitimer": (38, 103),
    "getitimer": (36, 102), "pause": (34, -1), "set_robust_list": (273, 99), "set_tid_address": (218, 96),
    "rseq": (334, 293), "sched_yield": (24, 124), "sched_getaffinity": (204, 123), "getpid": (39, 172),
    "getppid": (110, 173), "gettid": (186, 178), "getuid": (102, 174), "geteuid": (107, 175), "getgid": (104, 176),
    "getegid": (108, 177), "getgroups": (115, 158), "gettimeofday": (96, 169), "clock_getres": (229, 114),
    "clock_nanosleep": (230, 115), "nanosleep": (35, 101), "time": (201, -1), "times": (100, 153),
    "getrusage": (98, 165), "getrlimit": (97, 163), "uname": (63, 160), "sysinfo": (99, 179), "getcpu": (309, 168),
    "restart_syscall": (219, 128), "arch_prctl": (158, -1),
}  # fmt: skip
"""Calls that are allowed with any arguments: their numbers on x86-64 and on 64-bit ARM, -1 where there is none. What
they reach is bounded by the confinement's files and limits."""

_THREAD = 0x3D0F00
"""Flags with which the C library starts a thread; a process has others."""

_ARGUMENT: dict[str, tuple[tuple[int, int], int, tuple[int, ...]]] = {
    "clone": ((56, 220), 0, (_THREAD,)),
    "fcntl": ((72, 25), 1, (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)),  # no owner for signals
    "ioctl": ((16, 29), 1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),  # is it a terminal, blocking
    "prlimit64": ((302, 261), 0, (0,)),  # this process alone
    "socketpair": ((53, 199), 0, (1,)),  # between descriptors of this process: event loops wake themselves so
    "prctl": ((157, 167), 0, (15, 16)),  # the name of a thread
}  # fmt: skip
"""Calls that are allowed with some values of one argument: numbers, the argument's place, the values."""

_CLONE3 = (435, 435)
"""Answered with ``ENOSYS``: its flags are in memory, which a filter cannot read; the C library then uses ``clone``."""


def supported() -> bool:
    """Whether a filter can be made for this machine."""
    return platform.machine() in _ARCHITECTURES


def program() -> bytes:
    """The filter for this machine, as an array of ``struct sock_filter``."""
    column, architecture = _ARCHITECTURES[platform.machine()]
    lines = [
        _line(_LOAD, _ARCHITECTURE),
        _line(_EQUAL, architecture, 1, 0),
        _line(_RETURN, _KILL),
        _line(_LOAD, _NUMBER),
    ]
    if platform.machine() == "x86_64":
        lines += [_line(_AT_LEAST, _X32, 0, 1), _line(_RETURN, _KILL)]
    for numbers in _CALLS.values():
        if numbers[column] >= 0:
            lines += [_line(_EQUAL, numbers[column], 0, 1), _line(_RETURN, _ALLOW)]
    for numbers, argument, allowed in _ARGUMENT.values():
        choices = [part for value in allowed for part in (_line(_EQUAL, value, 0, 1), _line(_RETURN, _ALLOW))]
        lines += [
            _line(_EQUAL, numbers[column], 0, len(choices) + 2),
            _line(_LOAD, _ARGUMENTS + 8 * argument),
            *choices,
        ]
        lines.append(_line(_RETURN, _ERRNO | errno.EPERM))
    lines += [_line(_EQUAL, _CLONE3[column], 0, 1), _line(_RETURN, _ERRNO | errno.ENOSYS)]
    lines.append(_line(_RETURN, _ERRNO | errno.EPERM))
    return b"".join(lines)


def _line(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("<HBBI", code, then, otherwise, value)
