"""The loop: play, credit, step, record; and everything that lets a run stop anywhere and go on bit for bit."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from coterie.batch import sample_of
from coterie.checkpoint import Checkpoint, CheckpointStore
from coterie.config import Recipe
from coterie.credit import CreditReport, assign
from coterie.errors import TrainError
from coterie.evaluate import Score, evaluate, solved_counts
from coterie.faults import fault_point
from coterie.imitate import Progress, warm_start
from coterie.learner import Update
from coterie.learners import Learns
from coterie.lineup import Lineup, TaskStream
from coterie.machine import peak_memory, release_memory
from coterie.record import Recorder, flat_numbers, mean
from coterie.rollout import plays_of
from coterie.spent import part
from coterie.types import Credit, Episode, Json, Sample, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one training step did, for whoever shows progress."""

    step: int
    steps: int
    metrics: Mapping[str, Json]
    time_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who is told how far a run is. The defaults of the command line draw it; tests ignore it."""

    step: Callable[[StepReport], None]
    score: Callable[[str, Score], None]
    imitate: Progress
    stop: Callable[[], None]
    """Called between batches and steps; raises to abandon the step (an interrupt)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """The episodes of a step with their credit."""

    episodes: tuple[Episode, ...]
    credit: CreditReport
    refilled: int
    replaced_tokens: int
    """Tokens generated for episodes that ``refill`` replaced; they are counted, and nothing else of them is kept."""


