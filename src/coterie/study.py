"""A study: a table of variants times seeds, every one an ordinary run with the same budget of generated tokens.

What cannot work is refused before anything starts. ``study_jobs`` makes the runs, ``study_results`` says what came out.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from coterie.config import PolicyTable, Recipe, dump_recipe, flat, override, read_recipe, reasons, refuse_unknown_keys
from coterie.env import env_class
from coterie.errors import ConfigError
from coterie.lineup import check_env_fits
from coterie.policy_tables import NonNegative, Positive, Table
from coterie.run_tables import CreditTable, EnvTable, EvalTable, LossTable, SamplingTable, TrainTable
from coterie.shipped import locate
from coterie.trained import PREFIX

RUNS, STARTS, RECIPES, LOGS = "runs", "starts", "recipes", "logs"
"""Folders of a study: the runs, the warm starts they begin with, their recipes as planned, what they printed."""
_OWNED = ("seed", "eval", "train.steps", "train.max_generated_tokens", "train.threads")
"""What is the same for all variants of a study, or set by it."""
_VARIANT = "variant:"
"""`variant:NAME#POLICY` as a model: the policy of that variant's run with the same seed."""
_MIN_TASKS = 500


class BudgetTable(Table):
    """``[budget]``: what every run may spend."""

    tokens: Positive
    """Tokens generated in training; a run ends with the step in which they are used up."""


class StudyEval(Table):
    """``[eval]``: the final evaluation of every run, by plain play on tasks that nothing was tuned on."""

    tasks: Annotated[int, Field(ge=_MIN_TASKS)] = 1000
    plays: Positive = 1
    temperature: NonNegative = 1.0
    split: str = "test"
    validations: Annotated[int, Field(ge=0)] = 8
    """How often a run is validated on its way, for the curves; on the validation split."""
    validation_tasks: Positive = 200


class Variant(Table):
    """``[[variants]]``: a name, and how its recipe differs from the study's."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][\w.-]*$")]
    recipe: str | None = None
    """Another recipe to start from; ``None``: the study's."""
    against: str | None = None
    """The variant that it is compared with in the table; ``None``: the study's baseline."""
    set: dict[str, Any] = Field(default_factory=dict)


class StudyFile(Table):
    """A study as written."""

    description: str = ""
    recipe: str
    seeds: Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]
    threads: Positive = 1
    """CPU threads of every run; results depend on it, so it is no matter of ``--jobs``."""
    budget: BudgetTable
    eval: StudyEval = StudyEval()
    set: dict[str, Any] = Field(default_factory=dict)
    """Keys of the recipe that all variants change."""
    variants: Annotated[tuple[Variant, ...], Field(min_length=1)]
    baseline: str | None = None
    """The variant that the others are compared with; ``None``: the first."""

    @model_validator(mode="after")
    def _names_are_told_apart(self) -> Self:
        names, seeds = [variant.name for variant in self.variants], [str(seed) for seed in self.seeds]
        for what, values in (("variants", names), ("seeds", seeds)):
            twice = [value for value in values if values.count(value) > 1]
            if twice:
                raise ValueError(f"{what}: {twice[0]!r} is there twice; runs are told apart by variant and seed")
        compared = [("baseline", self.baseline), *((f"{v.name}: against", v.against) for v in self.variants)]
        for what, name in compared:
            if name is not None and name not in names:
                raise ValueError(f"{what} = {name!r}: there is no such variant; known are {names}")
        own = [variant.name for variant in self.variants if variant.against == variant.name]
        if own:
            raise ValueError(f"variant {own[0]!r} is compared with itself; name another in against, or leave it out")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """A warm start that runs begin with: its name, and the recipe that ``coterie imitate`` makes it from."""

    name: str
    recipe: Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """A run of a study. ``recipe`` names the folders of ``start`` as models where it begins with one."""

    variant: str
    seed: int
    recipe: Recipe
    start: WarmStart | None
    needs: tuple[str, ...] = ()
    """The runs whose trained policies it begins with."""

    @property
    def name(self) -> str:
        """The name of its folder."""
        return f"{self.variant}-seed{self.seed}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A study that can be made: its file, the folder it goes to, and its runs, seed by seed."""

    file: StudyFile
    name: str
    folder: Path
    runs: tuple[PlannedRun, ...]

    @property
    def starts(self) -> tuple[WarmStart, ...]:
        """The warm starts of all runs, each once."""
        return tuple({run.start.name: run.start for run in self.runs if run.start is not None}.values())

    @property
    def baseline(self) -> str:
        """The variant that the others are compared with."""
        return self.file.baseline or self.file.variants[0].name

    @property
    def compared(self) -> tuple[tuple[str, str], ...]:
        """Pairs of variants: one, and the one that the table compares it with."""
        pairs = ((variant.name, variant.against or self.baseline) for variant in self.file.variants)
        return tuple((name, other) for name, other in pairs if name != other)

    def run_dir(self, run: PlannedRun) -> Path:
        """Return the folder of a run."""
        return self.folder / RUNS / run.name


