"""An env for the tests of training; nothing here is a test. It loads no torch: whoever plays it starts at once."""

from __future__ import annotations

import random
from typing import Literal

from coterie.env import Env, EnvOptions, Team
from coterie.types import Outcome, Reward, Scored, Task


class LettersOptions(EnvOptions):
    """Options of ``Letters``."""

    size: int | None = None
    rounds: int = 2
    mood: Literal["plain", "flat", "gaps", "lazy"] = "plain"
    broken: int = 0
    """Every so many training tasks cannot be played; 0: all can."""
    early: bool = False
    """End after the first round whose last text is worth 0.5 or more."""


class Letters(Env):
    """Two roles write letters in turn; a text is worth the sum of its characters modulo 5, divided by 4."""

    roles = ("first", "second")
    scored_roles = ("first", "second")
    Options = LettersOptions
    options: LettersOptions

    def num_tasks(self, split: str) -> int | None:
        return self.options.size

    def tasks(self, split: str, start: int, count: int) -> list[Task]:
        return [
            Task(id=f"{split}-{i}", split=split, seed=i, data={"letter": chr(97 + i % 26), "number": i})
            for i in range(start, start + count)
        ]

    async def play(self, task: Task, team: Team) -> Outcome:
        if self.options.broken and task.split == "train" and task.seed % self.options.broken == 0:
            raise ValueError(f"no play of {task.id}")
        worth = 0.0
        letter = str(task.data["letter"])
        for _ in range(self.options.rounds):
            for role in self.active_roles:
                done = await team.act(role, letter, score=self._score, expert=self._expert)
                worth += done.result / (len(self.active_roles) * self.options.rounds)
                letter = (letter + done.text)[-3:]
            if self.options.early and done.result >= 0.5:
                break
        return Outcome(success=worth > 0.7, team=worth, local=dict.fromkeys(self.active_roles, 0.0))

    def _score(self, text: str) -> Scored[float]:
        value = sum(map(ord, text)) % 5 / 4
        if self.options.mood == "flat":
            value = 0.5
        if self.options.mood == "lazy":  # flat unless the first letter is one of few
            value = 1.0 if text[:1] in tuple("abcdefgh") else 0.0
        missing = self.options.mood == "gaps" and sum(map(ord, text)) % 3 == 0
        return Scored(Reward(float("nan") if missing else value), value)

    @staticmethod
    def _expert(rng: random.Random, noise: float) -> str:
        return rng.choice("xyz") if rng.random() < noise else "q"


class FourLetters(Letters):
    """``Letters`` with four roles, for teams of many policies."""

    roles = ("first", "second", "third", "fourth")
    scored_roles = roles
