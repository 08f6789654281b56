"""The recipe: one typed table for a whole run. What cannot work is refused before anything starts.

A recipe is TOML; ``--set a.b=value`` overrides one key. Every default is visible in the resolved ``recipe.json``.
"""

from __future__ import annotations

import difflib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from coterie.errors import ConfigError
from coterie.hardware import HardwareTable as HardwareTable
from coterie.hardware import PolicyHardware
from coterie.policy_tables import KLTable as KLTable
from coterie.policy_tables import LoraTable as LoraTable
from coterie.policy_tables import OptimizerTable as OptimizerTable
from coterie.policy_tables import PolicyTable as PolicyTable
from coterie.policy_tables import Table as Table
from coterie.run_tables import (
    CreditTable,
    EnvTable,
    EvalTable,
    ImitateTable,
    LossTable,
    RoleSampling,
    SamplingTable,
    SandboxTable,
    TrainTable,
)

VLLM_IMPORTANCE_CAP = 2.0
"""``loss.importance_cap`` where vLLM samples and the recipe does not say."""


class Recipe(Table):
    """A whole run."""

    description: str = ""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    deterministic: Literal[True] = True
    """Batches wait for all live episodes and are ordered by key: equal bytes again and again on one machine."""
    env: EnvTable
    policies: Annotated[dict[str, PolicyTable], Field(min_length=1)]
    team: Annotated[dict[str, str], Field(min_length=1)]
    sampling: SamplingTable = SamplingTable()
    credit: CreditTable = CreditTable()
    loss: LossTable = LossTable()
    train: TrainTable
    eval: EvalTable = EvalTable()
    sandbox: SandboxTable = SandboxTable()
    imitate: ImitateTable | None = None
    hardware: HardwareTable = HardwareTable()
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ("tensorboard",)

    @model_validator(mode="before")
    @classmethod
    def _vllm_defaults(cls, raw: Any) -> Any:
        """Fill in the truncated importance weight where policies are sampled by numbers that are not the learner's."""
        if isinstance(raw, dict) and _samples_with_vllm(raw.get("hardware")):
            loss = raw.get("loss", {})
            if isinstance(loss, dict) and "importance_cap" not in loss:
                return {**raw, "loss": {**loss, "importance_cap": VLLM_IMPORTANCE_CAP}}
        return raw

    @model_validator(mode="after")
    def _combinations(self) -> Self:
        """Refuse what cannot work together, with the remedy."""
        for role, policy in self.team.items():
            if policy not in self.policies:
                near = difflib.get_close_matches(policy, self.policies, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"team.{role} = {policy!r}: there is no such policy; known are {sorted(self.policies)}{hint}"
                )
        unused = sorted(set(self.policies) - set(self.team.values()))
        if unused:
            raise ValueError(
                f"policies.{unused[0]}: no role uses this policy; name it in [team], or remove it: "
                f"--set policies.{unused[0]}=null"
            )
        unknown = sorted(set(self.sampling.roles) - set(self.team))
        if unknown:
            raise ValueError(f"sampling.roles.{unknown[0]}: no such role in [team]; known are {sorted(self.team)}")
        for role, own in self.sampling.roles.items():
            if own.lookahead is not None and self.sampling.mode != "tree":
                raise ValueError(
                    f"sampling.roles.{role}.lookahead: it says what the candidates of an act are worth, and in a chain "
                    'there is one; remove it or set sampling.mode = "tree"'
                )
            if own.lookahead is not None and self.team[role] not in self.trained_policies:
                raise ValueError(
                    f"sampling.roles.{role}.lookahead: policy {self.team[role]!r} is frozen and draws one candidate; "
                    "remove it or train the policy"
                )
        if self.sampling.num_candidates == 1 and self.trained_policies:
            raise ValueError(
                "sampling.num_candidates = 1: a baseline needs at least 2 candidates to compare; "
                "every advantage would be 0. Set it to 2 or more (8 is usual)"
            )
        stray = sorted(set(self.hardware.policies) - set(self.policies))
        if stray:
            raise ValueError(f"hardware.policies.{stray[0]}: no such policy; known are {sorted(self.policies)}")
        self._every_step_trains()
        if (self.loss.aggregation == "constant") != (self.loss.constant is not None):
            raise ValueError('loss.constant goes with loss.aggregation = "constant", and only with it')
        if self.credit.gamma != 1.0 and self.credit.returns != "discounted":
            raise ValueError('credit.gamma is used only with credit.return = "discounted"; remove it or change return')
        self._tree_or_chain()
        return self

    def _every_step_trains(self) -> None:
        """Refuse a policy that no step would train, and a step that would train no policy."""
        steps, tables = self.train.steps, {name: self.policies[name] for name in self.trained_policies}
        for name, table in tables.items():
            if not table.num_updates(steps):
                last = steps if table.train_until is None else min(steps, table.train_until)
                raise ValueError(
                    f"policies.{name} would never be trained: its first update is in step {table.first_update + 1} "
                    f"(update_every, update_offset), its last step is {last} (train_until, train.steps). Lower the "
                    'first, raise the others, or set train = "frozen"'
                )
        idle = _first_idle(list(tables.values()), steps)
        if idle is not None:
            raise ValueError(
                f"no policy would be trained in step {idle + 1} of {steps}: it would be played for nothing. Let "
                "update_every, update_offset and train_until of the policies leave no step out, or lower train.steps"
            )

    def _tree_or_chain(self) -> None:
        """Refuse options that only the other sampling mode reads."""
        if self.sampling.mode == "tree":
            if self.credit.returns != "turn":
                raise ValueError(
                    f'credit.return = "{self.credit.returns}" needs sampling.mode = "chain": in a tree a candidate '
                    'that is not played has no later rewards. Use credit.return = "turn" or change the mode'
                )
            if "group_by" in self.credit.model_fields_set:
                raise ValueError(
                    'credit.group_by is read only with sampling.mode = "chain": a tree compares the K candidates of '
                    "one act. Remove it or change the mode"
                )
        elif self.sampling.model_fields_set & {"select", "select_temperature"}:
            raise ValueError('sampling.select is read only with sampling.mode = "tree": in a chain every act has one')
        if self.sampling.select != "sample" and "select_temperature" in self.sampling.model_fields_set:
            raise ValueError('sampling.select_temperature is read only with sampling.select = "sample"')

    @property
    def trained_policies(self) -> tuple[str, ...]:
        """Names of the policies that learn, in the order of the recipe."""
        return tuple(name for name, table in self.policies.items() if table.train != "frozen")

    def is_over(self, steps: int, tokens: int) -> bool:
        """Return whether a run that has made so many steps and generated so many tokens in training is at its end."""
        budget = self.train.max_generated_tokens
        return steps >= self.train.steps or (budget is not None and tokens >= budget)

    def num_updates(self, policy: str) -> int:
        """Return in how many steps a policy is trained."""
        return self.policies[policy].num_updates(self.train.steps)


