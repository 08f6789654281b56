"""What a recipe will cost: tokens per step and memory per policy, measured where that is cheap, else stated roughly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from coterie.config import Recipe, dump_recipe, flat
from coterie.display import titled
from coterie.dry_play import DRY_TASKS, empty_answers
from coterie.lineup import Lineup
from coterie.models.loading import DTYPES
from coterie.rollout import no_check, no_event, plays_of
from coterie.types import Json

_VALUES_PER_LAYER = 16
"""Values that a transformer layer keeps for its backward pass, per token and hidden unit: about so many."""
_LOGIT_COPIES = 3
"""Logits, log-probs and their gradient, each in float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleLoad:
    """What a role does in one task of a training step, at most: acts, candidates of all acts, and token counts.

    ``candidates`` are those of the plays of lookahead too, one per act, as if all candidates differed.
    ``prompt_tokens`` is the longest prompt of a play in which every answer is empty.
    """

    role: str
    policy: str
    acts: int
    candidates: int
    prompt_tokens: int
    max_tokens: int

    @property
    def tokens(self) -> int:
        """The most tokens generated for the role in one task."""
        return self.candidates * self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMemory:
    """Bytes of one policy: weights, what training adds to them, and its activations at most (a rough number).

    A model that several policies share is counted with the first of them.
    """

    policy: str
    parameters: int
    weights: int
    gradients: int
    optimizer: int
    references: int
    activations: int

    @property
    def total(self) -> int:
        """All of it; the cache of generation is not in it."""
        return self.weights + self.gradients + self.optimizer + self.references + self.activations


MEMORY_PARTS: dict[str, Callable[[PolicyMemory], int]] = {
    "weights": lambda memory: memory.weights,
    "gradients": lambda memory: memory.gradients,
    "optimiser": lambda memory: memory.optimizer,
    "references": lambda memory: memory.references,
    "activations": lambda memory: memory.activations,
}
"""What the memory of a policy is made of, by the words of the tables."""


def role_loads(lineup: Lineup) -> list[RoleLoad]:
    """Return the load of each role, from playing some training tasks with empty answers: no model runs.

    An episode is then as long as it can get, because nothing is solved. Raises what an env that cannot play raises.
    """
    rollout = lineup.rollout(
        training=True, event=no_event, before_batch=no_check, expert=empty_answers(lineup.policies)
    )
    sampling = lineup.recipe.sampling
    tasks = lineup.make_env().tasks("train", 0, DRY_TASKS)
    repeats = sampling.num_candidates if sampling.mode == "chain" else 1
    episodes = rollout.run(plays_of(tasks, seed=lineup.recipe.seed, purpose="play", step=0, episodes_per_task=repeats))
    acts: dict[str, dict[str, set[tuple[int, int]]]] = defaultdict(lambda: defaultdict(set))
    candidates: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    prompts: dict[str, int] = defaultdict(int)
    for episode in episodes:
        for turn in episode.turns:
            acts[turn.role][episode.key.task_id].add((episode.key.index, turn.act))
            candidates[turn.role][episode.key.task_id] += 1
            for later in [one for one in episode.played if one.act > turn.act]:
                candidates[later.role][episode.key.task_id] += rollout.seats[turn.role].lookahead
            prompts[turn.role] = max(prompts[turn.role], len(turn.prompt_ids))
    return [
        RoleLoad(
            role=role,
            policy=seating.policy,
            acts=max(map(len, acts[role].values()), default=0),
            candidates=max(candidates[role].values(), default=0),
            prompt_tokens=prompts[role],
            max_tokens=seating.sampling.max_tokens,
        )
        for role, seating in lineup.seats().items()
    ]


def policy_memory(lineup: Lineup, name: str) -> PolicyMemory:
    """Return the memory of one policy, by its parameters and the recipe.

    AdamW keeps two float32 values per trained weight, and a float32 copy of weights of another type. Activations are
    those of one full micro-batch: 16 values per layer, token and hidden unit, and three float32 rows of logits a token.
    """
    recipe, policy = lineup.recipe, lineup.policies[name]
    table, model = recipe.policies[name], policy.model
    size = DTYPES[table.dtype].itemsize
    own_size = 4 if policy.adapter is not None else size
    learns = name in recipe.trained_policies
    trained = sum(weight.numel() for weight in policy.weights().values()) if learns else 0
    # An adapter's weights come on top of the model's, a whole model's are the model's.
    added = trained if policy.adapter is not None else 0
    first = next(other.name for other in lineup.policies.values() if other.model is model)
    base = sum(weight.numel() for weight in policy.model_weights().values()) if name == first else 0
    refers = learns and table.kl.coef > 0.0 and (policy.adapter is None or table.kl.reference == "start")
    config = model.config.get_text_config()
    width = 2 if recipe.train.precision == "bfloat16" else size
    kept = config.num_hidden_layers * _VALUES_PER_LAYER
    if table.gradient_checkpointing:
        kept = config.num_hidden_layers + _VALUES_PER_LAYER
    per_token = kept * config.hidden_size * width + config.vocab_size * _LOGIT_COPIES * 4
    return PolicyMemory(
        policy=name,
        parameters=base + added,
        weights=base * size + added * own_size,
        gradients=trained * own_size,
        optimizer=trained * (8 + (0 if own_size == 4 else 8)),
        references=trained * own_size if refers else 0,
        activations=recipe.train.micro_batch_tokens * per_token if learns else 0,
    )


