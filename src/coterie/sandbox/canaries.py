"""Programs that try to get out. A tier is what it holds against, so each pool runs them before anything else.

Every program prints ``OUT`` when it gets through, and is harmless where it does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coterie.sandbox.execution import Execution, Limits, Verdict

_SHORT = Limits(cpu_s=2.0, wall_s=20.0, memory_mb=256, output_bytes=2**16)
_TRY = "try:\n    {attempt}\nexcept OSError: pass\nelse: print('OUT')\n"


@dataclass(frozen=True, slots=True)
class Canary:
    """One attempt: the program, its limits, and the verdicts of which one shows that it was held."""

    name: str
    program: str
    limits: Limits = _SHORT
    verdicts: tuple[Verdict, ...] = (Verdict.OK,)

    def held(self, execution: Execution) -> bool:
        """Return whether the attempt failed, in the way it should."""
        return execution.verdict in self.verdicts and b"OUT" not in execution.stdout


def canaries(secret: str, marker: str, trainer: int) -> tuple[Canary, ...]:
    """Return the attempts on a file of the trainer's, on a place where nothing may be written, and on the trainer."""
    folders = (os.path.dirname(marker), "/", "/usr/lib", "/var/tmp", "/dev/shm", "/dev", os.getcwd())
    places = [os.path.join(folder, os.path.basename(marker)) for folder in folders]
    connect = "s = socket.socket(); s.settimeout(1); s.connect(('127.0.0.1', 9))"
    return (
        Canary("read /etc/passwd", _TRY.format(attempt="open('/etc/passwd').read()")),
        Canary("read a file of the trainer", _TRY.format(attempt=f"open({secret!r}).read()")),
        Canary("environment", _ENVIRONMENT),
        Canary("other processes in /proc", _PROC.format(trainer=trainer)),
        Canary("network", "import socket\n" + _TRY.format(attempt=connect).replace("OSError", "PermissionError")),
        Canary("unix socket", "import socket\n" + _TRY.format(attempt="socket.socket(socket.AF_UNIX)")),
        Canary("fork", _TRY.format(attempt="import os; pid = os.fork() or os._exit(0)")),
        Canary("start a program", _TRY.format(attempt="import os; os.execv('/proc/self/exe', ['python', '-c', ''])")),
        Canary("start a shell", "import os\nif os.system('exit 0') == 0: print('OUT')"),
        *(
            Canary(f"signal {who}", _TRY.format(attempt=f"import os; os.kill({pid}, 0)"), _SHORT)
            for who, pid in (("the trainer", trainer), ("the parent", "os.getppid()"), ("everybody", "-1"))
        ),
        Canary("write outside", _WRITE.format(places=places)),
        Canary("raise a limit", _LIMIT),
        Canary("memory", "x = bytearray(300 * 2**20)\nprint('OUT')", _SHORT, (Verdict.MEMORY,)),
        Canary("output", "import sys\nsys.stdout.write('x' * 2**17)", _SHORT, (Verdict.OUTPUT_LIMIT,)),
        Canary("sleep", "import time\ntime.sleep(60)", Limits(cpu_s=2.0, wall_s=0.2), (Verdict.WALL_TIME,)),
        Canary("loop", "while True: pass", Limits(cpu_s=0.1), (Verdict.CPU_TIME,)),
    )


_ENVIRONMENT = """
import os
known = 'PATH LANG HOME TMPDIR PWD LC_CTYPE PYTHONHASHSEED OPENBLAS_NUM_THREADS OMP_NUM_THREADS MALLOC_ARENA_MAX'
if set(os.environ) - set(known.split()): print('OUT')
"""
_PROC = """
import os
try: pids = [int(name) for name in os.listdir('/proc') if name.isdigit()]
except OSError: pids = []
for pid in {{*pids, 1, {trainer}, os.getppid()}} - {{os.getpid()}}:
    for name in ('environ', 'mem', 'maps'):
        try:
            with open(f'/proc/{{pid}}/{{name}}', 'rb') as file: file.read(1)
            print('OUT', pid, name)
        except OSError: pass
"""
_WRITE = """
import os
for place in {places!r}:
    try:
        open(place, 'x').close()
        print('OUT', place)
        os.unlink(place)
    except OSError: pass
"""
_LIMIT = """
import resource
try:
    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
    print('OUT')
except (OSError, ValueError): pass
"""


@contextmanager
def _bait() -> Iterator[tuple[str, str]]:
    """Make a readable file outside, and name a place where none may appear."""
    with tempfile.TemporaryDirectory(prefix="coterie-canary-") as folder:
        os.chmod(folder, 0o777)
        secret = os.path.join(folder, "secret")
        with open(secret, "w", encoding="utf-8") as file:
            file.write("secret")
        yield secret, os.path.join(folder, f"canary-{os.getpid()}")


def escaped(execute: Callable[[str, Limits], Execution]) -> list[str]:
    """Run all canaries and return what was not held, each with what it came to; empty when all is well."""
    with _bait() as (secret, marker):
        attempts = [
            (canary, execute(canary.program, canary.limits)) for canary in canaries(secret, marker, os.getpid())
        ]
    return [
        f"{canary.name}: {execution.verdict}, {execution.stdout[:80]!r} {execution.stderr[-200:]!r}"
        for canary, execution in attempts
        if not canary.held(execution)
    ]