def _samples_with_vllm(hardware: Any) -> bool:
    """Return whether a ``[hardware]`` table, not checked yet, gives any policy the engine vLLM."""
    if not isinstance(hardware, Mapping):
        return False
    own = hardware.get("policies", {})
    tables = [hardware, *(own.values() if isinstance(own, Mapping) else ())]
    return any(isinstance(table, Mapping) and table.get("engine") == "vllm" for table in tables)


def _first_idle(tables: Sequence[PolicyTable], steps: int) -> int | None:
    """Return the first step that trains none of some policies, ``None`` without such a step or without policies.

    Which policies train repeats with all their ``update_every``, from the first step and wherever one has ended; so
    the length of a run does not matter.
    """
    turn = math.lcm(*(table.update_every for table in tables))
    ends = [steps if table.train_until is None else table.train_until for table in tables]
    for begin in sorted({0, *ends} if tables else ()):
        if any(table.update_every == 1 and begin < end for table, end in zip(tables, ends, strict=True)):
            continue  # until that one ends, where the next look begins
        for step in range(begin, min(steps, begin + turn)):
            if not any(table.trains_at(step) for table in tables):
                return step
    return None


def refuse_unknown_keys(raw: Mapping[str, Any], model: type[BaseModel], where: str) -> None:
    """Raise ``ConfigError`` with the nearest known key for the first key that a table does not have."""
    known = sorted(field.alias or name for name, field in model.model_fields.items())
    for key in raw:
        if key not in known and model.model_config.get("extra") == "forbid":
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {where + near[0]!r}? " if near else ""
            raise ConfigError(f"unknown key {where + key!r}: {hint}Known here: {', '.join(known)}")


def reasons(error: ValidationError) -> str:
    """Return what pydantic found wrong: the place of each fault, what was expected, and what was there."""
    lines = []
    for item in error.errors():
        place, message = ".".join(map(str, item["loc"])), item["msg"].removeprefix("Value error, ")
        got = "" if item["type"] in ("value_error", "missing") else f" (got {item['input']!r})"
        lines.append(f"{place}: {message}{got}" if place else message)
    return "; ".join(lines)


