"""The filter of system calls that a job runs under. Standard library only: the zygote imports this.

A list of what is allowed; the rest gets EPERM, as a program expects of something it may not do, or ENOSYS, where the C
library then falls back to an older call. The filter is a balanced tree over call numbers: the kernel tries out every
number once when a filter is set, and a linear one would cost a job a millisecond.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from coterie.sandbox import kernel

# name:x86_64:aarch64, "-" where an architecture has no such call
_ALLOWED = """
read:0:63 write:1:64 close:3:57 fstat:5:80 lseek:8:62 mmap:9:222 mprotect:10:226 munmap:11:215 brk:12:214
rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigsuspend:130:133
rt_sigtimedwait:128:137 sigaltstack:131:132 pause:34:- pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66
preadv:295:69 pwritev:296:70 preadv2:327:286 pwritev2:328:287 open:2:- openat:257:56 stat:4:- lstat:6:-
newfstatat:262:79 statx:332:291 access:21:- faccessat:269:48 faccessat2:439:439 readlink:89:- readlinkat:267:78
getdents:78:- getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 statfs:137:43 fstatfs:138:44 umask:95:166
ftruncate:77:46 fallocate:285:47 fadvise64:221:223 fsync:74:82 fdatasync:75:83 sync_file_range:277:84 mkdir:83:-
mkdirat:258:34 rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276 link:86:-
linkat:265:37 symlink:88:- symlinkat:266:36 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59 poll:7:-
ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 epoll_wait:232:-
epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:- eventfd2:290:19 signalfd:282:- signalfd4:289:74
timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87 timer_create:222:107 timer_settime:223:110
timer_gettime:224:108 timer_getoverrun:225:109 timer_delete:226:111 getitimer:36:102 setitimer:38:103 alarm:37:-
nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:-
times:100:153 getrusage:98:165 getrlimit:97:163 setrlimit:160:164 sysinfo:99:179 uname:63:160 getcpu:309:168
sched_yield:24:124 sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
sched_get_priority_max:146:125 sched_get_priority_min:147:126 getpid:39:172 gettid:186:178 getppid:110:173
getpgrp:111:- getpgid:121:155 getsid:124:156 getuid:102:174 geteuid:107:175 getgid:104:176 getegid:108:177
getgroups:115:158 getresuid:118:148 getresgid:120:150 getpriority:140:141 capget:125:90 futex:202:98
set_robust_list:273:99 get_robust_list:274:100 set_tid_address:218:96 rseq:334:293 membarrier:324:283 madvise:28:233
mremap:25:216 msync:26:227 mlock:149:228 munlock:150:229 getrandom:318:278 close_range:436:436 restart_syscall:219:128
wait4:61:260 waitid:247:95 exit:60:93 exit_group:231:94 shutdown:48:210 getsockname:51:204 getpeername:52:205
getsockopt:55:209 setsockopt:54:208
"""
_BY_ARGUMENT = """
clone:56:220 kill:62:129 tgkill:234:131 prlimit64:302:261 prctl:157:167 ioctl:16:29 fcntl:72:25 socketpair:53:199
sendto:44:206 recvfrom:45:207
"""
_UNKNOWN = """
clone3:435:435 io_uring_setup:425:425 io_uring_enter:426:426 io_uring_register:427:427 userfaultfd:323:282
memfd_create:319:279 memfd_secret:447:447 openat2:437:437 pidfd_open:434:434 fchmodat2:452:452
"""
_LAST_KNOWN = 462
"""Later calls do not exist as far as a job can tell."""

_AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_LOAD, _JUMP, _JUMP_EQ, _JUMP_GE, _AND, _RETURN = 0x20, 0x05, 0x15, 0x35, 0x54, 0x06
_ALLOW, _KILL = 0x7FFF0000, 0x80000000
_EPERM, _ENOSYS = 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
_OWN_PID = 0xFFFFFFFE
"""Stands for the job's own process id, which is known only after the fork."""

_CLONE_THREAD = 0x00010000
_CLONE_NEW = 0x7E020000
_PRCTL = (3, 15, 16, 0x53564D41)  # GET_DUMPABLE, SET_NAME, GET_NAME, SET_VMA
_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX
_FCNTL = (0, 1, 2, 3, 4, 5, 6, 7, 36, 37, 38, 1030, 1034)  # no owner, signal, lease, notify, pipe size, seals

_Code = list[tuple[int, int, int, int]]
"""Instructions: operation, jump if true, jump if false, constant."""


def _numbers(table: str, machine: str) -> dict[str, int]:
    """Return name -> number of the calls that an architecture has."""
    rows = [row.split(":") for row in table.split()]
    column = 1 if machine == "x86_64" else 2
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def _argument(index: int) -> tuple[int, int, int, int]:
    """Load the low half of an argument (both architectures are little-endian)."""
    return (_LOAD, 0, 0, 16 + 8 * index)