def read_study(path: Path, folder: Path, settings: Sequence[str] = ()) -> Study:
    """Return the study of a TOML file, with every recipe checked; ``settings`` override keys of the file.

    ``ConfigError`` for unknown keys, equal names, overrides that do nothing or are the study's own, variants that are
    equal or do not validate, and a final split that is used while training.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read study {path}: {error}") from error
    file = parse_study(override(raw, settings), str(path))
    _check_sets(file, path)
    runs = tuple(_planned(file, path, variant, seed, folder) for seed in file.seeds for variant in file.variants)
    _check_variants_differ(runs[: len(file.variants)], path)
    _check_needs(runs[: len(file.variants)], path)
    _check_split(file, runs, path)
    return Study(file=file, name=path.stem, folder=folder, runs=runs)


def parse_study(raw: Mapping[str, Any], source: str) -> StudyFile:
    """Return a study file's content, checked by itself; ``ConfigError`` names the key and what is expected."""
    try:
        refuse_unknown_keys(raw, StudyFile, "")
        for table, model in (("budget", BudgetTable), ("eval", StudyEval)):
            if isinstance(raw.get(table), Mapping):
                refuse_unknown_keys(raw[table], model, f"{table}.")
        for variant in raw.get("variants", ()) if isinstance(raw.get("variants"), list) else ():
            if isinstance(variant, Mapping):
                refuse_unknown_keys(variant, Variant, "variants.")
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    try:
        return StudyFile.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{source}: {reasons(error)}") from error


def start_of(recipe: Recipe) -> WarmStart | None:
    """Return the warm start that a checked recipe begins with, as a recipe of what matters to it and nothing else.

    Two recipes with equal warm starts get equal ones, by whatever policies and credit they go on: models of one origin
    learn once, from the demonstrations of all trained roles. ``None`` without ``[imitate]``, and where a policy's KL
    refers to the model as it was before.
    """
    trained = {name: recipe.policies[name] for name in recipe.trained_policies}
    if recipe.imitate is None or any(p.kl.coef > 0.0 and p.kl.reference == "base" for p in trained.values()):
        return None
    models = _models(recipe)
    policies = dict(models.values())
    team = {}
    for role, name in recipe.team.items():
        if name in trained:
            team[role] = models[_origin(trained[name])][0]
        else:  # its role is played by the experts and not learned from
            team[role] = f"frozen-{name}"
            policies[team[role]] = recipe.policies[name]
    train = recipe.train
    rewards = env_class(recipe.env.name).Options.REWARDS
    played = {key: value for key, value in recipe.env.options.items() if key not in rewards}
    own = TrainTable(
        steps=1,
        micro_batch_tokens=train.micro_batch_tokens,
        precision=train.precision,
        retries=train.retries,
        max_failed_fraction=train.max_failed_fraction,
        episode_deadline_s=train.episode_deadline_s,
        threads=train.threads,
    )
    needed = recipe.model_copy(
        update={
            "description": "",
            "env": EnvTable.model_validate({"name": recipe.env.name, **played}),
            "policies": policies,
            "team": team,
            "sampling": SamplingTable(mode="chain", max_tokens=1),
            "credit": CreditTable(),
            "loss": LossTable(),
            "train": own,
            "eval": EvalTable(split=recipe.eval.split, tasks=1, final_split=recipe.eval.final_split, final_tasks=1),
            "trackers": (),
        }
    )
    text = json.dumps(dump_recipe(needed), sort_keys=True)
    return WarmStart(name=f"start-{hashlib.sha256(text.encode()).hexdigest()[:12]}", recipe=needed)


