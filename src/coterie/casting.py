"""Another team made of the same policies: roles that play with each other's policy, untrained, or alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from coterie.config import KLTable, PolicyTable, Recipe
from coterie.dry_play import empty_answers
from coterie.errors import ConfigError, TrainError
from coterie.lineup import Lineup, check_env_fits, check_room
from coterie.rollout import no_check, no_event, plays_of
from coterie.run_tables import EnvTable
from coterie.types import Json

BASE = "base"
"""Of ``--frozen role=base``: the policy's model as it was loaded, before any training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Casting:
    """How a team differs from its recipe's. Empty: not at all.

    ``swap`` maps a role to the role whose policy it plays with; roles in ``frozen`` then play with their policy's model
    as loaded; ``only`` is the one role that plays.
    """

    swap: Mapping[str, str] = field(default_factory=dict)
    frozen: tuple[str, ...] = ()
    only: str | None = None

    def __bool__(self) -> bool:
        """Return whether anything differs."""
        return bool(self.swap or self.frozen or self.only)

    def describe(self) -> str:
        """Return the difference in words."""
        words = [f"{role} by the policy of {other}" for role, other in self.swap.items()]
        words += [f"{role} by an untrained policy" for role in self.frozen]
        return ", ".join([*words, *([f"{self.only} alone"] if self.only else [])])

    def row(self) -> dict[str, Json]:
        """Return it as JSON."""
        return {"swap": dict(self.swap), "frozen": list(self.frozen), "only": self.only}


def read_casting(swap: str | None, frozen: str | None, only: str | None) -> Casting:
    """Return the casting of ``"a=b,b=a"``, ``"a=base"`` and a role's name; ``ConfigError`` for anything else."""
    untrained = _pairs("--frozen", frozen, f"role={BASE}")
    other = next((value for value in untrained.values() if value != BASE), None)
    if other is not None:
        raise ConfigError(
            f"--frozen {frozen}: {other!r} is not known; expected role={BASE}, the policy's model as it was loaded"
        )
    return Casting(swap=_pairs("--swap", swap, "role=role"), frozen=tuple(untrained), only=only)


def untrained(policy: str) -> str:
    """Return the name under which the untrained copy of a policy plays."""
    return f"{policy}@{BASE}"


_AS_LOADED = {
    "train": "frozen",
    "kl": KLTable(),
    "lora": None,
    "update_every": 1,
    "update_offset": None,
    "train_until": None,
}
"""What makes a policy's table that of its model as loaded, which nobody trains."""


def with_untrained(recipe: Recipe, casting: Casting) -> Recipe:
    """Return the recipe with an untrained copy of every policy that the casting needs one of, for ``assemble``.

    ``ConfigError`` where the casting names a role that the team does not have, or that would not play.
    """
    _check_roles(recipe, casting)
    team = _policies_of(recipe, casting)
    copies: dict[str, PolicyTable] = {
        untrained(team[role]): recipe.policies[team[role]].model_copy(update=_AS_LOADED) for role in casting.frozen
    }
    return recipe.model_copy(update={"policies": {**recipe.policies, **copies}})


def cast(lineup: Lineup, casting: Casting) -> Lineup:
    """Return the team that the casting makes of a lineup whose recipe went through ``with_untrained``.

    It plays with the lineup's own policies and engine. ``ConfigError`` where a role's answers do not fit its new
    policy's context, and where the env cannot be played by ``only``.
    """
    recipe = lineup.recipe
    team = _policies_of(recipe, casting)
    team |= {role: untrained(team[role]) for role in casting.frozen}
    if casting.only is None:
        changed = replace(lineup, recipe=recipe.model_copy(update={"team": team}))
        check_room(changed)
        return changed
    env = EnvTable.model_validate({"name": recipe.env.name, **recipe.env.options, "roles": [casting.only]})
    alone = recipe.model_copy(update={"env": env, "team": {casting.only: team[casting.only]}})
    changed = replace(lineup, recipe=check_env_fits(alone))
    check_room(changed)
    _check_alone(changed, casting.only)
    return changed


# ---- machinery below ------------------------------------------------------------------------------------------------


def _pairs(option: str, text: str | None, form: str) -> dict[str, str]:
    """Return the pairs of ``"a=b,c=d"``."""
    found: dict[str, str] = {}
    for item in text.split(",") if text else ():
        role, equals, value = (part.strip() for part in item.partition("="))
        if not (role and equals and value) or role in found:
            raise ConfigError(f"{option} {text}: expected {form}, or several with commas between, each role once")
        found[role] = value
    return found


def _policies_of(recipe: Recipe, casting: Casting) -> dict[str, str]:
    """Return role -> policy after the swap."""
    return {role: recipe.team[casting.swap.get(role, role)] for role in recipe.team}


def _check_roles(recipe: Recipe, casting: Casting) -> None:
    """Raise ``ConfigError`` for an unknown role, and for a change of one that does not play."""
    known = sorted(recipe.team)
    named = {
        "--swap": [*casting.swap, *casting.swap.values()],
        "--frozen": casting.frozen,
        "--only": () if casting.only is None else (casting.only,),
    }
    for option, roles in named.items():
        for role in roles:
            if role not in recipe.team:
                raise ConfigError(f"{option}: the team has no role {role!r}; it has {known}")
    idle = [role for role in (*casting.swap, *casting.frozen) if casting.only not in (None, role)]
    if idle:
        raise ConfigError(f"--only {casting.only}: role {idle[0]!r} does not play then, so nothing can change for it")
    same = [role for role in casting.swap if recipe.team[role] == recipe.team[casting.swap[role]]]
    if same and len(same) == len(casting.swap):
        raise ConfigError(
            f"--swap: {same[0]} and {casting.swap[same[0]]} share the policy {recipe.team[same[0]]!r}; a swap changes "
            "nothing. It needs roles with policies of their own"
        )


def _check_alone(lineup: Lineup, role: str) -> None:
    """Raise ``ConfigError`` unless the env can be played by one role: it may ask others whatever its options say."""
    split = lineup.recipe.eval.final_split
    rollout = lineup.rollout(
        training=False,
        temperature=1.0,
        event=no_event,
        before_batch=no_check,
        expert=empty_answers(lineup.policies),
    )
    tasks = lineup.make_env().tasks(split, 0, 1)
    try:
        rollout.run(plays_of(tasks, seed=lineup.recipe.seed, purpose="play", step=0, episodes_per_task=1))
    except TrainError as error:
        why = str(error).splitlines()[0]
        raise ConfigError(
            f"--only {role}: env {lineup.recipe.env.name!r} cannot be played by this role alone: {why}"
        ) from error