def _refuse_unknown(raw: Mapping[str, Any], model: type[BaseModel], where: str) -> None:
    """Refuse the first unknown key of a table and of those inside it."""
    refuse_unknown_keys(raw, model, where)
    tables: dict[str, type[BaseModel]] = {
        "env": EnvTable,
        "optimizer": OptimizerTable,
        "kl": KLTable,
        "lora": LoraTable,
        "sampling": SamplingTable,
        "credit": CreditTable,
        "loss": LossTable,
        "train": TrainTable,
        "eval": EvalTable,
        "sandbox": SandboxTable,
        "imitate": ImitateTable,
        "hardware": HardwareTable,
    }
    maps: dict[str, type[BaseModel]] = {"policies": PolicyTable, "roles": RoleSampling}
    for key, value in raw.items():
        if not isinstance(value, Mapping):
            continue
        if key in maps and model is not EnvTable:
            inside = PolicyHardware if model is HardwareTable else maps[key]
            for name, inner in value.items():
                if isinstance(inner, Mapping):
                    _refuse_unknown(inner, inside, f"{where}{key}.{name}.")
        elif key in tables and model is not EnvTable:
            _refuse_unknown(value, tables[key], f"{where}{key}.")


def _one_env(raw: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Return a recipe in which ``[[envs]]`` is one ``[env]``, the mixture; ``ConfigError`` for both at once."""
    rest = dict(raw)
    if "envs" not in rest:
        return rest
    parts = rest.pop("envs")
    if "env" in rest:
        raise ConfigError(f"{source}: [env] and [[envs]] are both there; one env is [env], several are [[envs]]")
    if not isinstance(parts, list) or not all(isinstance(part, Mapping) for part in parts):
        raise ConfigError(f"{source}: envs must be a list of tables, written [[envs]] each")
    return {**rest, "env": {"name": "mixed", "envs": parts}}


def parse_recipe(raw: Mapping[str, Any], source: str) -> Recipe:
    """Return the validated recipe; ``ConfigError`` names the source, the key, and what would be right."""
    raw = _one_env(raw, source)
    _refuse_unknown(raw, Recipe, "")
    try:
        return Recipe.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(f"{source}: {reasons(error)}") from error


def override(raw: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return a copy of ``raw`` with ``a.b=value`` settings applied; values are TOML, or else plain strings.

    ``a.b=null`` removes a key or a whole table, so that it has its default or is not there.
    """
    result: dict[str, Any] = json.loads(json.dumps(raw))
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"--set {setting!r}: expected key=value, for example train.steps=100")
        table = result
        for key in keys[:-1]:
            inner = table.setdefault(key, {})
            if not isinstance(inner, dict):
                raise ConfigError(f"--set {setting!r}: {key!r} is a value, not a table")
            table = inner
        if text.strip() != "null":
            table[keys[-1]] = _value(text.strip())
        elif keys[-1] in table:
            del table[keys[-1]]
        else:
            raise ConfigError(f"--set {setting!r}: there is no such key to remove; here are {sorted(table)}")
    return result


def _value(text: str) -> Any:
    """Return a TOML value, or the text itself where it is none (so that strings need no quotes)."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def read_recipe(path: Path, settings: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a TOML file (or a resolved ``recipe.json``) with ``--set`` overrides."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read recipe {path}: {error}") from error
    try:
        raw = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError) as error:
        raise ConfigError(f"{path} is not valid {path.suffix.lstrip('.').upper() or 'TOML'}: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: expected a table at the top, got {type(raw).__name__}")
    return parse_recipe(override(raw, settings), str(path))


def dump_recipe(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe as JSON, every default written out; ``parse_recipe`` reads it back equal."""
    resolved: dict[str, Any] = recipe.model_dump(mode="json", by_alias=True)
    if recipe.sampling.mode == "tree":
        del resolved["credit"]["group_by"]
    else:
        del resolved["sampling"]["select"]
    if recipe.sampling.mode == "chain" or recipe.sampling.select != "sample":
        del resolved["sampling"]["select_temperature"]
    return resolved


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a table's values by dotted key, depth first; an empty table is a value."""
    rows: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            rows |= flat(value, f"{prefix}{key}.")
        else:
            rows[prefix + key] = value
    return rows
