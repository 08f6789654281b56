"""The trainable state of one policy: log-probs of its samples, one optimiser step, its version and its saved state.

Shapes: N completion tokens of a micro-batch, B rows, T row tokens, V vocabulary.
"""

from __future__ import annotations

import copy
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coterie.batch import MicroBatch, pack
from coterie.config import PolicyTable
from coterie.errors import TrainError
from coterie.hardware import EngineName
from coterie.loss import (
    LossInput,
    LossOutput,
    LossSettings,
    aggregation_weights,
    policy_loss,
    token_entropy,
    token_logprobs,
    token_scores,
)
from coterie.models.adapters import Adapter
from coterie.models.attention import layer_masks
from coterie.models.policy import Policy, alone, as_sampled
from coterie.run_tables import LossTable
from coterie.spent import part
from coterie.stepper import Stepper, learning_rate
from coterie.tensors import check_owner, restore_tensors, save_tensors
from coterie.types import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one call of ``Learner.step`` did. Means are over the tokens that went through the model.

    ``stepped`` is False where nothing carried a gradient or the gradient was not finite; then no weight moved.
    ``changed`` is the share of probed weights that differ afterwards. Numbers without tokens are ``None``.
    """

    version: int
    stepped: bool
    skipped_non_finite: bool
    tokens: int
    loss: float | None
    grad_norm: float | None
    entropy: float | None
    clip_fraction: float | None
    mismatch: float | None
    kl: float | None
    importance_capped: float | None
    lr: float
    changed: float

    def numbers(self) -> dict[str, float | int | None]:
        """Return the fields as metrics, optional ones only where they were measured."""
        rows: dict[str, float | int | None] = {
            "version": self.version,
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "entropy": self.entropy,
            "clip_fraction": self.clip_fraction,
            "mismatch": self.mismatch,
            "lr": self.lr,
            "changed": self.changed,
        }
        extra = {"kl": self.kl, "importance_capped": self.importance_capped}
        return rows | {name: value for name, value in extra.items() if value is not None}


def mismatch_limit(table: PolicyTable, autocast: bool, engine: EngineName | None = None) -> float:
    """Return the largest mean |sampler - learner log-prob| that a policy may have (design: invariant 6).

    ``None`` is the engine that samples from the learner's own tensors.
    """
    rough = 0.1 if engine == "vllm" else 0.05
    default = 1e-4 if table.dtype == "float32" and not autocast else rough
    return default if table.mismatch_limit is None else table.mismatch_limit


def scored_logits(model: PreTrainedModel, batch: MicroBatch) -> Tensor:
    """Return the logits that predict each completion token, (N, V); the output layer computes no others."""
    head = model.get_output_embeddings()

    def scored(module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:  # noqa: ARG001
        return (inputs[0][batch.rows_N, batch.scored_at_N],)

    hook = None if head is None else head.register_forward_pre_hook(scored)
    try:
        logits: Tensor = model(
            input_ids=batch.ids_BT,
            attention_mask=layer_masks(model, batch.mask(), batch.positions_BT, batch.positions_BT),
            position_ids=batch.positions_BT,
            use_cache=False,
        ).logits
    finally:
        if hook is not None:
            hook.remove()
    return logits if head is not None else logits[batch.rows_N, batch.scored_at_N]


class Learner:
    """Trains one policy. ``policy.model`` is trained in place, so what the engine samples from is always current."""

    def __init__(
        self,
        policy: Policy,
        table: PolicyTable,
        loss: LossTable,
        *,
        total_steps: int,
        steps_per_batch: int,
        micro_batch_tokens: int,
        autocast: bool,
        base: PreTrainedModel | None = None,
        engine: EngineName | None = None,
    ) -> None:
        """Train ``policy`` by its table. ``base`` is the model as loaded, needed for a KL to it.

        ``engine`` is what samples from it, see ``mismatch_limit``.
        """
        self.policy = policy
        self.table = table
        self.aggregation = loss.aggregation
        self.constant = loss.constant
        self.settings = LossSettings(
            clip_low=loss.clip_low,
            clip_high=loss.clip_high,
            kl_coef=table.kl.coef,
            entropy_coef=loss.entropy_coef,
            importance_cap=loss.importance_cap,
        )
        self.total_steps = total_steps
        self.steps_per_batch = steps_per_batch
        self.micro_batch_tokens = micro_batch_tokens
        self.autocast = autocast
        self.mismatch_limit = mismatch_limit(table, autocast, engine)
        self.reference: PreTrainedModel | None = None
        self.reference_adapter: Adapter | None = None
        if table.kl.coef > 0.0:
            self._set_reference(table.kl.reference, base)
        self.optimizer_steps = 0
        self.skipped_in_a_row = 0
        self.stepper = Stepper(policy.weights(), table.optimizer)

    def _set_reference(self, which: str, base: PreTrainedModel | None) -> None:
        """Keep what the KL refers to. Beside a resident model that is an adapter, or none of them: no second model."""
        adapter = self.policy.adapter
        if adapter is not None:
            self.reference = self.policy.model
            resident = adapter.resident
            self.reference_adapter = resident.copy(adapter) if which == "start" else resident.adapter_off()
            return
        self.reference = base if which == "base" else copy.deepcopy(self.policy.model)
        if self.reference is None:
            raise TrainError(f"policy {self.policy.name!r}: kl.reference = 'base' needs the base model")
        self.reference.requires_grad_(False)

    def _reference_weights(self) -> dict[str, Tensor]:
        """Return the reference's own tensors, as they are saved; none where there is nothing to save."""
        if self.reference_adapter is not None:
            return dict(self.reference_adapter.weights())
        return {} if self.reference is None else dict(self.reference.named_parameters())

    def begin(self, samples: Sequence[Sample], spent: float = 0.0) -> Callable[[], Update]:
        """Return the step itself: in one process nothing runs beside it."""
        return partial(self.step, samples, spent)

    def step(self, samples: Sequence[Sample], spent: float = 0.0) -> Update:
        """Train on one batch of this policy's own samples at its current version; return what happened.

        ``spent`` is the share of the run's token budget that is used, for the schedule of the learning rate.
        ``TrainError`` for samples of another policy or version, and for a ``mismatch`` above the limit.
        """
        for sample in samples:
            if (sample.policy, sample.version) != (self.policy.name, self.policy.version):
                raise TrainError(
                    f"policy {self.policy.name!r} at version {self.policy.version} was given a sample of "
                    f"{sample.policy!r} at version {sample.version} (peers {sample.peers}); training is on-policy"
                )
        lr = learning_rate(self.table.optimizer, self.optimizer_steps, self.total_steps, spent)
        with part("update: pack"):
            batches = self._batches(samples)
        if not batches:
            return self._nothing(lr)
        old: list[Tensor] | None = None
        first: Counter[str] = Counter()
        update: Update | None = None
        for _ in range(self.steps_per_batch):
            lr = learning_rate(self.table.optimizer, self.optimizer_steps, self.total_steps, spent)
            loss, sums, passed = self._gradients(batches, old)
            if old is None:
                old, first = passed, sums
                self._check_mismatch(first)
            with part("update: optimiser"):
                update = self._apply(loss, sums, first, lr)
        assert update is not None
        return update

    def _batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """Return the packed micro-batches. Samples without any gradient are counted in the weights, not computed.

        Those are samples with advantage exactly 0, where neither a KL penalty nor an entropy bonus gives them one. The
        bonus must reach them: a policy that has become certain of something wrong has only flat peer sets left.
        """
        lengths = [len(sample.completion_ids) for sample in samples]
        weights = aggregation_weights(lengths, self.aggregation, self.constant)
        every = self.settings.kl_coef > 0.0 or self.settings.entropy_coef > 0.0
        wanted = [i for i, sample in enumerate(samples) if every or sample.advantage != 0.0]
        return pack(
            [samples[i] for i in wanted],
            [weights[i] for i in wanted],
            self.micro_batch_tokens,
            self.policy.model.device,
            self.policy.width,
        )

    def _gradients(
        self, batches: Sequence[MicroBatch], old: Sequence[Tensor] | None
    ) -> tuple[float, Counter[str], list[Tensor]]:
        """Leave the batch's gradient in the weights; return the loss, summed metrics, and each batch's log-probs."""
        self.stepper.forget()
        total, sums, passed = 0.0, Counter[str](), []
        for index, batch in enumerate(batches):
            with part("update: forward"):
                reference_N = self._reference_logprobs(batch)
            with self.policy.alone(), as_sampled(self.policy.model, self.policy.checkpointing):
                with part("update: forward"):
                    output, logprobs_N = self._loss(batch, None if old is None else old[index], reference_N)
                with part("update: backward"):
                    output.loss.backward()  # type: ignore[no-untyped-call]
            total += output.loss.item()
            sums.update(output.sums)
            passed.append(logprobs_N.detach())
        return total, sums, passed

    def _loss(self, batch: MicroBatch, old_N: Tensor | None, reference_N: Tensor | None) -> tuple[LossOutput, Tensor]:
        """Return the loss of a micro-batch and its log-probs, (N,); without ``old_N`` it is the first pass."""
        with self._precision():
            logits_NV = scored_logits(self.policy.model, batch)
        if self.settings.entropy_coef > 0.0:
            logprobs_N = token_logprobs(logits_NV, batch.targets_N, batch.temperatures_N)
            entropy_N = token_entropy(logits_NV, batch.temperatures_N)
        else:
            logprobs_N, entropy_N = token_scores(logits_NV, batch.targets_N, batch.temperatures_N)
        inputs = LossInput(
            logprobs_N=logprobs_N,
            old_logprobs_N=logprobs_N.detach() if old_N is None else old_N,
            sampler_logprobs_N=batch.sampler_logprobs_N,
            advantages_N=batch.advantages_N,
            weights_N=batch.weights_N,
            ref_logprobs_N=reference_N,
            entropy_N=entropy_N,
        )
        return policy_loss(inputs, self.settings), logprobs_N

    def _precision(self) -> torch.autocast:
        """Return a context for passes: autocast where the recipe asks for it."""
        return torch.autocast(self.policy.model.device.type, dtype=torch.bfloat16, enabled=self.autocast)

    @torch.no_grad()
    def _reference_logprobs(self, batch: MicroBatch) -> Tensor | None:
        """Return the reference's log-probs of the batch's tokens, (N,)."""
        if self.reference is None:
            return None
        with alone(self.reference_adapter), as_sampled(self.reference), self._precision():
            logits_NV = scored_logits(self.reference, batch)
        return token_scores(logits_NV, batch.targets_N, batch.temperatures_N)[0]

    def _check_mismatch(self, sums: Counter[str]) -> None:
        """Stop the run where sampler and learner disagree: then it would not train what it sampled."""
        mismatch = sums["mismatch"] / sums["num_tokens"]
        if not mismatch <= self.mismatch_limit:
            raise TrainError(
                f"policy {self.policy.name!r}, version {self.policy.version}: mean |sampler - learner log-prob| is "
                f"{mismatch:.3g} over {int(sums['num_tokens'])} tokens, the limit is {self.mismatch_limit:g}. The "
                "engine does not sample what the learner trains; if lower precision explains it, raise "
                f"policies.{self.policy.name}.mismatch_limit"
            )

    def _apply(self, loss: float, sums: Counter[str], first: Counter[str], lr: float) -> Update:
        """Clip the gradient and take the optimiser step, unless it is not finite."""
        norm = self.stepper.clip()
        finite = math.isfinite(norm) and math.isfinite(loss)
        changed = 0.0
        if finite:
            changed = self.stepper.step(lr)
            self.policy.version += 1
        # The schedule counts attempts, so that a skipped step does not shift what follows.
        self.optimizer_steps += 1
        self.skipped_in_a_row = 0 if finite else self.skipped_in_a_row + 1
        self.stepper.forget()
        count = sums["num_tokens"]
        return Update(
            version=self.policy.version,
            stepped=finite,
            skipped_non_finite=not finite,
            tokens=int(count),
            loss=loss,
            grad_norm=norm,
            entropy=sums["entropy"] / count,
            clip_fraction=(sums["clipped_low"] + sums["clipped_high"]) / count,
            mismatch=first["mismatch"] / first["num_tokens"],
            kl=sums["ref_kl"] / count if self.reference is not None else None,
            importance_capped=None if self.settings.importance_cap is None else sums["importance_capped"] / count,
            lr=lr,
            changed=changed,
        )

    def _nothing(self, lr: float) -> Update:
        """Return the report of a batch in which nothing carried a gradient."""
        return Update(
            version=self.policy.version,
            stepped=False,
            skipped_non_finite=False,
            tokens=0,
            loss=None,
            grad_norm=None,
            entropy=None,
            clip_fraction=None,
            mismatch=None,
            kl=None,
            importance_capped=None,
            lr=lr,
            changed=0.0,
        )

    def save(self, folder: Path | None) -> None:
        """Write weights, master copies, optimiser state, counters and reference into an existing folder.

        ``None``: write nothing, but take part; of several processes that share the learner one writes.
        """
        settings = self.stepper.save(folder)
        if folder is None:
            return
        if self._reference_weights():
            save_tensors(folder / "reference.safetensors", self._reference_weights())
        counters = {
            "version": self.policy.version,
            "optimizer_steps": self.optimizer_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
        }
        state = {"policy": self.policy.name, "counters": counters, "optimizer": settings}
        (folder / "learner.json").write_text(json.dumps(state))

    def load(self, folder: Path, *, of: str | None = None) -> None:
        """Take over everything ``save`` wrote, bit for bit.

        Adapters of one model have equal names and shapes, so the state of another policy has to be asked for by ``of``.
        """
        state = json.loads((folder / "learner.json").read_text())
        check_owner(folder, state, self.policy.name if of is None else of)
        self.stepper.load(folder, state["optimizer"])
        if self._reference_weights():
            restore_tensors(folder / "reference.safetensors", self._reference_weights())
        self.policy.version = int(state["counters"]["version"])
        self.optimizer_steps = int(state["counters"]["optimizer_steps"])
        self.skipped_in_a_row = int(state["counters"]["skipped_in_a_row"])

    def kept(self, folder: Path) -> None:
        """Nothing to note: a learner in this process ends only with the run."""