def _one_of(index: int, values: tuple[int, ...], mask: int = 0xFFFFFFFF) -> _Code:
    """Go on behind these instructions where a masked argument is one of some values, else return EPERM."""
    code: _Code = [_argument(index)]
    if mask != 0xFFFFFFFF:
        code.append((_AND, 0, 0, mask))
    code += [(_JUMP_EQ, len(values) - place, 0, value) for place, value in enumerate(values)]
    code.append((_RETURN, 0, 0, _EPERM))
    return code


def _rules() -> dict[str, _Code]:
    """Return the instructions of the calls that depend on arguments; those that pass are allowed."""
    # A stream with no address: of a datagram pair, sendto reaches any socket whose name is known.
    unnamed = [*_one_of(3, (0,), mask=1), *_one_of(4, (0,)), (_LOAD, 0, 0, 16 + 8 * 4 + 4), (_JUMP_EQ, 1, 0, 0)]
    unnamed.append((_RETURN, 0, 0, _EPERM))
    rules: dict[str, _Code] = {
        "clone": _one_of(0, (_CLONE_THREAD,), mask=_CLONE_THREAD | _CLONE_NEW),
        "kill": _one_of(0, (_OWN_PID,)),
        "tgkill": _one_of(0, (_OWN_PID,)),
        "prlimit64": _one_of(0, (0, _OWN_PID)),
        "prctl": _one_of(0, _PRCTL),
        "ioctl": _one_of(1, _IOCTL),
        "fcntl": _one_of(1, _FCNTL),
        "socketpair": [*_one_of(0, (1,)), *_one_of(1, (1,), mask=0xF)],
        "sendto": unnamed,
        "recvfrom": unnamed,
    }
    return {name: [*code, (_RETURN, 0, 0, _ALLOW)] for name, code in rules.items()}


def _tree(ranges: list[tuple[int, _Code]]) -> _Code:
    """Return a search among (first number, what to do from it on), sorted; the number is in the accumulator."""
    if len(ranges) == 1:
        return ranges[0][1]
    middle = len(ranges) // 2
    below, above = _tree(ranges[:middle]), _tree(ranges[middle:])
    if len(below) > 255:  # a conditional jump reaches no further, an unconditional one does
        return [(_JUMP_GE, 0, 1, ranges[middle][0]), (_JUMP, 0, 0, len(below)), *below, *above]
    return [(_JUMP_GE, len(below), 0, ranges[middle][0]), *below, *above]


def build(machine: str | None = None) -> bytearray:
    """Return the filter of an architecture (default: this one), the job's process id still open.

    ``OSError`` for an architecture without a table of calls.
    """
    machine = machine or os.uname().machine
    if machine not in _AUDIT:
        raise OSError(f"no table of system calls for {machine!r}; known are {sorted(_AUDIT)}")
    actions: dict[int, _Code] = {number: [(_RETURN, 0, 0, _ALLOW)] for number in _numbers(_ALLOWED, machine).values()}
    actions |= {number: [(_RETURN, 0, 0, _ENOSYS)] for number in _numbers(_UNKNOWN, machine).values()}
    rules = _rules()
    actions |= {number: rules[name] for name, number in _numbers(_BY_ARGUMENT, machine).items()}
    ranges: list[tuple[int, _Code]] = []
    for number in range(_LAST_KNOWN + 1):
        code = actions.get(number, [(_RETURN, 0, 0, _EPERM)])
        if not ranges or ranges[-1][1] != code:
            ranges.append((number, code))
    ranges += [(_LAST_KNOWN + 1, [(_RETURN, 0, 0, _ENOSYS)]), (_X32_BIT, [(_RETURN, 0, 0, _KILL)])]
    head: _Code = [(_LOAD, 0, 0, 4), (_JUMP_EQ, 1, 0, _AUDIT[machine]), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    return bytearray().join(
        struct.pack("=HBBI", operation, yes, no, constant) for operation, yes, no, constant in [*head, *_tree(ranges)]
    )


def places_of_pid(code: bytearray) -> tuple[int, ...]:
    """Return where in a filter the job's process id belongs (byte offsets)."""
    return tuple(at + 4 for at in range(0, len(code), 8) if code[at + 4 : at + 8] == struct.pack("=I", _OWN_PID))


def enforce(code: bytearray, places: tuple[int, ...]) -> None:
    """Hold this process, and its threads to come, to a filter; no_new_privs must be set."""
    for place in places:
        struct.pack_into("=I", code, place, os.getpid())
    buffer = ctypes.create_string_buffer(bytes(code), len(code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    kernel.prctl(kernel.PR_SET_SECCOMP, 2, ctypes.addressof(program))
