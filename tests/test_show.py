"""An episode as a person reads it."""

from __future__ import annotations

import asyncio
import io
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
from rich.console import Console

from coterie.env import Env, Expert, Prompt, Score, Team
from coterie.envs.maze import Board, execute
from coterie.show import Watched, draw_task, outcome_line, plain, show_episode
from coterie.types import Episode, EpisodeKey, Failure, Outcome, Played, Reward, Scored, StopReason, Task, Turn

TASK = Task(id="t:0", split="test", seed=0, data={"grid": ["S.", ".G"], "clues": "1..2", "text": "a\nb", "n": 3})
KEY = EpisodeKey(seed=0, purpose="play", step=0, task_id="t:0", index=0)
TURN = Turn(
    episode=KEY,
    act=0,
    candidate=0,
    role="scout",
    seat=0,
    round=0,
    policy="main",
    version=7,
    peers="p",
    prompt_ids=(1,),
    completion_ids=(2,),
    sampler_logprobs=(-0.1,),
    text="R",
    stop_reason=StopReason.END,
    temperature=1.0,
    played=False,
    trainable=True,
    reward=Reward(team=0.25, local=0.1),
    error=None,
)
OUTCOME = Outcome(success=True, team=1.5, local={"scout": 0.1}, metrics={"moves": 2.0}, labels={"path": "direct"})


def shown(*turns: Turn, prompt: str = "where?", **options: Any) -> str:
    episode = Episode(key=KEY, task=TASK, turns=turns, outcome=OUTCOME, failure=None)
    out = io.StringIO()
    Console(file=out, width=100).print(show_episode(episode, decode=lambda turn: prompt, alpha=2.0, **options))
    return out.getvalue()


def test_candidates_are_listed_best_first_with_value_team_and_local_and_the_played_one_marked() -> None:
    text = shown(
        replace(TURN, candidate=0, text="worst", reward=Reward(team=0.0, local=0.0)),
        replace(TURN, candidate=1, text="best", reward=Reward(team=0.5, local=0.1), played=True),
        replace(TURN, candidate=2, text="unscored", reward=None, error="ValueError: odd"),
    )
    rows = [line.split() for line in text.splitlines() if line.split()[-1:] and ("worst" in line or "best" in line)]
    # value = alpha * team + local = 2 * 0.5 + 0.1
    assert rows == [["played", "1", "1.100", "0.500", "0.100", "best"], ["0", "0.000", "0.000", "0.000", "worst"]]
    assert "ValueError: odd" in text
    assert text.index("worst") < text.index("unscored")


def test_an_act_names_round_role_seat_policy_and_version() -> None:
    assert "round 3: scout[1] (policy main, v7)" in shown(replace(TURN, round=2, seat=1))


def test_a_long_prompt_is_cut_to_its_end_and_shown_whole_on_request() -> None:
    prompt = "\n".join(f"line {number}" for number in range(40))
    assert "line 27\n" not in shown(TURN, prompt=prompt)
    assert "... line 28\n" in shown(TURN, prompt=prompt)
    assert "line 0\n" in shown(TURN, prompt=prompt, full=True)


def test_what_was_not_played_is_shortened_the_played_answer_never() -> None:
    long = "x" * 200
    assert "x" * 161 not in shown(replace(TURN, text=long)).replace(" ", "").replace("\n", "")
    assert "x" * 200 in shown(replace(TURN, text=long, played=True)).replace(" ", "").replace("\n", "")
    assert "x" * 200 in shown(replace(TURN, text=long), full=True).replace(" ", "").replace("\n", "")


def test_a_truncated_answer_says_so() -> None:
    assert "<length>" in shown(replace(TURN, stop_reason=StopReason.LENGTH))
    assert "<end>" not in shown(TURN)


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x1b]0;title\x07", "\r", "\x9b31m", "\u202e"])
def test_nothing_a_model_writes_is_obeyed_by_the_terminal(evil: str) -> None:
    text = shown(replace(TURN, text=f"a{evil}b", error=evil), prompt=evil, drawings=[evil])
    assert not any(char in text for char in ("\x1b", "\x07", "\r", "\x9b", "\u202e"))


def test_markup_in_an_answer_is_text() -> None:
    assert "[bold]x[/bold]" in shown(replace(TURN, text="[bold]x[/bold]"))
    assert "[/nonsense]" in shown(TURN, prompt="[/nonsense]")


def test_plain_keeps_lines_and_letters_of_all_alphabets() -> None:
    assert plain("Größe ≤ 数\n\ttab") == "Größe ≤ 数\n\\ttab"


def test_a_task_is_drawn_row_by_row_where_it_has_rows() -> None:
    assert draw_task(TASK).plain == "grid:\n  S.\n  .G\nclues: 1..2\ntext:\n  a\n  b\nn: 3"


def test_the_outcome_is_one_line_and_solved_is_not_finished() -> None:
    episode = Episode(key=KEY, task=TASK, turns=(), outcome=OUTCOME, failure=None)
    assert outcome_line(episode) == "solved: team reward 1.5, scout 0.1, moves 2, path direct"
    lost = replace(episode, outcome=Outcome(success=False, team=None, truncated=True))
    assert outcome_line(lost) == "not solved, a limit ended it: no team reward"


def test_a_failed_episode_shows_what_broke() -> None:
    failure = Failure(where="env X", kind="KeyError", message="'a'", traceback="")
    assert outcome_line(Episode(key=KEY, task=TASK, turns=(), outcome=None, failure=failure)) == (
        "failed: env X: KeyError: 'a'"
    )


# ---- watching -----------------------------------------------------------------------------------------------------


@dataclass
class FixedTeam:
    """Answers every act with one text, later acts sooner, so that acts end in another order than they began."""

    rng: random.Random
    text: str = "R"
    num_acts: int = 0

    async def act(
        self,
        role: str,
        prompt: Prompt,
        *,
        score: Score[Any] | None = None,
        round: int | None = None,
        expert: Expert | None = None,
    ) -> Played[Any]:
        self.num_acts += 1
        for _ in range(5 - self.num_acts):
            await asyncio.sleep(0)
        scored = None if score is None else score(self.text)
        return Played(replace(TURN, role=role), scored.result if isinstance(scored, Scored) else None)


class Parallel(Env):
    """Two scored acts at once, then one without a score."""

    roles = ("scout",)

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return [TASK]

    async def play(self, task: Task, team: Team) -> Outcome:
        board = Board.of(task)

        def scored(moves: str) -> Score[Any]:
            return lambda text: Scored(Reward(0.0), execute(board, moves))

        await asyncio.gather(team.act("scout", "1", score=scored("R")), team.act("scout", "2", score=scored("D")))
        await team.act("scout", "3")
        return OUTCOME


def test_what_acts_lead_to_is_kept_in_the_order_they_were_asked_and_is_started_over_by_a_second_attempt() -> None:
    drawings: list[str] = []
    env = Watched(Parallel(), drawings)
    for _ in range(2):
        outcome = asyncio.run(env.play(TASK, FixedTeam(random.Random(0))))
        assert outcome == OUTCOME
        assert drawings == [".A\n.G", "..\nAG", ""]


def test_drawings_are_shown_under_their_act() -> None:
    text = shown(TURN, replace(TURN, act=1, role="planner"), drawings=["FIRST", "SECOND"])
    assert text.index("scout") < text.index("FIRST") < text.index("planner") < text.index("SECOND")
