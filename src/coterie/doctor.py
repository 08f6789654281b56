"""Checks that prove, on a recipe's own models and templates, that what is sampled is what is trained.

Each check looks at a ``Probe`` and returns findings; ``examine`` runs them all. Weights that a check changes are put
back, and no file is touched.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

import torch

from coterie.batch import unpack
from coterie.engines import Completion
from coterie.env import Prompt
from coterie.errors import guarded
from coterie.estimate import policy_memory, readable_bytes
from coterie.learner import mismatch_limit, scored_logits
from coterie.lineup import Lineup
from coterie.loss import token_logprobs
from coterie.models.chat import ChatRenderer, template_agrees, template_extends
from coterie.probe import Draw, Probe, take_probe, trained_ids
from coterie.rehearsal import answers, equal_weights, rehearse, restored, sample_of_draw
from coterie.types import Failure, Sample, Turn

_LARGE_LR = {"full": 1e-4, "lora": 1e-3}
"""A step of at least this size shows in the engine's log-probs, whatever the precision; it is taken back."""
_NUM_PROMPTS = 8


class Verdict(StrEnum):
    """What a check came to."""

    OK = "ok"
    WARNING = "warning"
    FAIL = "fail"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One result: of which check, what was found in numbers, and what to do unless it is ``ok``.

    A check that looks at several things names them after a comma: ``chat template, second turn``.
    """

    check: str
    verdict: Verdict
    message: str
    remedy: str = ""


Check = Callable[[Probe], list[Finding]]


def examine(lineup: Lineup, available_memory: int | None = None) -> list[Finding]:
    """Return the findings of all checks, in their order. A check that breaks has failed; the others still run."""
    probes: list[Probe] = []
    failures: list[Failure] = []
    with guarded("play", failures.append):
        probes.append(take_probe(lineup, available_memory))
    if failures:
        return [_broken("the team plays", failures[0])]
    return [finding for name, check in CHECKS.items() for finding in run_check(name, check, probes[0])]


def run_check(name: str, check: Check, probe: Probe) -> list[Finding]:
    """Return the findings of one check under its name; what it raises is one of them."""
    failures: list[Failure] = []
    findings: list[Finding] = []
    with guarded(name, failures.append):
        findings = [replace(finding, check=name + finding.check) for finding in check(probe)]
    return [*findings, *(_broken(name, failure) for failure in failures)]


# ---- the checks -----------------------------------------------------------------------------------------------------


def sampled_ids_are_trained(probe: Probe) -> list[Finding]:
    """Compare what the engine answered with what comes out of the learner's tensors: number and value of every id."""
    findings = []
    for name in probe.trained:
        drawn = Counter(
            (draw.request.prompt_ids, completion.ids)
            for draw in probe.draws
            if draw.request.policy == name
            for completion in draw.completions
        )
        samples = probe.samples.get(name, ())
        packed = Counter(pair for batch in probe.batches(samples) for pair in unpack(batch))
        tokens = sum(len(completion) * count for (_, completion), count in packed.items())
        lost, added = drawn - packed, packed - drawn
        if not drawn:
            findings.append(_warning(f"{name}: no role of it acted in these plays", "play with other tasks"))
        elif lost or added:
            example = next(iter(added or lost))[1]
            findings.append(
                _fail(
                    f"{name}: {lost.total()} of {drawn.total()} sampled completions are not trained as sampled, "
                    f"{added.total()} are trained that were not sampled, such as ids {list(example[:12])}",
                    "train on the ids the engine returned; never encode text again",
                )
            )
        else:
            findings.append(_ok(f"{name}: {drawn.total()} completions, {tokens} tokens, all equal"))
    return findings


def logprobs_agree(probe: Probe) -> list[Finding]:
    """Compare the engine's log-probs with those of the learner's passes, as training does at every update.

    Where training runs in autocast, the passes are compared in the weights' own precision too: rounding hides less.
    """
    findings = []
    for name in _with_samples(probe):
        findings.append(_agreement(probe, name, probe.samples[name], ""))
        if probe.lineup.recipe.train.precision == "bfloat16":
            trained = _agreement(probe, name, probe.samples[name], ", as trained (autocast)", autocast=True)
            findings.append(replace(trained, check=", autocast"))
    return findings


def template_is_sound(probe: Probe) -> list[Finding]:
    """Compare rendering with a plain template call, on simple texts and on the env's prompts; see whether it extends.

    A template that does not extend is a failure where the env quotes a role's own turns, else a warning.
    """
    findings = []
    for name, prompts in probe.prompts.items():
        renderer = probe.lineup.policies[name].renderer
        advice = f'set policies.{name}.template ("plain" always works) or its template_options'
        different = template_agrees(renderer)
        if different is not None:
            findings.append(replace(_fail(f"{name}: {different}", advice), check=", simple texts"))
        findings += _prompts_agree(name, renderer, prompts, advice)
        cut = template_extends(renderer)
        if cut is None:
            second = _ok(f"{name}: a second turn's prompt extends the first turn's ids")
        elif any(_quotes_own(prompt) for prompt in prompts):
            second = _fail(f"{name}: {cut}, and the env quotes the role's own turns", advice)
        else:
            second = _warning(f"{name}: {cut}; the env quotes no own turns, so nothing depends on it", advice)
        findings.append(replace(second, check=", second turn"))
    return findings