# ---- machinery below ------------------------------------------------------------------------------------------------


def _settings(table: Mapping[str, Any]) -> list[str]:
    """Return a ``set`` table as ``--set`` would have it; the string "null" removes a key."""
    return [f"{key}={'null' if value == 'null' else json.dumps(value)}" for key, value in flat(table).items()]


def _recipe(file: StudyFile, path: Path, variant: Variant, settings: Sequence[str]) -> Recipe:
    """Return the checked recipe of a variant with these settings; a relative recipe lies beside the study."""
    text = variant.recipe or file.recipe
    beside = path.parent / text
    source = locate(str(beside) if beside.is_file() else text)
    return check_env_fits(read_recipe(source.recipe, settings))


def _planned(file: StudyFile, path: Path, variant: Variant, seed: int, folder: Path) -> PlannedRun:
    budget, table = file.budget.tokens, file.eval
    own = {
        "seed": seed,
        "train": {"steps": budget, "max_generated_tokens": budget, "threads": file.threads},
        "eval": {
            "tasks": table.validation_tasks,
            "plays": 1,
            "temperature": table.temperature,
            "every": 0,
            "every_tokens": max(1, budget // table.validations) if table.validations else 0,
            "final_split": table.split,
            "final_tasks": table.tasks,
            "final_plays": table.plays,
        },
    }
    try:
        recipe = _recipe(file, path, variant, [*_settings(file.set), *_settings(variant.set), *_settings(own)])
        recipe, needs = _joined(file, recipe, seed, folder)
    except ConfigError as error:
        raise ConfigError(f"{path}: variant {variant.name!r}: {error}") from error
    start = start_of(recipe)
    if start is not None:
        recipe = _begun(recipe, (folder / STARTS / start.name).resolve())
    return PlannedRun(variant=variant.name, seed=seed, recipe=recipe, start=start, needs=needs)


def _joined(file: StudyFile, recipe: Recipe, seed: int, folder: Path) -> tuple[Recipe, tuple[str, ...]]:
    """Return a recipe with the models that are other variants' policies as policies of their runs, and those runs."""
    policies, needs = dict(recipe.policies), []
    for name, table in recipe.policies.items():
        if not table.model.startswith(_VARIANT):
            continue
        other, _, policy = table.model.removeprefix(_VARIANT).partition("#")
        known = [variant.name for variant in file.variants]
        if other not in known:
            raise ConfigError(f"policies.{name}.model = {table.model!r}: there is no such variant; known are {known}")
        if recipe.imitate is not None:
            raise ConfigError(
                f'policies.{name}.model = {table.model!r} is trained already; remove the warm start: imitate = "null"'
            )
        run = f"{other}-seed{seed}"
        model = f"{PREFIX}{(folder / RUNS / run).resolve()}{'#' if policy else ''}{policy}"
        policies[name] = table.model_copy(update={"model": model})
        needs.append(run)
    return recipe.model_copy(update={"policies": policies}), tuple(dict.fromkeys(needs))


def _begun(recipe: Recipe, start: Path) -> Recipe:
    """Return a recipe that begins with a warm start instead of making it: its models are the folders of that."""
    models = _models(recipe)
    policies = {
        name: table
        if table.train == "frozen"
        else table.model_copy(update={"model": str(start / models[_origin(table)][0])})
        for name, table in recipe.policies.items()
    }
    return recipe.model_copy(update={"policies": policies, "imitate": None})


def _models(recipe: Recipe) -> dict[str, tuple[str, PolicyTable]]:
    """Return, by origin, the name and the table of each model that the trained policies begin with."""
    found: dict[str, tuple[str, PolicyTable]] = {}
    for name in recipe.trained_policies:
        table = recipe.policies[name]
        if _origin(table) not in found:
            own = ("model", "dtype", "context", "template", "template_options")
            plain = PolicyTable.model_validate({key: value for key, value in table.model_dump().items() if key in own})
            found[_origin(table)] = (f"model{len(found)}", plain)
    return found


def _origin(table: PolicyTable) -> str:
    return repr((table.model, table.dtype, table.context, table.template, sorted(table.template_options.items())))


def _check_sets(file: StudyFile, path: Path) -> None:
    """Raise ``ConfigError`` for a key that is the study's own, or whose override changes nothing."""
    common = _settings(file.set)
    for where, table in (("set", file.set), *((f"variant {v.name!r}", v.set) for v in file.variants)):
        owned = [key for key in flat(table) if any(key == own or key.startswith(f"{own}.") for own in _OWNED)]
        if owned:
            raise ConfigError(
                f"{path}: {where} sets {owned[0]}, which is the same for all variants of a study; see its own "
                "seeds, threads, [budget] and [eval]"
            )
    for setting in common:
        rest = [other for other in common if other != setting]
        if all(
            _does_nothing(file, path, v, [*common, *_settings(v.set)], [*rest, *_settings(v.set)])
            for v in file.variants
        ):
            raise ConfigError(f"{path}: set: {setting} does nothing, it is so without it; remove it")
    for variant in file.variants:
        own = _settings(variant.set)
        for setting in own:
            rest = [other for other in own if other != setting]
            if _does_nothing(file, path, variant, [*common, *own], [*common, *rest]):
                raise ConfigError(
                    f"{path}: variant {variant.name!r}: {setting} does nothing, it is so without it; remove it"
                )


def _does_nothing(file: StudyFile, path: Path, variant: Variant, full: Sequence[str], rest: Sequence[str]) -> bool:
    """Return whether a variant has the same recipe with fewer settings. One that is none without them needs them."""
    try:
        there = _recipe(file, path, variant, full)
    except ConfigError as error:
        raise ConfigError(f"{path}: variant {variant.name!r}: {error}") from error
    try:
        return dump_recipe(_recipe(file, path, variant, rest)) == dump_recipe(there)
    except ConfigError:
        return False


def _check_needs(runs: Sequence[PlannedRun], path: Path) -> None:
    """Raise ``ConfigError`` for a run that needs one which needs another, or itself: they are made in two rounds."""
    second = {run.name for run in runs if run.needs}
    for run in runs:
        found = [name for name in run.needs if name in second]
        if found:
            raise ConfigError(
                f"{path}: variant {run.variant!r} begins with the policies of {found[0]}, which begins with those of "
                "another run itself; name a variant that begins with a warm start"
            )


def _check_variants_differ(runs: Sequence[PlannedRun], path: Path) -> None:
    seen: dict[str, str] = {}
    for run in runs:
        text = json.dumps({**dump_recipe(run.recipe), "description": ""}, sort_keys=True)
        if text in seen:
            raise ConfigError(f"{path}: variants {seen[text]!r} and {run.variant!r} are one and the same recipe")
        seen[text] = run.variant


def _check_split(file: StudyFile, runs: Sequence[PlannedRun], path: Path) -> None:
    used = {"train", *(run.recipe.eval.split for run in runs if run.recipe.eval.validates)}
    if file.eval.split in used:
        raise ConfigError(
            f"{path}: eval.split = {file.eval.split!r} is played while training ({sorted(used)}); the final "
            "evaluation needs tasks that nothing was tuned on, such as those of 'test'"
        )
