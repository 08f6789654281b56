"""Steps that are taken back: what an update does to weights and to the engine's answers, without keeping it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from coterie.config import KLTable
from coterie.engines import Request
from coterie.learner import Learner, Update
from coterie.lineup import Lineup
from coterie.probe import Draw, Probe
from coterie.types import Sample

_NUM_REQUESTS = 2
_NUM_TOKENS = 8
_NO_LIMIT = 1e9


@contextmanager
def restored(lineup: Lineup) -> Iterator[dict[str, dict[str, Tensor]]]:
    """Hand out copies of every policy's trainable weights, by policy and name; put weights and versions back after."""
    kept = {
        name: {key: weight.detach().clone() for key, weight in _trainable(lineup, name).items()}
        for name in lineup.recipe.trained_policies
    }
    versions = {name: policy.version for name, policy in lineup.policies.items()}
    try:
        yield kept
    finally:
        with torch.no_grad():
            for name, copies in kept.items():
                for key, weight in _trainable(lineup, name).items():
                    weight.copy_(copies[key])
        for name, version in versions.items():
            lineup.policies[name].version = version


def equal_weights(lineup: Lineup, name: str, copies: Mapping[str, Tensor]) -> bool:
    """Return whether the trainable weights of a policy are bit for bit the copies."""
    return all(torch.equal(weight, copies[key]) for key, weight in _trainable(lineup, name).items())


def rehearse(probe: Probe, name: str, lr: float) -> Update:
    """Take one step of a policy on its samples, with the recipe's loss and optimiser at this learning rate.

    Whoever calls this is inside ``restored``.
    """
    recipe = probe.lineup.recipe
    table = recipe.policies[name]
    optimizer = table.optimizer.model_copy(update={"lr": lr, "warmup_steps": 0, "schedule": "constant"})
    # How far engine and learner are apart is told by a check of its own; here it must not stop the step.
    table = table.model_copy(update={"optimizer": optimizer, "kl": KLTable(), "mismatch_limit": _NO_LIMIT})
    learner = Learner(
        probe.lineup.policies[name],
        table,
        recipe.loss,
        total_steps=1,
        steps_per_batch=1,
        micro_batch_tokens=recipe.train.micro_batch_tokens,
        autocast=recipe.train.precision == "bfloat16",
    )
    return learner.step(probe.samples[name])


def answers(probe: Probe) -> dict[str, list[Draw]]:
    """Return what the engine answers now, for every policy that acted: a few of its prompts, at temperature 1."""
    asked: dict[str, list[Request]] = defaultdict(list)
    for draw in probe.draws:
        request = draw.request
        if len(asked[request.policy]) < _NUM_REQUESTS:
            tokens = min(_NUM_TOKENS, request.sampling.max_tokens)
            asked[request.policy].append(
                replace(
                    request,
                    version=probe.lineup.policies[request.policy].version,
                    candidates=(0,),
                    sampling=replace(request.sampling, temperature=1.0, max_tokens=tokens),
                )
            )
    return {
        name: [
            Draw(request=request, completions=completions)
            for request, completions in zip(requests, probe.lineup.engine.generate(requests), strict=True)
        ]
        for name, requests in asked.items()
    }


def sample_of_draw(draw: Draw) -> list[Sample]:
    """Return the completions of an act as the learner takes them."""
    request = draw.request
    return [
        Sample(
            policy=request.policy,
            version=request.version,
            role=request.role,
            peers=request.episode.text(),
            prompt_ids=request.prompt_ids,
            completion_ids=completion.ids,
            sampler_logprobs=completion.logprobs,
            advantage=1.0,
            temperature=request.sampling.temperature,
        )
        for completion in draw.completions
    ]


def _trainable(lineup: Lineup, name: str) -> dict[str, Tensor]:
    return dict[str, Tensor](lineup.policies[name].weights())
