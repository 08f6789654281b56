"""Named places where a test can break a run: ``COTERIE_FAULT=point:step[:kind]``. Without the variable, nothing."""

from __future__ import annotations

import errno
import os
import signal
import time

from coterie.errors import ConfigError

VARIABLE = "COTERIE_FAULT"
KINDS = ("kill9", "term", "exc", "enospc", "hang")
_HANG_S = 3600.0


class InjectedFaultError(RuntimeError):
    """What the kind ``exc`` raises; on purpose none of Coterie's own errors, so that nothing expects it."""


def fault_point(name: str, step: int) -> None:
    """Do nothing, unless ``COTERIE_FAULT`` names this point at this step; then fail in the stated way.

    Kinds: ``kill9`` (the default: SIGKILL to this process), ``term`` (SIGTERM to it), ``exc`` (``InjectedFaultError``),
    ``enospc`` (``OSError`` as from a full disk), ``hang``. Raises ``ConfigError`` for a variable that cannot be read.
    """
    setting = os.environ.get(VARIABLE)
    if not setting:
        return
    point, wanted_step, kind = _parse(setting)
    if (point, wanted_step) != (name, step):
        return
    if kind == "kill9":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "exc":
        raise InjectedFaultError(f"injected at {name}, step {step}")
    elif kind == "enospc":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), f"<injected at {name}, step {step}>")
    else:
        time.sleep(_HANG_S)


def _parse(setting: str) -> tuple[str, int, str]:
    """Return (point, step, kind) of the variable's text."""
    parts = setting.split(":")
    kind = parts[2] if len(parts) == 3 else KINDS[0]
    if len(parts) not in (2, 3) or not parts[1].isdecimal() or kind not in KINDS:
        raise ConfigError(f"{VARIABLE}={setting!r}: expected point:step or point:step:kind, kind one of {list(KINDS)}")
    return parts[0], int(parts[1]), kind