def updates_reach_the_engine(probe: Probe) -> list[Finding]:
    """Take one large step per policy: the engine must answer with the new weights, and with no other policy's."""
    findings = []
    for name in _with_samples(probe):
        table = probe.lineup.recipe.policies[name]
        lr = max(_LARGE_LR[table.train], table.optimizer.lr)
        with restored(probe.lineup) as kept:
            before = answers(probe)
            rehearse(probe, name, lr)
            after = answers(probe)
            changed = [other for other in before if _completions(before[other]) != _completions(after[other])]
            changed += [other for other in kept if not equal_weights(probe.lineup, other, kept[other])]
            others = sorted({other for other in changed if other != name})
            if others:
                findings.append(
                    _fail(f"{name}: its update changes {others} too", "policies must not share trained weights")
                )
            if _completions(before[name]) == _completions(after[name]):
                findings.append(
                    _fail(
                        f"{name}: after an update the engine answers exactly as before",
                        "the engine serves a stale copy: it must take over the learner's weights at every version",
                    )
                )
            else:
                samples = [sample for draw in after[name] for sample in sample_of_draw(draw)]
                findings.append(_agreement(probe, name, samples, ", after an update that changed its answers only"))
    return findings


def end_tokens_are_trained(probe: Probe) -> list[Finding]:
    """See that packing keeps every completion token, the end token too, with a weight, and gives padding none.

    Besides the sampled completions, made-up ones are packed: one per end token, one of nothing else, one without.
    """
    findings = []
    for name in _with_samples(probe):
        policy = probe.lineup.policies[name]
        first = probe.samples[name][0]
        plain = next(index for index in range(len(policy.end_ids) + 1) if index not in policy.end_ids)
        made_up = [(plain, plain, plain), *((plain, end) for end in sorted(policy.end_ids))]
        made_up += [(end,) for end in sorted(policy.end_ids)]
        samples = [
            # prompts of different lengths, so that there is padding
            replace(
                first, prompt_ids=first.prompt_ids[: 1 + number], completion_ids=ids, sampler_logprobs=(0.0,) * len(ids)
            )
            for number, ids in enumerate(made_up)
        ]
        every = [*probe.samples[name], *samples]
        wanted = Counter(sample.completion_ids for sample in every)
        found = Counter(ids for batch in probe.batches(every) for ids in trained_ids(batch))
        ended = sum(sample.completion_ids[-1] in policy.end_ids for sample in probe.samples[name])
        lost = wanted - found
        if lost or found - wanted:
            example = next(iter(lost), ())
            findings.append(
                _fail(
                    f"{name}: {lost.total()} of {wanted.total()} completions lose tokens in training, such as ids "
                    f"{list(example[-4:])}; end tokens are {sorted(policy.end_ids)}",
                    "mask by position, never by token id: the pad token may be the end token",
                )
            )
        else:
            findings.append(
                _ok(
                    f"{name}: end tokens {sorted(policy.end_ids)} keep their weight, padding has none; "
                    f"{ended} of {len(probe.samples[name])} sampled completions ended with one"
                )
            )
    return findings


def a_step_changes_weights(probe: Probe) -> list[Finding]:
    """Take one step per policy at its recipe's full learning rate, and take it back."""
    findings = []
    for name in _with_samples(probe):
        lr = probe.lineup.recipe.policies[name].optimizer.lr
        with restored(probe.lineup):
            update = rehearse(probe, name, lr)
        norm = "none" if update.grad_norm is None else f"{update.grad_norm:.3g}"
        numbers = f"{name}: {100.0 * update.changed:.1f}% of the weights changed at lr {lr:g}, gradient norm {norm}"
        if update.stepped and update.changed > 0.0:
            findings.append(_ok(numbers))
        else:
            findings.append(
                _fail(numbers, f"raise policies.{name}.optimizer.lr, or use float32; a gradient must be finite")
            )
    return findings


def memory_suffices(probe: Probe) -> list[Finding]:
    """Compare the estimated memory of training, beyond the loaded weights, with what the machine has left."""
    memories = [policy_memory(probe.lineup, name) for name in probe.lineup.policies]
    total = sum(memory.total for memory in memories)
    more = total - sum(memory.weights for memory in memories)
    numbers = f"about {readable_bytes(total)} in all, {readable_bytes(more)} of it beyond the loaded weights"
    if probe.available_memory is None:
        return [_ok(f"{numbers}; what this machine has left is not known")]
    numbers += f"; {readable_bytes(probe.available_memory)} are left"
    if more <= probe.available_memory:
        return [_ok(numbers)]
    return [_fail(numbers, "lower train.micro_batch_tokens, use dtype = 'bfloat16', or a smaller model")]


