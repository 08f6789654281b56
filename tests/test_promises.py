"""What Coterie promises about play and credit, one scripted end-to-end test per promise.

 1. Roles of one round see each other: a later prompt holds what was just said.
 2. In a tree every role branches by itself: its K candidates get K rewards of their own.
 3. The candidate that was chosen moves the real state: the next round goes on from there.
 4. An act that ends the episode is trained like any other, all K candidates of it.
 5. A peer set is K answers to one prompt: T tasks with A acts each make T * A sets of K, and never mix problems.
 6. A chain keeps every turn of every round, also of episodes that ended early; statistics count episodes, not turns.
 7. What is sampled is what is scored: no hidden penalty or truncation; the engine's log-probs are the model's.
 8. A failed generation is a failed episode, counted; it never becomes a turn.
 9. Nothing can be farmed: a closed walk earns exactly 0, and the prompt shows where one stands.
10. A grid that breaks the clues solves nothing; no puzzle is in two splits.
11. Ids and log-probs have one length; the ids the engine saw and gave are the ids that are trained.
12. Peer sets partition the trainable turns, and advantages sum to 0 over each.
13. Every trained token was sampled by its own policy at the version that is now stepped; others are refused.
14. The same seed plays the same episodes, byte by byte, whatever else is in the batch.
15. A step in which nothing carries gradient is reported as no step, and no weight moves.
16. One row per trainable turn with a verdict: none added, none lost, none repeated.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from coterie.batch import sample_of
from coterie.config import PolicyTable
from coterie.credit import CreditReport, CreditRule, assign
from coterie.engines import Completion, Request, Sampling
from coterie.engines.scripted import Answer, ScriptedEngine
from coterie.engines.torch import TorchEngine
from coterie.env import make_env
from coterie.errors import TrainError
from coterie.learner import Learner
from coterie.models.chat import ChatRenderer
from coterie.models.policy import Policy
from coterie.models.tiny import tiny_model, tiny_tokenizer
from coterie.rollout import Limits, Rollout, plays_of
from coterie.run_tables import LossTable
from coterie.team import Plan
from coterie.testing import play_once, seats_of
from coterie.train import samples_by_policy
from coterie.types import Episode, Json, Reward, Sample, StopReason, Task

OPTIONS: dict[str, Json] = {"size": 4, "walls": 0.0, "style": "compact", "max_moves": 2, "max_rounds": 3}
TREE = Plan(mode="tree", num_candidates=4)


def corridor(number: int = 0) -> Task:
    """Return a straight way of three moves: phi is 0 at S, 1/3, 2/3, and 1 at G; solving adds 1."""
    grid = ["S..G", "####", "####", "####"]
    return Task(id=f"corridor:{number}", split="train", seed=number, data={"grid": grid})


def played(
    script: Callable[[Request], Sequence[Answer]],
    *,
    plan: Plan = TREE,
    tasks: Sequence[Task] | None = None,
    each: int = 1,
    limits: Limits | None = None,
) -> tuple[list[Episode], ScriptedEngine]:
    engine = ScriptedEngine(script)
    rollout = Rollout(
        make_env=lambda: make_env("plan_path", OPTIONS),
        seats=seats_of(("tool", "planner"), renderer=engine.renderer),
        plan=plan,
        engine=engine,
        limits=Limits(retries=0, max_failed_fraction=1.0) if limits is None else limits,
    )
    chosen = [corridor()] if tasks is None else tasks
    return rollout.run(plays_of(chosen, seed=0, purpose="train", step=0, episodes_per_task=each)), engine


def walk(request: Request) -> list[str]:
    """Candidates: a wall, one step, two steps, nonsense. Two steps are the best wherever one stands before the goal."""
    return ["U", "R", "RR", "?!"][: len(request.candidates)]


def role_rewards(episode: Episode, act: int) -> list[Reward | None]:
    return [turn.reward for turn in episode.turns if turn.act == act]


def test_1_the_planner_sees_the_tools_draft_of_the_same_round() -> None:
    _, engine = played(walk)
    prompts = [(request.role, engine.prompt(request)) for request in engine.requests]
    assert [role for role, _ in prompts] == ["tool", "planner", "tool", "planner"]
    assert "RR" not in prompts[0][1]
    assert "RR" in prompts[1][1]


def test_2_every_role_branches_and_every_candidate_has_its_own_reward() -> None:
    (episode,), _ = played(walk)
    third = pytest.approx(1 / 3)
    for act in (0, 1):  # tool, then planner, both at the start
        rewards = role_rewards(episode, act)
        assert [reward.team for reward in rewards if reward] == [0.0, third, pytest.approx(2 / 3), 0.0]
        assert [reward.local for reward in rewards if reward] == [0.1, 0.1, 0.1, 0.0]
    advantages = [c.advantage for c in assign([episode], CreditRule(), 4).credits if c.turn.act == 1]
    assert len({round(value, 6) for value in advantages if value is not None}) == 4


def test_3_the_chosen_candidate_moves_the_real_state() -> None:
    (episode,), engine = played(walk)
    start, _, later, _ = [engine.prompt(request) for request in engine.requests]
    assert start != later
    # after RR one step is left: from here both R and RR reach the goal, 1/3 and the bonus of 1
    assert [reward.team for reward in role_rewards(episode, 3) if reward] == [
        0.0,
        pytest.approx(4 / 3),
        pytest.approx(4 / 3),
        0.0,
    ]
    assert episode.outcome is not None
    assert episode.outcome.success
    assert episode.outcome.team == pytest.approx(2.0)
    assert sum(t.reward.team or 0.0 for t in episode.played if t.role == "planner" and t.reward) == pytest.approx(2.0)


def test_4_the_act_that_wins_is_trained_with_all_its_candidates() -> None:
    (episode,), _ = played(walk)
    credits = assign([episode], CreditRule(), 4).credits
    last = [c for c in credits if c.turn.act == 3]
    assert [c.turn.role for c in last] == ["planner"] * 4
    # values 0.1, 4/3 + 0.1, 4/3 + 0.1, 0: only the two that win are above the mean
    assert [math.copysign(1.0, c.advantage) for c in last if c.advantage is not None] == [-1.0, 1.0, 1.0, -1.0]


def test_5_sets_are_k_answers_to_one_prompt_of_one_problem() -> None:
    """Fault 5 of the reference: 64 sets of 8 are expected, not 8 sets of 64."""
    tasks = make_env("plan_path", OPTIONS).tasks("train", 0, 16)
    plan = Plan(mode="tree", num_candidates=8)
    episodes, _ = played(lambda request: ["?"] * 8, plan=plan, tasks=tasks)
    turns = [turn for episode in episodes for turn in episode.turns if turn.round < 2]
    sets = defaultdict(list)
    for turn in turns:
        sets[turn.peers].append(turn)
    assert Counter(len(members) for members in sets.values()) == {8: 64}  # 16 tasks x 2 roles x 2 rounds
    for members in sets.values():
        assert len({(t.episode.task_id, t.role, t.round, t.policy, t.version, t.prompt_ids) for t in members}) == 1


def test_6_a_chain_keeps_all_rounds_of_all_episodes_and_weighs_episodes() -> None:
    """Fault 6: episodes 0 and 1 win after one and two rounds, 2 and 3 never; all their turns are trained."""
    speed = {0: "RR", 1: "RR", 2: "U", 3: "U"}

    def script(request: Request) -> list[str]:
        if request.episode.index == 0:
            return ["RR" if request.act < 2 else "R"]
        return [speed[request.episode.index]] if request.act > 1 else ["R" if request.episode.index == 1 else "U"]

    plan = Plan(mode="chain", num_candidates=4, group_by=("task",))
    episodes, _ = played(script, plan=plan, each=4)
    assert [len(episode.turns) for episode in episodes] == [4, 4, 6, 6]
    report = assign(episodes, CreditRule(returns="final", scale="none", by_episode=True), 4)
    assert len(report.credits) == 20
    # outcomes 2, 2, 0, 0 have mean 1 over episodes; over turns it would be 16/20
    assert [c.advantage for c in report.credits] == pytest.approx([1.0] * 8 + [-1.0] * 12)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_7_the_sampled_distribution_is_the_models_own(temperature: float) -> None:
    assert [field.name for field in dataclasses.fields(Sampling)] == ["temperature", "max_tokens", "stop"]
    policy = tiny_policy()
    for turn in tiny_episodes(policy, temperature=temperature)[0].turns:
        ids = torch.tensor([[*turn.prompt_ids, *turn.completion_ids]])
        with torch.no_grad():
            logits = policy.model(ids).logits[0, len(turn.prompt_ids) - 1 : -1].double()
        expected = torch.log_softmax(logits / temperature, -1)[range(len(turn.completion_ids)), turn.completion_ids]
        assert turn.sampler_logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_8_a_failed_generation_is_a_counted_failure_and_never_a_turn() -> None:
    """Fault 10: an empty completion, and a raise; neither becomes [eos]."""
    nothing = Completion(ids=(), logprobs=(), text="", stop_reason=StopReason.END)

    def script(request: Request) -> Sequence[Answer]:
        return [nothing] if request.episode.index == 1 else ["R"]

    plan = Plan(mode="chain", num_candidates=2, group_by=("task",))
    episodes, engine = played(script, plan=plan, each=2)
    assert all(episode.failure is not None and episode.turns == () for episode in episodes)  # one batch, one fate
    assert assign(episodes, CreditRule(by_episode=True), 2).credits == ()
    assert len(engine.batches) == 1
    with pytest.raises(TrainError, match="2 of 2 episodes failed"):
        played(script, plan=plan, each=2, limits=Limits(retries=1))


def test_9_pacing_earns_exactly_nothing_and_the_prompt_shows_the_position() -> None:
    """Fault 11: 200 steps of pacing must not beat the best path."""
    options = {**OPTIONS, "max_rounds": 100, "format_reward": 0.0}
    pacing = play_once("plan_path", lambda role, prompt: "RL", options=options, task=corridor())
    assert len(pacing.turns) == 200
    assert [turn.reward.team for turn in pacing.turns if turn.reward] == [0.0] * 200
    assert pacing.outcome is not None
    assert (pacing.outcome.team, pacing.outcome.success, pacing.outcome.truncated) == (0.0, False, True)
    texts = iter(["R", "R", "L", "L"] * 50)
    uneven = play_once("plan_path", lambda role, prompt: next(texts), options=options, task=corridor())
    assert sum(turn.reward.team or 0.0 for turn in uneven.turns if turn.reward and turn.role == "planner") == 0.0
    seen: list[str] = []

    def step_right(role: str, prompt: str) -> str:
        seen.append(prompt)
        return "Answer: R"

    play_once("plan_path", step_right, options={**OPTIONS, "style": "plain", "max_rounds": 2}, task=corridor())
    assert "You are at row 0, column 0. The goal is at row 0, column 3." in seen[0]
    assert "You are at row 0, column 1. The goal is at row 0, column 3." in seen[2]


def test_10_a_grid_that_breaks_the_clues_solves_nothing_and_splits_share_no_puzzle() -> None:
    """Fault 12: one constant grid solved every puzzle of the public implementation."""
    constant = "1234341221434321"
    env = make_env("sudoku", {"style": "compact"})
    tasks = [task for task in env.tasks("train", 0, 5) if task.data["solution"] != constant]
    for task in tasks:
        for text, success in ((constant, False), (str(task.data["solution"]), True)):
            options: dict[str, Json] = {"style": "compact", "max_rounds": 1}
            episode = play_once("sudoku", [text, text], options=options, task=task)
            assert episode.outcome is not None
            assert episode.outcome.success is success
    clues = [{str(t.data["clues"]) for t in env.tasks(split, 0, 30)} for split in ("train", "validation", "test")]
    assert len(set.union(*clues)) == sum(map(len, clues)) == 90


def test_11_the_ids_the_engine_saw_and_gave_are_the_ids_that_are_trained() -> None:
    odd = (40, 0, 41)  # ids that no text encodes to: a padding id in the middle

    def script(request: Request) -> Sequence[Answer]:
        return [odd, "R", "RR", "U"]

    episodes, engine = played(script)
    seen = {(request.episode, request.act): request.prompt_ids for request in engine.requests}
    report = assign(episodes, CreditRule(), 4)
    rows = [sample_of(c.turn, c.advantage) for c in report.credits if c.advantage is not None]
    assert [row.completion_ids for row in rows].count(odd) == len(engine.requests)
    for credit, row in zip(report.credits, rows, strict=True):
        assert row.prompt_ids == seen[(credit.turn.episode, credit.turn.act)]
        assert len(row.completion_ids) == len(row.sampler_logprobs) >= 1


@pytest.mark.parametrize("scale", ["std", "none"])
def test_12_sets_partition_the_turns_and_advantages_sum_to_zero(scale: str) -> None:
    tasks = make_env("plan_path", OPTIONS).tasks("train", 0, 10)
    episodes, _ = played(lambda request: ["UL", "R", "DR", "?"], tasks=tasks)
    report = assign(episodes, CreditRule(scale="std" if scale == "std" else "none"), 4)
    turns = [turn for episode in episodes for turn in episode.turns]
    assert [c.turn for c in report.credits] == turns
    sums: dict[str, float] = defaultdict(float)
    sizes: Counter[str] = Counter()
    for credit in report.credits:
        assert credit.advantage is not None
        sums[credit.turn.peers] += credit.advantage
        sizes[credit.turn.peers] += 1
    assert set(sizes.values()) == {4}
    assert sum(sizes.values()) == len(turns)
    assert all(abs(total) <= 1e-6 for total in sums.values())


def test_13_rows_of_another_policy_or_version_are_refused() -> None:
    policy = tiny_policy()
    learner = tiny_learner(policy)
    rows = rows_of(credit_of(tiny_episodes(policy)))
    assert {(row.policy, row.version) for row in rows} == {("main", 0)}
    for change in ({"version": 1}, {"policy": "other"}):
        with pytest.raises(TrainError):
            learner.step([*rows, replace(rows[0], **change)])
    assert learner.step(rows).version == 1
    with pytest.raises(TrainError):  # the same rows again: sampled by the version before
        learner.step(rows)


def test_14_the_same_seed_plays_the_same_episodes_alone_or_beside_others() -> None:
    policy = tiny_policy()
    tasks = make_env("plan_path", OPTIONS).tasks("train", 0, 6)
    together = tiny_episodes(policy, tasks)
    assert tiny_episodes(policy, tasks) == together
    alone = tiny_episodes(policy, tasks[2:3])[0]
    assert [turn.completion_ids for turn in alone.turns] == [turn.completion_ids for turn in together[2].turns]
    assert tiny_episodes(policy, tasks, seed=1) != together


def test_15_a_step_without_gradient_is_no_step_and_says_so() -> None:
    """Row 22 of the reliability list, invariant 9: all rewards equal, or no rows at all."""
    policy = tiny_policy()
    learner = tiny_learner(policy)
    before = [weight.detach().clone() for weight in policy.model.parameters()]
    rows = rows_of(credit_of(tiny_episodes(policy)))
    for batch in ([replace(row, advantage=0.0) for row in rows], []):
        update = learner.step(batch)
        assert (update.stepped, update.changed, update.version) == (False, 0.0, 0)
    assert all(torch.equal(old, new) for old, new in zip(before, policy.model.parameters(), strict=True))
    update = learner.step(rows)
    assert (update.stepped, update.version) == (True, 1)
    assert update.changed > 0.0


def test_16_one_row_per_turn_with_a_verdict() -> None:
    """Invariant 11, fault 2 of the kind: rows are neither padded with copies nor lost before credit."""
    episodes, _ = played(walk, tasks=[corridor(number) for number in range(3)])
    broken = replace(episodes[0].turns[1], reward=Reward(math.nan))
    episodes[0] = replace(episodes[0], turns=(episodes[0].turns[0], broken, *episodes[0].turns[2:]))
    report = assign(episodes, CreditRule(), 4)
    rows = samples_by_policy(report.credits, {"tool": None, "planner": None})
    found = Counter((row.peers, row.completion_ids) for own in rows.values() for row in own)
    turns = [turn for episode in episodes for turn in episode.turns]
    assert found == Counter((turn.peers, turn.completion_ids) for turn in turns if turn is not broken)
    assert max(found.values()) == 1
    assert (report.rewards_invalid, report.peer_sets_short) == (1, 1)


# ---- a real tiny model ----------------------------------------------------------------------------------------------


def tiny_policy() -> Policy:
    renderer = ChatRenderer(tiny_tokenizer())
    model = tiny_model(0, width=32, layers=1, heads=2, positions=64)
    return Policy(name="main", model=model, renderer=renderer, context=64, end_ids=renderer.end_ids)


def tiny_learner(policy: Policy) -> Learner:
    table = PolicyTable(model="tiny")
    return Learner(
        policy, table, LossTable(), total_steps=10, steps_per_batch=1, micro_batch_tokens=4096, autocast=False
    )


def tiny_episodes(
    policy: Policy, tasks: Sequence[Task] | None = None, *, seed: int = 0, temperature: float = 1.0
) -> list[Episode]:
    seats = seats_of(("tool", "planner"), renderer=policy.renderer, context=policy.context)
    sampling = Sampling(temperature=temperature, max_tokens=3)
    rollout = Rollout(
        make_env=lambda: make_env("plan_path", OPTIONS),
        seats={role: replace(seat, policy="main", sampling=sampling) for role, seat in seats.items()},
        plan=TREE,
        engine=TorchEngine({"main": policy}),
    )
    chosen = make_env("plan_path", OPTIONS).tasks("train", 0, 4) if tasks is None else tasks
    return rollout.run(plays_of(chosen, seed=seed, purpose="train", step=0, episodes_per_task=1))


def credit_of(episodes: Sequence[Episode]) -> CreditReport:
    """Return credit as if longer answers were better, so that an untrained model has something to learn from."""
    longer = [
        replace(e, turns=tuple(replace(t, reward=Reward(float(len(t.text) + t.candidate))) for t in e.turns))
        for e in episodes
    ]
    return assign(longer, CreditRule(), 4)


def rows_of(report: CreditReport) -> list[Sample]:
    return samples_by_policy(report.credits, {"main": None})["main"]
