"""``coterie sandbox check`` from outside."""

from __future__ import annotations

import re

import pytest
from typer.testing import CliRunner

from coterie.cli import app
from coterie.sandbox import canaries


def test_the_check_says_what_holds_and_how_fast_it_is() -> None:
    done = CliRunner().invoke(app, ["sandbox", "check", "--seconds", "0.2"])
    if done.exit_code == 2:
        pytest.skip(f"this host allows no sandbox: {done.output}")
    assert done.exit_code == 0, done.output
    assert re.search(r"^tier [AC]: .*Landlock \d+, seccomp", done.output, flags=re.MULTILINE)
    assert "no attempt to break out got through" in done.output
    assert re.search(r"\d+ trivial programs a second in one slot, [\d.]+ times as many", done.output)


def test_the_check_fails_when_something_gets_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canaries, "canaries", lambda *_: (canaries.Canary("a leak", "print('OUT')"),))
    done = CliRunner().invoke(app, ["sandbox", "check", "--seconds", "0.2"])
    assert done.exit_code == 2
    assert "a leak" in done.output