class Run:
    """One training run in its folder: a lineup, a learner per trained policy, the task stream, the journals."""

    def __init__(self, lineup: Lineup, run_dir: Path, recorder: Recorder, listener: Listener) -> None:
        """Prepare to train; nothing is loaded or written yet."""
        recipe = lineup.recipe
        self.recipe: Recipe = recipe
        self.lineup = lineup
        self.recorder = recorder
        self.listener = listener
        self.store = CheckpointStore(run_dir, keep=recipe.train.keep)
        self.stream = TaskStream(lineup.make_env(), "train", recipe.seed)
        self.learners: dict[str, Learns] = {}
        self.next_step = 0
        self.position = 0  # of the stream after the last whole step; tasks of an abandoned step are still to come
        self.best: float | None = None
        self.tokens_generated = 0
        self.imitation: dict[str, float] = {}
        self.owed: list[str] = []  # evaluations that are due and not written yet, by name
        self.spent_s = 0.0
        self.peaks: dict[str, int] = {}
        self._phase_ends("load")

    # ---- the loop -----------------------------------------------------------------------------------------------

    def train(self) -> None:
        """Train from ``next_step`` to the last step of the recipe, saving and validating on the way."""
        began = time.monotonic() - self.spent_s
        gc.freeze()  # what is loaded by now stays; collecting over it takes a fifth of a short rollout
        self.pay()
        while not self.over:
            step = self.next_step
            self.listener.stop()
            start = time.monotonic()
            with part("rollout: environment"):
                played = self.play(step)
            self._phase_ends("rollout")
            rolled = time.monotonic()
            with part("update: other"):
                updates = self.update(played.credit)
            self._phase_ends("update")
            done = time.monotonic()
            self.next_step, self.position = step + 1, self.stream.position
            resting = [name for name in self.learners if name not in updates]
            with part("records"):
                metrics = step_metrics(step, played, updates, resting)
                tokens = self.tokens_generated
                self._note(step, played, metrics, (done - began, rolled - start, done - rolled))
            if self._validation_is_due(tokens) and not self.over:
                self.owed.append("validation")
                self.pay()
            self.spent_s = time.monotonic() - began
            if self.next_step % self.recipe.train.save_every == 0 or self.over:
                self.save()

    @property
    def over(self) -> bool:
        """Whether the steps, or the tokens that may be generated, are used up."""
        return self.recipe.is_over(self.next_step, self.tokens_generated)

    def play(self, step: int) -> Played:
        """Play the tasks of a step; with ``refill``, replace tasks that taught nothing by fresh ones, once."""
        tasks = self.stream.take(self.recipe.train.tasks_per_step)
        played = self._play(step, tasks)
        flat = flat_tasks(played.credit)
        count = min(len(flat), self.recipe.train.refill)
        if not count:
            return played
        replaced = set(sorted(flat)[:count])
        kept = [task for task in tasks if task.id not in replaced]
        known = {task.id for task in tasks}
        fresh = [task for task in self.stream.take(count) if task.id not in known]
        again = self._play(step, fresh)
        ids = {task.id for task in kept}
        episodes = tuple(e for e in played.episodes if e.key.task_id in ids) + again.episodes
        dropped = num_tokens([e for e in played.episodes if e.key.task_id not in ids])
        return Played(episodes=episodes, credit=self._credit(episodes), refilled=len(fresh), replaced_tokens=dropped)

    def update(self, report: CreditReport) -> dict[str, Update]:
        """Give every policy that this step trains the samples of its roles: ``steps_per_batch`` optimiser steps."""
        samples = samples_by_policy(report.credits, self.learners)
        begun = {
            name: learner.begin(samples[name], self.spent)
            for name, learner in self.learners.items()
            if self.recipe.policies[name].trains_at(self.next_step)
        }
        updates = {}
        for name, finish in begun.items():
            fault_point("update", self.next_step)
            updates[name] = finish()
            learner = self.learners[name]
            if learner.skipped_in_a_row >= self.recipe.train.max_skipped_updates:
                raise TrainError(
                    f"policy {name!r}: {learner.skipped_in_a_row} updates in a row had a non-finite gradient or loss; "
                    "no weight was changed by them. Lower the learning rate or look at the last episodes"
                )
        return updates

    # ---- parts of it --------------------------------------------------------------------------------------------

    def warm_start(self) -> None:
        """Imitate the experts if the recipe says so, then make the learners of the policies as they are now."""
        if self.recipe.imitate is not None:
            with part("warm start", whole=True):
                self.imitation = warm_start(self.lineup, self._event, self.listener.stop, self.listener.imitate)
            self._phase_ends("warm start")
        self.make_learners()

    def make_learners(self) -> None:
        """Make one learner per trained policy."""
        self.learners = self.lineup.make_learners()

    def pay(self) -> None:
        """Do the evaluations that are due. One that an interrupt cuts short stays due, in the checkpoint too."""
        table = self.recipe.eval
        while self.owed:
            name = self.owed[0]
            if name == "validation":
                self.validate()
            else:
                greedy = name.endswith("_greedy")
                plays = table.plays if greedy or table.final_plays is None else table.final_plays
                temperature = 0.0 if greedy else table.temperature
                self.evaluate(name, table.final_split, table.final_tasks, temperature, plays)
            del self.owed[0]

    def validate(self) -> Score:
        """Evaluate on the validation split; a new best is kept as ``checkpoints/best``."""
        table = self.recipe.eval
        score = self.evaluate("validation", table.split, table.tasks, table.temperature, table.plays)
        if self.best is None or score.success > self.best:
            self.best = score.success
            self.store.save_best(self.next_step, self._write, {"success": score.success})
        return score

    def evaluate(self, name: str, split: str, tasks: int, temperature: float, plays: int) -> Score:
        """Evaluate by plain play and write the row, and, but for a validation, what became of each task."""
        with part("evaluation", whole=True):
            score, episodes = evaluate(
                self.lineup,
                split=split,
                tasks=tasks,
                plays=plays,
                temperature=temperature,
                event=self._event,
                before_batch=self.listener.stop,
            )
        self._phase_ends("evaluation")
        self.recorder.evals(self.next_step, {"name": name, **score.row()})
        if name != "validation":
            self.recorder.solved(name, solved_counts(episodes))
        self.listener.score(name, score)
        return score

    def save(self) -> Path:
        """Write a checkpoint with everything needed to go on bit for bit."""
        with part("saving", whole=True):
            return self._save()

    def _save(self) -> Path:
        self.recorder.sync()
        meta: dict[str, Json] = {
            "next_step": self.next_step,
            "position": self.position,
            "best": self.best,
            "tokens_generated": self.tokens_generated,
            "spent_s": self.spent_s,
            "imitation": dict(self.imitation),
            "owed": list(self.owed),
            "torch_threads": torch.get_num_threads(),
        }
        path = self.store.save(self.next_step, self._write, self.recorder.journals, meta)
        for name, learner in self.learners.items():
            learner.kept(path / name)
        return path

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take over a checkpoint: weights, optimisers, versions, data position, best score."""
        self.lineup.load_warmed(checkpoint.path)
        self.make_learners()
        for name, learner in self.learners.items():
            learner.load(checkpoint.path / name)
        meta = checkpoint.meta
        self.next_step = int(_number(meta, "next_step"))
        self.position = self.stream.position = int(_number(meta, "position"))
        self.tokens_generated = int(_number(meta, "tokens_generated"))
        self.spent_s = _number(meta, "spent_s")
        self.best = None if meta.get("best") is None else _number(meta, "best")
        imitation, owed = meta.get("imitation"), meta.get("owed")
        self.imitation = flat_numbers(imitation) if isinstance(imitation, Mapping) else {}
        self.owed = [str(name) for name in owed] if isinstance(owed, list) else []

    # ---- machinery below ----------------------------------------------------------------------------------------

    def _phase_ends(self, name: str) -> None:
        """Note the peak of the process where this phase raised it, and give back what the next one cannot use.

        An update's tensors do not fit where those of a rollout were, and the reverse.
        """
        peak = peak_memory()
        if peak is not None and peak > max(self.peaks.values(), default=0):
            self.peaks[name] = peak
        release_memory()

    @property
    def spent(self) -> float:
        """The share of ``train.max_generated_tokens`` that is used; 0 where there is no such limit."""
        budget = self.recipe.train.max_generated_tokens
        return self.tokens_generated / budget if budget else 0.0

    def _validation_is_due(self, tokens: int) -> bool:
        """Return whether the step just made, before which there were ``tokens``, is one to validate after."""
        table = self.recipe.eval
        by_steps = table.every > 0 and self.next_step % table.every == 0
        every = table.every_tokens
        return by_steps or (every > 0 and tokens // every < self.tokens_generated // every)

    def _play(self, step: int, tasks: Sequence[Task]) -> Played:
        rollout = self.lineup.rollout(training=True, event=self._event, before_batch=self.listener.stop, step=step)
        sampling = self.recipe.sampling
        plays = plays_of(
            tasks,
            seed=self.recipe.seed,
            purpose="train",
            step=step,
            episodes_per_task=sampling.num_candidates if sampling.mode == "chain" else 1,
        )
        episodes = tuple(rollout.run(plays))
        return Played(episodes=episodes, credit=self._credit(episodes), refilled=0, replaced_tokens=0)

    def _credit(self, episodes: Sequence[Episode]) -> CreditReport:
        return assign(episodes, self.lineup.credit_rule(), self.recipe.sampling.num_candidates)

    def _note(self, step: int, played: Played, metrics: Mapping[str, Json], clock: tuple[float, float, float]) -> None:
        """Write the rows of a step and tell the listener."""
        time_s, rollout_s, update_s = clock
        generated = num_tokens(played.episodes) + played.replaced_tokens
        self.tokens_generated += generated
        per_s = generated / rollout_s if rollout_s > 0 else 0.0
        fault_point("metrics", step)
        self.recorder.metrics(step, metrics)
        self.recorder.timings(
            step, {"time_s": time_s, "rollout_s": rollout_s, "update_s": update_s, "tokens_per_s": per_s}
        )
        self.recorder.episodes(step, played.episodes, played.credit.credits)
        steps = self.recipe.train.steps
        if self.spent:  # as many as there will be if the others cost what these did
            steps = min(steps, math.ceil((step + 1) / min(1.0, self.spent)))
        self.listener.step(StepReport(step=step, steps=steps, metrics=metrics, time_s=time_s, tokens_per_s=per_s))

    def _write(self, folder: Path) -> None:
        for name, learner in self.learners.items():
            (folder / name).mkdir()
            learner.save(folder / name)
        self.lineup.save_warmed(folder)

    def _event(self, kind: str, fields: Mapping[str, str | int]) -> None:
        self.recorder.event(kind, **dict(fields))


def samples_by_policy(credits: Sequence[Credit], policies: Mapping[str, object]) -> dict[str, list[Sample]]:
    """Return the samples of each trained policy: every trainable turn that has an advantage, played or not."""
    samples: dict[str, list[Sample]] = {name: [] for name in policies}
    for credit in credits:
        turn = credit.turn
        if credit.advantage is None or not turn.trainable:
            continue
        samples[turn.policy].append(sample_of(turn, credit.advantage))
    return samples


def num_tokens(episodes: Sequence[Episode]) -> int:
    """Return how many tokens were sampled in and for these episodes: all candidates, and the plays of lookahead."""
    own = sum(len(turn.completion_ids) for episode in episodes for turn in episode.turns)
    return own + sum(episode.lookahead_tokens for episode in episodes)


def flat_tasks(report: CreditReport) -> set[str]:
    """Return the ids of tasks none of whose turns has a non-zero advantage."""
    taught = {credit.turn.episode.task_id for credit in report.credits if credit.advantage}
    return {credit.turn.episode.task_id for credit in report.credits} - taught


def step_metrics(
    step: int, played: Played, updates: Mapping[str, Update], resting: Sequence[str] = ()
) -> dict[str, Json]:
    """Return the row of ``metrics.jsonl``; nothing in it depends on the clock.

    ``reward/team`` is the mean outcome of the episodes, ``reward/<role>`` the mean value (alpha * team + local) of all
    the role's candidates. ``success_selected`` is that of the played paths, chosen by reward in a tree.
    """
    episodes, report = played.episodes, played.credit
    outcomes = [episode.outcome for episode in episodes if episode.outcome is not None]
    turns = [turn for episode in episodes for turn in episode.turns]
    roles = sorted({turn.role for turn in turns})
    trained = [credit for credit in report.credits if credit.advantage is not None]
    row: dict[str, Json] = {
        "step": step,
        "success_selected": mean(float(outcome.success) for outcome in outcomes),
        "reward/team": mean(outcome.team for outcome in outcomes),
        "peer_sets": report.peer_sets,
        "peer_sets_zero_variance": report.peer_sets_zero_variance,
        "peer_sets_short": report.peer_sets_short,
        "peer_sets_mixed_prompts": report.peer_sets_mixed_prompts,
        "turns": len(turns),
        "turns_truncated": sum(turn.stop_reason.truncated for turn in turns),
        "episodes_failed": sum(episode.failure is not None for episode in episodes),
        "episodes_retried": sum(episode.attempts > 1 for episode in episodes),
        "rewards_invalid": report.rewards_invalid,
        "tasks_refilled": played.refilled,
        "tokens_generated": num_tokens(episodes) + played.replaced_tokens,
        "tokens_trained": sum(len(credit.turn.completion_ids) for credit in trained),
    }
    for env in sorted({outcome.labels["env"] for outcome in outcomes if "env" in outcome.labels}):
        own = [outcome for outcome in outcomes if outcome.labels.get("env") == env]
        row[f"success_selected/{env}"] = mean(float(outcome.success) for outcome in own)
        row[f"reward/team/{env}"] = mean(outcome.team for outcome in own)
    for role in roles:
        row[f"reward/{role}"] = mean(credit.value for credit in report.credits if credit.turn.role == role)
        row[f"tokens/{role}"] = sum(len(turn.completion_ids) for turn in turns if turn.role == role)
    for name, update in updates.items():
        row |= {f"policy/{name}/{key}": value for key, value in update.numbers().items()}
    if resting:
        row["policies_resting"] = list(resting)
    row["updates_skipped"] = sum(update.skipped_non_finite for update in updates.values())
    row["updates_empty"] = sum(not update.stepped and not update.skipped_non_finite for update in updates.values())
    return row


def _number(meta: Mapping[str, Json], key: str) -> float:
    """Return a number of a checkpoint's meta."""
    value = meta.get(key)
    if not isinstance(value, int | float):
        raise TrainError(f"the checkpoint's {key} is {value!r}: expected a number")
    return value
