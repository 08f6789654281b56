"""The tables of a recipe but for its policies: what pydantic reads, with defaults and limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from coterie.policy_tables import NonNegative, Positive, Precision, Table

GroupKey = Literal["task", "role", "round", "prompt"]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
StopString = Annotated[str, Field(min_length=1)]


class EnvTable(BaseModel):
    """``[env]``: the env's name; all other keys are its own options, checked by its ``Options`` class."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The env's own options as written."""
        return dict(self.__pydantic_extra__ or {})


class RoleSampling(Table):
    """``[sampling.roles.NAME]``: what differs for one role; ``None`` means as in ``[sampling]``."""

    temperature: NonNegative | None = None
    max_tokens: Positive | None = None
    stop: tuple[StopString, ...] | None = None
    lookahead: Positive | None = None
    """Plays that go on from each candidate; the mean of their team rewards takes the place of the env's."""


class SamplingTable(Table):
    """``[sampling]``: how candidates are drawn and which of them is played (design: section 5)."""

    mode: Literal["tree", "chain"] = "tree"
    num_candidates: Positive = 8
    select: Literal["best", "sample", "random"] = "best"
    select_temperature: Annotated[float, Field(gt=0.0)] = 1.0
    temperature: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1.0
    max_tokens: Positive = 64
    stop: tuple[StopString, ...] = ()
    roles: dict[str, RoleSampling] = Field(default_factory=dict)


class CreditTable(Table):
    """``[credit]``: from rewards to advantages."""

    alpha: NonNegative = 1.0
    scale: Literal["std", "none"] = "std"
    returns: Literal["turn", "discounted", "final"] = Field(default="turn", alias="return")
    gamma: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    group_by: tuple[GroupKey, ...] = ("task", "role", "round")
    """Chain mode: what turns must have in common to share a baseline. A tree always compares the K of one act."""


class LossTable(Table):
    """``[loss]``: the clipped policy loss and what may be added to it."""

    clip_low: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.2
    clip_high: Annotated[float, Field(gt=0.0)] = 0.2
    aggregation: Literal["token", "sequence", "constant"] = "token"
    constant: Positive | None = None
    """The fixed length that ``aggregation = "constant"`` divides by."""
    entropy_coef: NonNegative = 0.0
    importance_cap: Annotated[float, Field(gt=0.0)] | None = None
    """C of the truncated importance weight min(exp(old - sampler), C); ``None``: off."""


class TrainTable(Table):
    """``[train]``: the loop."""

    steps: Positive
    max_generated_tokens: Positive | None = None
    """The run ends with the step in which so many tokens have been generated, if ``steps`` do not end it before."""
    tasks_per_step: Positive = 16
    steps_per_batch: Positive = 1
    refill: Annotated[int, Field(ge=0)] = 0
    """How many fresh tasks may replace tasks of a step whose peer sets are all flat."""
    micro_batch_tokens: Positive = 16384
    precision: Precision = "float32"
    """``bfloat16`` runs the learner's passes under autocast; weights and optimiser state keep their dtype. ``auto`` is
    the one of the two in which the processor is fast, chosen where the recipe is read: a run keeps what it began with.
    """
    retries: Annotated[int, Field(ge=0)] = 2
    max_failed_fraction: Fraction = 0.2
    max_skipped_updates: Positive = 5
    """The run stops after this many updates in a row with a non-finite gradient."""
    episode_deadline_s: Annotated[float, Field(gt=0.0)] = 600.0
    save_every: Positive = 10
    keep: Positive = 2
    threads: Positive | None = None
    """CPU threads of torch; ``None`` means one per core. Fixed over a run: results depend on it."""


class EvalTable(Table):
    """``[eval]``: plain play (K = 1, nothing chosen by reward)."""

    split: str = "validation"
    tasks: Positive = 100
    plays: Positive = 1
    temperature: NonNegative = 1.0
    every: Annotated[int, Field(ge=0)] = 0
    """Validate every n steps while training; 0 means only before and after."""
    every_tokens: Annotated[int, Field(ge=0)] = 0
    """Validate after the step in which another n tokens have been generated; 0: never for that reason."""
    final_split: str = "test"
    final_tasks: Positive = 1000
    final_plays: Positive | None = None
    """Plays of the sampled evaluations before and after training; ``None``: as ``plays``."""

    @property
    def validates(self) -> bool:
        """Whether there are validations while training."""
        return self.every > 0 or self.every_tokens > 0


class SandboxTable(Table):
    """``[sandbox]``: how model-written programs are run, for envs that run any."""

    slots: Positive | None = None
    """Programs that run at the same time; ``None`` means one per core."""
    mode: Literal["auto", "unsafe"] = "auto"
    """``unsafe`` runs programs without walls; the environment variable COTERIE_UNSAFE_SANDBOX=1 must agree."""


class ImitateTable(Table):
    """``[imitate]``: the supervised warm start on demonstrations of the env's scripted experts."""

    steps: Positive
    episodes: Positive = 2000
    demos_per_act: Positive = 4
    """Answers the expert gives to one prompt; the prompt is computed once for all of them."""
    batch_acts: Positive = 64
    noise: tuple[Fraction, Fraction] = (0.0, 0.5)
    """How noisy the experts play in the first and in the last demonstrations; rises with the square of the way."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 20
