"""How an env is found by name, and which options it refuses."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from coterie.env import Env, env_class, make_env
from coterie.envs.plan_path import PlanPath
from coterie.errors import ConfigError


@pytest.mark.parametrize("name", ["plan_path", "coterie.envs.plan_path:PlanPath"])
def test_an_env_is_found_by_its_name_or_by_module_and_class(name: str) -> None:
    assert env_class(name) is PlanPath


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("plan_pth", "no env named 'plan_pth': .* did you mean 'plan_path'"),
        ("nomodule:Class", "cannot import 'nomodule'.*PYTHONPATH"),
        ("json:JSONDecoder", "no Env subclass 'JSONDecoder'"),
        (":", "no env named ':'"),
    ],
)
def test_a_name_of_no_env_is_refused_with_what_there_is(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        env_class(name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\nimport no_such_thing\n", "raised ModuleNotFoundError: No module named 'no_such_thing' (PATH, line 2)"),
        ("\n\ndef play(:\n", "raised SyntaxError: invalid syntax (broken_env.py, line 3) (PATH, line 3)"),
        ("raise ValueError('five')\n", "raised ValueError: five (PATH, line 1)"),
    ],
)
def test_a_module_that_cannot_be_imported_is_one_line_with_the_place(
    text: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broken_env.py"
    path.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    with pytest.raises(ConfigError) as raised:
        env_class("broken_env:Env")
    assert str(raised.value) == (f"env 'broken_env:Env': importing 'broken_env' {message.replace('PATH', str(path))}")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0])
def test_a_number_that_is_not_finite_or_out_of_range_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"env\.solve_bonus: Input should be"):
        make_env("plan_path", {"solve_bonus": value})


def test_an_unknown_option_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"has no option 'sizes'.* did you mean 'size'"):
        make_env("plan_path", {"sizes": 4})


def test_the_chosen_roles_play_in_workflow_order_and_a_wrong_choice_is_refused() -> None:
    env: Env = make_env("plan_path", {"roles": ["planner", "tool"]})
    assert env.active_roles == ("tool", "planner")
    for roles in ([], ["tool", "tool"], ["coder"]):
        with pytest.raises(ConfigError, match="expected a non-empty choice, each once"):
            make_env("plan_path", {"roles": roles})