def team_memory(memories: Sequence[PolicyMemory]) -> PolicyMemory:
    """Return the memory of all policies together; they are trained one after the other."""
    return PolicyMemory(
        policy="together",
        parameters=sum(memory.parameters for memory in memories),
        weights=sum(memory.weights for memory in memories),
        gradients=max(memory.gradients for memory in memories),
        optimizer=sum(memory.optimizer for memory in memories),
        references=sum(memory.references for memory in memories),
        activations=max(memory.activations for memory in memories),
    )


# ---- tables -------------------------------------------------------------------------------------------------------


def recipe_table(recipe: Recipe, resolved: Recipe) -> Table:
    """Return every key of a recipe with its value; ``default`` marks those that ``recipe``, as written, leaves out.

    ``resolved`` has the env's own defaults too.
    """
    values = list(flat(dump_recipe(resolved)).items())
    rows = [(key, _shown(value)) for key, value in values]
    words = [word for _, value in values if not isinstance(value, str) for word in _shown(value).split(" ")]
    table = Table()
    # Only texts are broken into lines; keys and numbers can be searched for and copied.
    table.add_column("key", no_wrap=True, min_width=max(len(key) for key, _ in rows))
    table.add_column("value", overflow="fold", min_width=max(map(len, words)))
    table.add_column("", no_wrap=True, min_width=len("default"))
    written = set(_written(recipe, ""))
    for key, text in rows:
        given = any(key == name or key.startswith(f"{name}.") for name in written)
        table.add_row(Text(key), Text(text), "" if given else "default", style=None if given else "dim")
    return table


def load_table(loads: list[RoleLoad], recipe: Recipe) -> RenderableType:
    """Return what the roles do in one training step, with the most tokens it can generate."""
    tasks = recipe.train.tasks_per_step
    total = sum(load.tokens for load in loads) * tasks
    table = Table()
    rows = [
        (load.role, load.policy, load.acts, load.candidates, load.prompt_tokens, load.max_tokens, load.tokens * tasks)
        for load in loads
    ]
    cells = [[cell if isinstance(cell, str) else f"{cell:,}" for cell in row] for row in rows]
    names = ("role", "policy", "acts per task", "answers per task", "prompt tokens", "answer tokens", "tokens a step")
    for number, column in enumerate(names):
        width = max(len(row[number]) for row in cells)
        table.add_column(column, justify="left" if number < 2 else "right", min_width=width)
    for row in cells:
        table.add_row(*row)
    return titled(f"One step: {tasks} tasks, at most {total:,} tokens generated", table)


def memory_table(memories: list[PolicyMemory]) -> RenderableType:
    """Return the memory of the policies, in readable units, and of all together where there are several."""
    if len(memories) > 1:
        memories = [*memories, team_memory(memories)]
    table = Table("policy")
    for memory in memories:
        width = max(len(f"{memory.parameters:,}"), len("1023.9 MiB"))
        table.add_column(memory.policy, justify="right", min_width=width)
    table.add_row("parameters", *(f"{memory.parameters:,}" for memory in memories))
    parts: dict[str, Callable[[PolicyMemory], int]] = {**MEMORY_PARTS, "total": lambda memory: memory.total}
    for name, part in parts.items():
        table.add_row(name, *(readable_bytes(part(memory)) for memory in memories))
    return titled("Memory, about (without the cache of generation)", table)


def placement_table(places: Sequence[tuple[str, str, str]]) -> RenderableType:
    """Return which worker processes a run has, with what devices; see ``cluster.entry.check_placement``."""
    table = Table("worker", "policies", "bundle: devices of the worker")
    for row in places:
        table.add_row(*(Text(cell) for cell in row))
    return titled(f"{len(places)} worker processes", table)


def readable_bytes(count: int) -> str:
    """Return a number of bytes in the largest binary unit that leaves at least 1: 1536 -> ``"1.5 KiB"``."""
    value, units = float(count), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024.0 and len(units) > 1:
        value /= 1024.0
        units.pop(0)
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


# ---- machinery below ----------------------------------------------------------------------------------------------


def _written(value: object, prefix: str) -> Iterator[str]:
    """Yield the dotted keys that were written, not filled in."""
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        for name, inner in value:
            if name in value.model_fields_set:
                alias = fields[name].alias if name in fields else None
                yield from _written(inner, f"{prefix}{alias or name}.")
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _written(inner, f"{prefix}{name}.")
    else:
        yield prefix.removesuffix(".")


def _shown(value: Json) -> str:
    """Return a value as a recipe writes it."""
    if value is None:
        return "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(_shown(item) for item in value)}]"
    return f'"{value}"' if isinstance(value, str) else str(value)
