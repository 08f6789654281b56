"""Coterie as a measured system, with sharing or without."""

from __future__ import annotations

import time

import torch
import transformers
from cells import Cell, advantages_of, completions_of, prompts_of
from serve import Order, channel, order, serve

from coterie import batch as packing
from coterie.config import LossTable, PolicyTable
from coterie.engines import Request, Sampling
from coterie.engines.torch import TorchEngine
from coterie.learner import Learner, scored_logits
from coterie.loss import token_logprobs
from coterie.machine import keep_freed_memory
from coterie.models.adapters import Resident
from coterie.models.attention import use_attention
from coterie.models.chat import ChatRenderer
from coterie.models.loading import LoadedModel, load
from coterie.models.policy import Policy
from coterie.provenance import code_version
from coterie.types import EpisodeKey, Sample

MICRO_BATCH_TOKENS = 4096
"""Tokens of a micro-batch: large enough for the matrix products, small enough for the memory of the peers."""


class Coterie:
    """Policies, an engine and learners over the cell's tokens."""

    def __init__(self, asked: Order) -> None:
        self.cell = cell = asked.cell
        self.shared = asked.settings.get("shared", True)
        self.step = 0
        loaded = [load(cell.folder, seed=0, dtype=cell.dtype) for _ in range(max(1, cell.policies))]
        for model in loaded:
            use_attention(model.model)
        table = PolicyTable.model_validate(
            {
                "model": cell.folder,
                "dtype": cell.dtype,
                "mismatch_limit": 1e9,  # the completions are drawn at random, not by the model
                "train": "lora" if cell.adapters else "full",
            }
        )
        self.policies = _policies(cell, loaded, table)
        self.engine = TorchEngine({policy.name: policy for policy in self.policies})
        self.learners = {
            policy.name: Learner(
                policy,
                table,
                LossTable(),
                total_steps=1000,
                steps_per_batch=1,
                micro_batch_tokens=MICRO_BATCH_TOKENS,
                autocast=False,
            )
            for policy in self.policies
            if cell.kind in ("update", "step")
        }
        if not self.shared:
            packing._rows = _rows_apart

    def owner(self, prompt: int) -> Policy:
        """Return whose prompt it is: an even share for each policy."""
        return self.policies[prompt * len(self.policies) // self.cell.prompts]

    def requests(self) -> list[Request]:
        """Return one act per prompt, or without sharing one per candidate."""
        every = tuple(range(self.cell.candidates))
        groups = [every] if self.shared else [(number,) for number in every]
        return [
            Request(
                episode=EpisodeKey(seed=0, purpose="train", step=self.step, task_id=f"task {number}", index=group[0]),
                act=0,
                role="role",
                seat=0,
                policy=self.owner(number).name,
                version=self.owner(number).version,
                prompt_ids=tuple(ids),
                candidates=group,
                sampling=Sampling(temperature=1.0, max_tokens=self.cell.new),
            )
            for number, ids in enumerate(prompts_of(self.cell))
            for group in groups
        ]

    def samples(self, drawn: list[list[tuple[tuple[int, ...], tuple[float, ...]]]]) -> dict[str, list[Sample]]:
        """Return the samples of every policy: per prompt, ids and log-probs of its candidates."""
        samples: dict[str, list[Sample]] = {policy.name: [] for policy in self.policies}
        for number, (ids, advantages) in enumerate(zip(prompts_of(self.cell), advantages_of(self.cell), strict=True)):
            policy = self.owner(number)
            samples[policy.name] += [
                Sample(
                    policy=policy.name,
                    version=policy.version,
                    role="role",
                    peers=str(number),
                    prompt_ids=tuple(ids),
                    completion_ids=completion,
                    sampler_logprobs=logprobs,
                    advantage=advantage,
                    temperature=1.0,
                )
                for (completion, logprobs), advantage in zip(drawn[number], advantages, strict=True)
            ]
        return samples

    def generate(self) -> list[list[tuple[tuple[int, ...], tuple[float, ...]]]]:
        """Return ids and log-probs of every candidate, by prompt."""
        self.step += 1
        flat = [c for drawn in self.engine.remembering().generate(self.requests()) for c in drawn]
        width = self.cell.candidates
        return [[(c.ids, c.logprobs) for c in flat[i * width : (i + 1) * width]] for i in range(self.cell.prompts)]

    def given(self) -> list[list[tuple[tuple[int, ...], tuple[float, ...]]]]:
        """Return the completions that every system is given, as if drawn with log-prob 0."""
        return [[(tuple(ids), (0.0,) * len(ids)) for ids in drawn] for drawn in completions_of(self.cell)]

    def run(self) -> int:
        drawn = self.generate() if self.cell.kind in ("generate", "step") else self.given()
        for name, samples in self.samples(drawn).items() if self.learners else ():
            update = self.learners[name].step(samples)
            assert update.stepped
        return sum(len(ids) for candidates in drawn for ids, _ in candidates)

    @torch.no_grad()
    def logprobs(self) -> list[float]:
        policy, samples = self.policies[0], self.samples(self.given())[self.policies[0].name]
        chosen = samples[: self.cell.candidates]
        (batch,) = packing.pack(chosen, [1.0] * len(chosen), 10**6, policy.model.device, policy.width)
        logprobs_N = token_logprobs(scored_logits(policy.model, batch), batch.targets_N)
        return logprobs_N[batch.members_N == batch.samples.index(0)].tolist()

    def gemm(self) -> float:
        return gemm_rate(self.policies[0])


def gemm_rate(policy: Policy, rows: int = 2048, repeats: int = 5) -> float:
    """Return floating-point operations per second of products of ``rows`` tokens with a layer's largest matrix."""
    weight = max((p for n, p in policy.model.named_parameters() if "mlp" in n), key=torch.Tensor.numel).detach()
    inputs = torch.randn(rows, weight.shape[1], dtype=weight.dtype)
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for _ in range(4):
            torch.nn.functional.linear(inputs, weight)
        best = min(best, (time.perf_counter() - start) / 4)
    return 2.0 * rows * weight.numel() / best


def _policies(cell: Cell, loaded: list[LoadedModel], table: PolicyTable) -> list[Policy]:
    adapters = []
    if cell.adapters:
        resident = Resident(loaded[0].model)
        assert table.lora is not None
        adapters = [resident.attach(f"policy{number}", table.lora, 0) for number in range(cell.adapters)]
    models = loaded if not adapters else loaded * len(adapters)
    return [
        Policy(
            name=f"policy{number}",
            model=model.model,
            renderer=ChatRenderer(model.tokenizer),
            context=model.context,
            end_ids=frozenset(),  # every completion is as long as the cell says
            adapter=adapters[number] if adapters else None,
        )
        for number, model in enumerate(models)
    ]


def _rows_apart(samples: list[Sample], max_tokens: int, width: int) -> list[packing._Row]:
    """Return one row per sample: nothing is shared."""
    return [
        packing._Row((number,), (0,), len(sample.prompt_ids) + len(sample.completion_ids))
        for number, sample in enumerate(samples)
    ]


def main() -> None:
    asked, answers = order(), channel()
    torch.set_num_threads(asked.cell.threads)
    keep_freed_memory()
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        **{f"coterie {name}": str(value) for name, value in code_version().items()},
    }
    serve(Coterie(asked), answers, versions)


if __name__ == "__main__":
    main()
