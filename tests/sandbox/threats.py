"""Programs that try what a program may not, or that do what one may, each with the verdicts that are right for it.

All are bounded: where a wall is missing they do no harm. A program that got through prints OUT.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from coterie.sandbox.execution import Execution, Limits, Verdict

OK, ERROR, SIGNAL = Verdict.OK, Verdict.RUNTIME_ERROR, Verdict.SIGNAL
CPU, WALL, OUTPUT = Verdict.CPU_TIME, Verdict.WALL_TIME, Verdict.OUTPUT_LIMIT
MEMORY, REFUSED = Verdict.MEMORY, Verdict.REFUSED

USUAL = Limits(cpu_s=3.0, memory_mb=256, output_bytes=2**20)
SHORT = Limits(cpu_s=0.1, memory_mb=256, output_bytes=2**20)
ASLEEP = Limits(cpu_s=2.0, wall_s=0.3, memory_mb=256)


@dataclass(frozen=True)
class Threat:
    """A program, its limits, and what must come of it; ``stdout`` is compared where given."""

    program: str
    verdicts: tuple[Verdict, ...]
    limits: Limits = USUAL
    stdout: bytes | None = None
    exit_code: int | None = None
    signal: int | None = None
    stdin: bytes = b""
    tiers: str = "AC"


def wrong(threat: Threat, execution: Execution) -> list[str]:
    """Return what is not as it should be, in words."""
    faults = [] if execution.verdict in threat.verdicts else [f"verdict {execution.verdict}"]
    faults += ["got through"] if b"OUT" in execution.stdout else []
    pairs = (
        ("stdout", threat.stdout, execution.stdout),
        ("exit code", threat.exit_code, execution.exit_code),
        ("signal", threat.signal, execution.signal),
    )
    faults += [f"{name} {found!r}"[:200] for name, right, found in pairs if right is not None and right != found]
    return [*faults, execution.stderr[-300:].decode(errors="replace")] if faults else []


def tries(*attempts: str, start: str = "import os") -> str:
    """Return a program that tries each statement and says which of them the system did not refuse."""
    lines = [start]
    for number, attempt in enumerate(attempts):
        lines += ["try:", f"    {attempt}", f"    print('OUT', {number})", "except (OSError, ValueError): pass"]
    return "\n".join(lines)


SYSCALL = "import ctypes, os\ncall = ctypes.CDLL(None, use_errno=True).syscall\n"
REFUSED_CALLS = (
    "101 155 161 165 166 105 106 117 272 308 310 311 321 323 425 426 435 248 250 298 246 175 56 57 58 59 319"
)
# ptrace pivot_root chroot mount umount2 setuid setgid setresuid unshare setns process_vm_readv process_vm_writev bpf
# userfaultfd io_uring_setup io_uring_enter clone3 add_key keyctl perf_event_open kexec_load init_module clone(0) fork
# vfork execve memfd_create
MORE_CALLS = "29 68 64 71 227 141 144 62 275 276 278 40 326 90 92 132 188 73 251 203 256 424 434 437 447"
# shmget msgget semget msgrcv clock_settime setpriority sched_setscheduler kill(0) splice tee vmsplice sendfile
# copy_file_range chmod chown utime setxattr flock ioprio_set sched_setaffinity migrate_pages pidfd_send_signal
# pidfd_open openat2 memfd_secret

THREATS: dict[str, Threat] = {
    # time
    "endless loop": Threat("while True: pass", (CPU,), SHORT),
    "endless loop that catches everything": Threat(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
        (CPU,),
        SHORT,
    ),
    "sleep": Threat("import time; time.sleep(1e6)", (WALL,), ASLEEP),
    "sleep with all signals ignored": Threat(
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(100)",
        (WALL,),
        ASLEEP,
    ),
    "stops itself": Threat("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", (WALL,), ASLEEP),
    "thread that never ends": Threat(
        "import threading, time; threading.Thread(target=time.sleep, args=(1e6,)).start()", (WALL,), ASLEEP
    ),
    "regular expression": Threat("import re; re.match('(a+)+$', 'a' * 64 + 'b')", (CPU,), SHORT),
    "power tower": Threat("9 ** 9 ** 9", (CPU,), SHORT),
    # output
    "endless output": Threat("while True: print('x' * 10**6)", (OUTPUT,), signal=25),
    "endless output to stderr": Threat("import sys\nwhile True: sys.stderr.write('x' * 10**6)", (OUTPUT,)),
    "output past the limit, signal ignored": Threat(
        "import os, signal\nsignal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nwhile True: os.write(1, b'x' * 2**18)",
        (OUTPUT,),
    ),
    "exactly as much output as allowed": Threat("import os\nos.write(1, b'x' * 2**20)", (OK,), stdout=b"x" * 2**20),
    # memory
    "memory in one piece": Threat("x = bytearray(10**10)", (MEMORY,), exit_code=1),
    "memory bit by bit": Threat("x = []\nwhile True: x.append(bytearray(10**6))", (MEMORY,)),
    "shared memory": Threat("import mmap\nx = [mmap.mmap(-1, 2**24) for _ in range(64)]\nprint('OUT')", (MEMORY,)),
    "memory file": Threat(tries("os.memfd_create('x')"), (OK,)),
    "scratch filled with bytes": Threat(
        "n = 0\ntry:\n    for i in range(64):\n"
        "        with open(f'/tmp/{i}', 'wb') as f: f.write(bytes(2**20)); n += 1\n"
        "except OSError: print(n)",
        (OK,),
        stdout=b"16\n",
        tiers="A",
    ),
    "scratch filled with files": Threat(
        "n = 0\ntry:\n    for i in range(5000): open(f'/tmp/{i}', 'x').close(); n += 1\nexcept OSError: print(n)",
        (OK,),
        stdout=b"1023\n",
        tiers="A",
    ),
    "no scratch": Threat(tries("open('/tmp/x', 'w')", "open('x', 'w')"), (OK,), tiers="C"),
    # processes and threads
    "forks": Threat(
        "import os\nn = 0\nfor _ in range(200):\n    try: pid = os.fork()\n    except OSError: continue\n"
        "    if pid == 0: os._exit(0)\n    n += 1\nprint(n)",
        (OK,),
        stdout=b"0\n",
    ),
    "threads without end": Threat(
        "import threading, time\nthreading.stack_size(2**15)\nn = 0\ntry:\n    for _ in range(5000):\n"
        "        threading.Thread(target=time.sleep, args=(9,), daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nprint(n < 2000 or 'OUT')",
        (OK,),
        stdout=b"True\n",
    ),
    "subprocess": Threat("import subprocess; subprocess.run(['true'])", (REFUSED,)),
    "shell": Threat("import os; print('OUT' if os.system('exit 0') == 0 else 'no')", (OK,), stdout=b"no\n"),
    "execv": Threat(
        tries("os.execv('/proc/self/exe', ['x'])", "os.execv('/lib64/ld-linux-x86-64.so.2', ['x'])"), (OK,)
    ),
    "daemon": Threat(tries("os.fork() or (os.setsid(), os.fork())"), (OK,)),
    "process pool": Threat(
        "import concurrent.futures as c\n"
        "if __name__ == '__main__':\n    print(list(c.ProcessPoolExecutor(2).map(abs, [1])))",
        (ERROR, REFUSED),
    ),
    # files
    "password file": Threat("print(open('/etc/passwd').read())", (ERROR, REFUSED)),
    "home of root": Threat(tries("os.listdir('/root')", "os.listdir('/home')", "open('/etc/shadow')"), (OK,)),
    "write outside": Threat(
        tries(
            *(
                f"open('{p}/out-x', 'x')"
                for p in ["/", "/usr/lib", "/etc", "/dev", "/dev/shm", "/var/tmp", "/proc", "/code", "/run", "/root"]
            )
        ),
        (OK,),
    ),
    "links to files outside": Threat(
        tries("os.symlink('/etc/passwd', '/tmp/l'); open('/tmp/l').read()", "os.link('/etc/passwd', '/tmp/h')"), (OK,)
    ),
    "devices and setuid files": Threat(
        tries("os.mknod('/tmp/d', 0o60666, 0x800)", "os.chmod('/tmp', 0o4777)", "os.mkfifo('/tmp/f')"), (OK,)
    ),
    "packages of the host": Threat(
        "import os, sys\nfor p in list(sys.path):\n    for d in ('site-packages', 'dist-packages'):\n"
        "        try: n = [x for x in os.listdir(os.path.join(p, d)) if open(os.path.join(p, d, x, '__init__.py'))]\n"
        "        except OSError: continue\n        if n: print('OUT', n)",
        (OK,),
    ),
    # what the trainer knows
    "own environment": Threat(
        "import os; print(sorted(set(os.environ) - {'PATH', 'LANG', 'HOME', 'TMPDIR', 'PWD', 'LC_CTYPE', "
        "'PYTHONHASHSEED', 'OPENBLAS_NUM_THREADS', 'OMP_NUM_THREADS', 'MALLOC_ARENA_MAX'}))",
        (OK,),
        stdout=b"[]\n",
    ),
    "other processes by /proc": Threat(
        "import os\nfor pid in {*range(1, 400), os.getppid()} - {os.getpid()}:\n"
        "    for name in ('environ', 'mem', 'maps', 'cmdline', 'fd/0'):\n"
        "        try: data = open(f'/proc/{pid}/{name}', 'rb').read(1)\n        except OSError: continue\n"
        "        if data and (name != 'cmdline' or pid != os.getppid()): print('OUT', pid, name)",
        (OK,),
    ),
    "expected output in memory": Threat(
        "import gc, sys\nframe, seen = sys._getframe(), []\n"
        "while frame: seen.append(repr(frame.f_locals)); frame = frame.f_back\n"
        "text = ''.join(seen) + repr([o for o in gc.get_objects() if type(o) is dict])[:10**6]\n"
        "print('expected_' + 'output' in text.replace(\"'expected_' + 'output'\", ''))",
        (OK,),
        stdout=b"False\n",
    ),
    # network and signals
    "sockets": Threat(
        tries(
            *(f"socket.socket({f}, {t}).getsockname()" for f, t in ((2, 1), (2, 2), (10, 1), (1, 1), (16, 3), (40, 1))),
            start="import socket",
        ),
        (OK,),
    ),
    "connection to this host": Threat("import socket; socket.create_connection(('127.0.0.1', 22), 1)", (REFUSED,)),
    "name look-up": Threat("import socket; print(socket.getaddrinfo('example.org', 80))", (ERROR, REFUSED)),
    "datagram to a named socket": Threat(
        tries(
            "socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)",
            "socket.socketpair()[0].sendto(b'x', '/tmp/s')",
            "socket.socketpair()[0].send(b'x', socket.MSG_OOB)",
            "socket.send_fds(socket.socketpair()[0], [b'x'], [0])",
            start="import socket",
        ),
        (OK,),
    ),
    "signals to others": Threat(
        tries("os.kill(os.getppid(), 0)", "os.kill(1, 0)", "os.kill(-1, 0)", "os.kill(0, 0)", "os.killpg(0, 0)"), (OK,)
    ),
    # the kernel
    "calls that are refused": Threat(
        SYSCALL
        + f"for n in map(int, '{REFUSED_CALLS}'.split()):\n    if call(n, 0, 0, 0, 0, 0) != -1: print('OUT', n)",
        (OK,),
    ),
    "more calls that are refused": Threat(
        SYSCALL
        + f"for n in [int(n) for n in '{MORE_CALLS}'.split()]:\n    if call(n, 0, 0, 0, 0, 0) != -1: print('OUT', n)",
        (OK,),
    ),
    "call of 32-bit x86": Threat(
        "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3')\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))(); print('OUT')",
        (REFUSED,),
        signal=31,
    ),
    "call of x32": Threat(SYSCALL + "call(0x40000000 + 39); print('OUT')", (REFUSED,), signal=31),
    "machine code that starts a program": Threat(
        SYSCALL + "print(call(59, b'/bin/true', 0, 0))", (OK,), stdout=b"-1\n"
    ),
    "higher limits": Threat(
        "import os, resource\n"
        + tries(
            "resource.setrlimit(resource.RLIMIT_AS, (-1, -1))",
            "resource.setrlimit(resource.RLIMIT_CPU, (-1, -1))",
            "resource.prlimit(os.getppid(), resource.RLIMIT_CPU)",
            "os.nice(-5)",
            "os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))",
            "time.clock_settime(0, 0)",
            start="import time",
        ),
        (OK,),
    ),
    "open descriptors": Threat(
        "import os\nfor fd in range(3, 64):\n    try: os.read(fd, 1); print('OUT', fd)\n    except OSError: pass", (OK,)
    ),
    # how a program ends
    "exit code": Threat("import sys; sys.exit(3)", (ERROR,), exit_code=3),
    "exit with a message": Threat("import sys; sys.exit('so long')", (ERROR,), exit_code=1),
    "hard exit without output": Threat("print('lost', end=''); import os; os._exit(0)", (OK,), stdout=b"", exit_code=0),
    "quit": Threat("exit_ = SystemExit; raise exit_", (OK,), exit_code=0),
    "abort": Threat("import os; os.abort()", (SIGNAL,), signal=6),
    "kills itself": Threat("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", (SIGNAL,), signal=9),
    "segmentation fault": Threat("import ctypes; ctypes.string_at(0)", (SIGNAL,), signal=11),
    "deep recursion": Threat("def f(n): return f(n + 1)\nf(0)", (ERROR,), exit_code=1),
    "parser bomb": Threat("eval('(' * 100000)", (ERROR, SIGNAL, MEMORY)),
    "syntax error": Threat("def f(:", (ERROR,), exit_code=1),
    "null byte": Threat("x = '\0'", (ERROR,), exit_code=1),
    "standard output closed": Threat("import os; os.close(1); print('x')", (ERROR,), exit_code=120),
    "standard output is nothing": Threat("import sys; sys.stdout = None; print('x')", (OK,), stdout=b""),
    "standard output lies": Threat(
        "import sys\nclass Bad:\n    def flush(self): raise BaseException('x')\nsys.stdout = Bad()", (OK,), stdout=b""
    ),
    "hook that raises": Threat("import sys\nsys.excepthook = None\n1 / 0", (ERROR,), exit_code=1),
    "loop at exit": Threat("import atexit\n@atexit.register\ndef f():\n    while True: pass", (CPU,), SHORT),
    # what programs may do
    "bytes that are no text": Threat("import os; os.write(1, bytes([255, 0]))", (OK,), stdout=b"\xff\0"),
    "input that is no text": Threat("print(ascii(input()))", (OK,), stdin=b"\xff\n", stdout=b"'\\udcff'\n"),
    "surrogates and emoji": Threat("print('\\U0001F600', '\\udcff')", (OK,), stdout=b"\xf0\x9f\x98\x80 \xff\n"),
    "large input": Threat("import sys; print(len(sys.stdin.read()))", (OK,), stdin=b"x" * 10**7, stdout=b"10000000\n"),
    "large input never read": Threat("print(1)", (OK,), stdin=b"x" * 10**7, stdout=b"1\n"),
    "write to standard input": Threat(tries("os.write(0, b'x')", "os.ftruncate(0, 0)"), (OK,), stdin=b"x"),
    "input by other names": Threat(
        "import sys\nf = open(0)\nprint(f.readline(), sys.stdin.buffer.readline())",
        (OK,),
        stdin=b"1\n2\n",
        stdout=b"1\n b''\n",
    ),
    "input as a device": Threat("print(open('/dev/stdin').read())", (OK,), stdin=b"7", stdout=b"7\n"),
    "deep recursion in a thread": Threat(
        "import sys, threading\nsys.setrecursionlimit(10**6)\nthreading.stack_size(2**27)\n"
        "def f(n): return 0 if n == 0 else 1 + f(n - 1)\nt = threading.Thread(target=lambda: print(f(200000)))\n"
        "t.start(); t.join()",
        (OK,),
        stdout=b"200000\n",
    ),
    "stack limit raised": Threat(
        "import resource as r; r.setrlimit(r.RLIMIT_STACK, (r.RLIM_INFINITY, r.RLIM_INFINITY)); print(1)",
        (OK,),
        stdout=b"1\n",
    ),
    "usual modules": Threat(
        "import asyncio, concurrent.futures as c, sqlite3, signal, pickle, dataclasses, decimal, json\n"
        "import hashlib, inspect, zlib\n"
        "async def f():\n    await asyncio.sleep(0)\n    return 1\n"
        "@dataclasses.dataclass\nclass D:\n    x: int\n"
        "a = asyncio.run(f())\nwith c.ThreadPoolExecutor(2) as pool: b = sum(pool.map(abs, [-1, -2]))\n"
        "q = sqlite3.connect(':memory:').execute('select 3').fetchone()[0]\n"
        "signal.alarm(50)\nprint(a, b, q, pickle.loads(pickle.dumps(D(5))).x, len(str(7 ** 999)))",
        (OK,),
        stdout=b"1 3 3 5 845\n",
    ),
    "temporary file": Threat(
        "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f: f.write('x'); f.seek(0); print(f.read())",
        (OK,),
        stdout=b"x\n",
        tiers="A",
    ),
    "output left in an open file": Threat("out = open(1, 'w')\nout.write('kept')", (OK,), stdout=b"kept"),
    "output at exit": Threat("import atexit; atexit.register(print, 'bye')", (OK,), stdout=b"bye\n"),
    "input object compares equal to all": Threat(
        "class E:\n    def __eq__(self, other): return True\nprint(E() == 1)", (OK,), stdout=b"True\n"
    ),
}
if os.uname().machine != "x86_64":  # these name calls by their numbers there
    for _name in ("calls that are refused", "more calls that are refused", "call of 32-bit x86", "call of x32"):
        del THREATS[_name]
    del THREATS["machine code that starts a program"]
