"""The fault hook itself: silent without its variable, exact about where it fires, strict about its spelling."""

from __future__ import annotations

import errno
import signal

import pytest

from coterie.errors import ConfigError
from coterie.faults import VARIABLE, InjectedFaultError, fault_point


def test_nothing_happens_without_the_variable_or_at_another_point_or_step(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = []
    for setting in ("", "update:3:exc", "rollout:4:exc"):
        monkeypatch.setenv(VARIABLE, setting)
        fault_point("rollout", 3)
        reached.append(setting)
    monkeypatch.delenv(VARIABLE)
    fault_point("rollout", 3)
    assert len(reached) == 3


def test_the_named_point_fails_in_the_named_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "rollout:3:exc")
    with pytest.raises(InjectedFaultError, match="rollout, step 3"):
        fault_point("rollout", 3)
    monkeypatch.setenv(VARIABLE, "rollout:3:enospc")
    with pytest.raises(OSError, match="No space left") as told:
        fault_point("rollout", 3)
    assert told.value.errno == errno.ENOSPC


def test_term_is_a_signal_that_a_handler_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        monkeypatch.setenv(VARIABLE, "update:2:term")
        fault_point("update", 2)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [signal.SIGTERM]


@pytest.mark.parametrize("setting", ["rollout", "rollout:x", "rollout:3:kill", "rollout:3:exc:4", "rollout:-1"])
def test_a_variable_that_cannot_be_read_is_an_error_not_a_test_that_tests_nothing(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, setting)
    with pytest.raises(ConfigError, match="point:step"):
        fault_point("rollout", 3)
