"""Programming: what tests and programs are worth, who sees what, and that hidden tests stay hidden. Programs run."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from coterie.data.small_programs import make_program_problem
from coterie.env import make_env
from coterie.envs.coding import State, Work, hidden_tests, public_tests
from coterie.envs.suites import judged, read_suite, shown, write_suite
from coterie.errors import ConfigError
from coterie.problems import CallTest, CodeProblem, ProgramTest
from coterie.sandbox.shared import shared_pool
from coterie.testing import assert_env, play_once
from coterie.types import Episode, Json

PROBLEM = make_program_problem(1, "train", 0)
ADD = CodeProblem(
    id="add",
    statement="Add 1.",
    tests=(ProgramTest(stdin="1\n", expected="2\n", public=True), ProgramTest(stdin="5\n", expected="6\n")),
    reference="print(int(input())+1)",
    wrong=("print(int(input())*2)", "print(2)"),
)


def fenced(program: str) -> str:
    return f"```python\n{program}\n```"


def suite_text(*pairs: tuple[str, str]) -> str:
    return write_suite([ProgramTest(stdin=f"{given}\n", expected=f"{wanted}\n") for given, wanted in pairs], False)


def rewards(episode: Episode) -> list[tuple[float | None, float | None]]:
    return [(turn.reward.team, turn.reward.local) for turn in episode.turns if turn.reward]


def judge(text: str, problem: CodeProblem) -> tuple[float, float]:
    tests = read_suite(text, problem, 5, False)
    found = asyncio.run(judged(tests, problem, [problem.reference], problem.wrong, shared_pool()))
    return found.confirmed, found.caught


@pytest.mark.parametrize(
    "options", [{"max_rounds": 1}, {"style": "compact", "max_rounds": 1}, {"roles": ["coder"], "max_rounds": 1}]
)
def test_the_contract_holds(options: dict[str, Json]) -> None:
    assert_env("code", options, tasks=1)


def test_confirmed_tests_count_and_so_do_the_wrong_programs_they_catch() -> None:
    # 3 -> 4 is right and catches both wrong programs (6 and 2); 7 -> 9 is wrong
    assert judge(suite_text(("3", "4"), ("7", "9")), ADD) == (0.5, 1.0)
    assert judge(suite_text(("3", "4")), ADD) == (1.0, 1.0)
    assert judge(suite_text(("7", "9")), ADD) == (0.0, 0.0)


def test_a_suite_that_is_empty_repeats_public_tests_or_catches_nothing_earns_nothing() -> None:
    assert read_suite("no tests", ADD, 5, False) == ()
    assert read_suite(suite_text(("1", "2")), ADD, 5, False) == ()
    assert read_suite(suite_text(("3", " ")), ADD, 5, False) == ()
    assert read_suite(suite_text(("3", "4"), ("3", "4"), ("5", "6"), ("7", "8")), ADD, 2, False) == (
        ProgramTest(stdin="3\n", expected="4\n"),
        ProgramTest(stdin="5\n", expected="6\n"),
    )
    only_two = replace(ADD, wrong=("print(int(input())*2)",), tests=ADD.tests[1:])
    assert judge(suite_text(("1", "2")), only_two) == (0.0, 0.0), "doubling 1 gives 2 too, so nothing is caught"


def test_tests_of_functions_are_asserts_with_literals_and_nothing_else_is_read() -> None:
    problem = replace(ADD, entry="f")
    text = fenced(
        "assert f([1, 2], 'x') == (3,)\nassert f(open('y')) == 1\nassert g(1) == 2\nprint(1)\nassert f(2) == -1"
    )
    assert read_suite(text, problem, 5, False) == (
        CallTest(args="[[1, 2], 'x']", expected="(3,)"),
        CallTest(args="[2]", expected="-1"),
    )
    assert read_suite("1>2;30>-4", ADD, 5, True) == (ProgramTest(stdin="30\n", expected="-4\n"),)
    assert read_suite("1>2;;3", ADD, 5, True) == ()


def test_a_right_program_and_confirmed_tests_end_it_solved() -> None:
    tests = make_env("code", {})
    (task,) = tests.tasks("train", 0, 1)
    hidden = [test for test in PROBLEM.tests if isinstance(test, ProgramTest) and not test.public]
    given = [(test.stdin.strip(), test.expected.strip()) for test in hidden[:2]]
    episode = play_once("code", [suite_text(*given), fenced(PROBLEM.reference)], task=task)
    assert len(episode.turns) == 2
    (tester_team, tester), (coder_team, coder) = rewards(episode)
    assert (tester_team, coder_team, coder) == (0.0, 1.0, 0.1)
    assert tester is not None
    assert tester > 1.0, "all confirmed, and some wrong programs caught"
    assert episode.outcome is not None
    assert (episode.outcome.success, episode.outcome.metrics["agreed"]) == (True, 1.0)


def test_the_share_of_hidden_tests_is_the_reward_and_mismatches_are_shown_to_both() -> None:
    prompts: list[tuple[str, str]] = []
    (given,) = [test for test in PROBLEM.tests if isinstance(test, ProgramTest)][2:3]
    constant = f"print({given.expected.strip()})"

    def say(role: str, prompt: str) -> str:
        prompts.append((role, prompt))
        if role == "tester":
            return suite_text(("40", "12345"))
        return fenced(constant) if len(prompts) < 3 else fenced(PROBLEM.reference)

    episode = play_once("code", say, options={"max_rounds": 2})
    share = sum(test.expected == given.expected for test in hidden_tests(PROBLEM) if isinstance(test, ProgramTest)) / 6
    assert [team for team, _ in rewards(episode)] == [0.0, share, 0.0, 1.0 - share]
    for role, prompt in prompts[2:]:
        assert f'the program prints "{given.expected.strip()}' in prompt, role
        assert constant in prompt
    assert '"12345\\n"' in prompts[1][1], "the coder sees the tests of its round"
    assert episode.outcome is not None
    assert (episode.outcome.success, episode.outcome.truncated) == (True, True), "right, and never agreed"


def test_all_candidates_of_the_coder_that_are_wrong_are_programs_to_be_caught_later_the_latest_first() -> None:
    played, beside = Work("print(1)", share=0.5), (Work("print(2)", share=0.0), Work("print(3)", share=1.0), Work())
    first = State((played,), (), beside)
    assert first.programs(right=False) == ["print(1)", "print(2)"]
    assert first.programs(right=True) == ["print(3)"]
    second = State((*first.works, Work("print(2)", share=0.0)), (), (*first.tried, Work("print(4)", share=0.9)))
    assert set(second.programs(right=False)) == {"print(1)", "print(2)", "print(4)"}


def test_hidden_tests_references_and_wrong_programs_never_reach_a_prompt() -> None:
    prompts: list[str] = []

    def say(role: str, prompt: str) -> str:
        prompts.append(prompt)
        return suite_text(("40", "1")) if role == "tester" else fenced("print(input())")

    episode = play_once("code", say, options={"max_rounds": 3})
    for test in hidden_tests(PROBLEM):
        assert isinstance(test, ProgramTest)
        asked = f"input {json.dumps(test.stdin)} -> output"
        assert not any(asked in prompt for prompt in prompts)
    assert not any(code in prompt for prompt in prompts for code in (PROBLEM.reference, *PROBLEM.wrong))
    assert all(test.public for test in public_tests(PROBLEM))
    assert all(shown(test) in prompt for test in public_tests(PROBLEM) for prompt in prompts)
    assert "tests" not in episode.task.data


def test_public_tests_that_are_not_to_be_shown_reach_no_prompt() -> None:
    prompts: list[str] = []

    def say(role: str, prompt: str) -> str:
        prompts.append(prompt)
        return suite_text(("40", "1")) if role == "tester" else fenced("print('x')")

    play_once("code", say, options={"max_rounds": 2, "show_public": False})
    assert len(prompts) == 4
    assert "the program prints" in prompts[2], "what was tested is shown"
    assert not any(shown(test) in prompt for test in public_tests(PROBLEM) for prompt in prompts)


def test_the_coder_alone_ends_when_the_public_tests_pass() -> None:
    episode = play_once(
        "code", [fenced("print('x')"), fenced(PROBLEM.reference)], options={"roles": ["coder"], "max_rounds": 3}
    )
    assert rewards(episode) == [(0.0, 0.1), (1.0, 0.1)]
    solved = play_once("code", [fenced(PROBLEM.reference)], options={"roles": ["coder"], "solve_bonus": 0.5})
    assert rewards(solved) == [(1.5, 0.1)]
    assert solved.outcome is not None
    assert (solved.outcome.success, solved.outcome.team) == (True, 1.5)


def test_a_program_that_fails_on_every_test_has_no_local_reward_and_one_that_does_not_parse_changes_nothing() -> None:
    options: dict[str, Json] = {"roles": ["coder"], "max_rounds": 2}
    episode = play_once("code", [fenced("raise SystemExit(3)"), fenced("def (")], options=options)
    assert rewards(episode) == [(0.0, 0.0), (0.0, 0.0)]


def test_without_a_reference_the_tester_has_no_verdict_and_all_public_problems_hide_their_tests(tmp_path: Path) -> None:
    rows = [
        {"problem": f"Print {n} and the number that is read.", "tests": [{"input": "1\n", "output": f"{n} 1\n"}]}
        for n in range(40)
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    options: dict[str, Json] = {"data": [str(tmp_path / "a.json")], "max_rounds": 1}
    episode = play_once("code", [suite_text(("2", "0 2")), fenced("print(1)")], options=options)
    assert rewards(episode)[0] == (0.0, None)
    everything = replace(ADD, tests=ADD.tests[:1])
    assert (public_tests(everything), hidden_tests(everything)) == ((), ADD.tests[:1])


@pytest.mark.parametrize(
    ("options", "message"),
    [({"style": "compact", "level": 2}, "level 1"), ({"roles": ["tester"]}, "'coder' must play")],
)
def test_what_cannot_work_is_refused(options: dict[str, Json], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_env("code", options)