CHECKS: dict[str, Check] = {
    "sampled ids are trained ids": sampled_ids_are_trained,
    "engine and learner agree": logprobs_agree,
    "chat template": template_is_sound,
    "updates reach the engine": updates_reach_the_engine,
    "end tokens are trained": end_tokens_are_trained,
    "a step changes weights": a_step_changes_weights,
    "memory": memory_suffices,
}


# ---- machinery below ------------------------------------------------------------------------------------------------


def _with_samples(probe: Probe) -> list[str]:
    """Return the trained policies that acted; that one did not is told by the first check."""
    return [name for name in probe.trained if probe.samples.get(name)]


@torch.no_grad()
def _agreement(probe: Probe, name: str, samples: Sequence[Sample], when: str, *, autocast: bool = False) -> Finding:
    """Return how far the engine's log-probs of samples are from those of the learner's passes, against the limit."""
    policy = probe.lineup.policies[name]
    gaps = []
    for batch in probe.batches(samples):
        kind = policy.model.device.type
        with policy.alone(), torch.autocast(kind, dtype=torch.bfloat16, enabled=autocast):
            logits = scored_logits(policy.model.eval(), batch)
        logprobs = token_logprobs(logits, batch.targets_N, batch.temperatures_N)
        gaps.append((logprobs - batch.sampler_logprobs_N).abs())
    every_gap = torch.cat(gaps)
    recipe = probe.lineup.recipe
    mean = float(every_gap.mean())
    limit = mismatch_limit(recipe.policies[name], autocast, recipe.hardware.of(name).engine)
    numbers = (
        f"{name}: log-probs differ by {mean:.2g} on average, {float(every_gap.max()):.2g} at most, over "
        f"{len(every_gap)} tokens{when}; allowed on average is {limit:g}"
    )
    if mean <= limit:  # false for NaN too
        return _ok(numbers)
    return _fail(
        numbers,
        "the learner must score at the temperature, with the weights and on the ids that were sampled; where nothing "
        f"but lower precision explains it, raise policies.{name}.mismatch_limit",
    )


def _prompts_agree(name: str, renderer: ChatRenderer, prompts: Sequence[Prompt], advice: str) -> list[Finding]:
    """Return the findings on the env's own prompts, of text alone: with turns, ids are reused and may well differ."""
    texts = [prompt for prompt in prompts if not _turns(prompt) and not _forges(renderer, prompt)][:_NUM_PROMPTS]
    pairs = [(renderer.render(prompt), renderer.reference_ids(prompt)) for prompt in texts]
    spaced = [pair for pair in pairs if pair[0] != pair[1]]
    rewritten = [pair for pair in spaced if _gist(renderer, pair[0]) != _gist(renderer, pair[1])]
    if rewritten:
        return [
            _fail(
                f"{name}: the template rewrites or drops contents of {len(rewritten)} of {len(pairs)} prompts of "
                "the env; a plain template call would ask something else than is trained",
                advice,
            )
        ]
    if spaced:
        return [
            _warning(
                f"{name}: a plain template call gives other white space in {len(spaced)} of {len(pairs)} prompts",
                "use the ids of ChatRenderer where the exported model is used, or prompts without outer white space",
            )
        ]
    return [_ok(f"{name}: {len(pairs)} prompts of the env, each as a plain template call gives it")] if pairs else []


def _gist(renderer: ChatRenderer, ids: Sequence[int]) -> tuple[str, list[int]]:
    """Return the text without any white space, and the control tokens."""
    return "".join(renderer.decode(ids).split()), [index for index in ids if index in renderer.control_ids]


def _turns(prompt: Prompt) -> list[tuple[str, Turn]]:
    """Return the turns a prompt quotes, each with the role of its message."""
    messages = () if isinstance(prompt, str) else prompt
    return [(message.role, part) for message in messages for part in message.parts if isinstance(part, Turn)]


def _quotes_own(prompt: Prompt) -> bool:
    return any(role == "assistant" for role, _ in _turns(prompt))


def _forges(renderer: ChatRenderer, prompt: Prompt) -> bool:
    """Return whether a text of the prompt looks like a control token; a plain template call would take it for one."""
    parts = [prompt] if isinstance(prompt, str) else [part for message in prompt for part in message.parts]
    return any(renderer.forged_control_tokens(part) for part in parts if isinstance(part, str))


def _completions(draws: Sequence[Draw]) -> list[tuple[Completion, ...]]:
    return [draw.completions for draw in draws]


def _ok(message: str) -> Finding:
    return Finding(check="", verdict=Verdict.OK, message=message)


def _warning(message: str, remedy: str) -> Finding:
    return Finding(check="", verdict=Verdict.WARNING, message=message, remedy=remedy)


def _fail(message: str, remedy: str) -> Finding:
    return Finding(check="", verdict=Verdict.FAIL, message=message, remedy=remedy)


def _broken(check: str, failure: Failure) -> Finding:
    return Finding(
        check=check,
        verdict=Verdict.FAIL,
        message=f"{failure.kind}: {failure.message}",
        remedy="the check itself could not be made; mend this first",
    )
