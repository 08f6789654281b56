"""Generation by vLLM, in this process: one ``LLM`` for each model, with the adapters of its policies beside it.

vLLM has weights of its own. Whatever has changed of a policy is sent before anything is generated: an adapter in a
folder as ``peft`` writes it, under a new number; the weights of a model into those that vLLM has, in place. What it
computed of prompts before that is forgotten.

A candidate is a request of its own, since its seed is; vLLM computes the beginning that requests share once.
"""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias

import torch
from transformers import PreTrainedModel

from coterie.engines import Completion, Request, Sampling
from coterie.engines.torch import asked, candidate_key
from coterie.errors import ConfigError, EngineError
from coterie.machine import folder_of
from coterie.models.adapters import Adapter, peft_config
from coterie.models.loading import LoadedModel, save
from coterie.models.policy import Policy
from coterie.tensors import save_adapter, whole
from coterie.types import StopReason

MAX_SEQUENCES = 256
"""Candidates of one model that grow at the same time; others wait."""
KEPT_TOKENS = 32768
"""Tokens whose states vLLM has room for, or one whole context if that is longer."""
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks that vLLM has room for; adapters of any rank below are padded."""
COLDEST = 0.01
"""vLLM draws at this temperature where a lower one is asked, but for 0."""
_BLOCK = 128

Stamp: TypeAlias = tuple[int, ...]


class VllmEngine:
    """Samples with vLLM's copies of the policies' weights, the versions that the policies have now."""

    def __init__(self, policies: Mapping[str, Policy], models: Mapping[str, LoadedModel]) -> None:
        """Serve these policies; ``models`` are theirs by policy. vLLM loads a model when it is first asked for.

        ``ConfigError`` without vLLM, and for a policy that it cannot serve.
        """
        if folder_of("vllm") is None:
            raise ConfigError(
                'hardware.engine = "vllm" needs the package vllm, which is not installed: pip install vllm, and then '
                'pip install "transformers>=5.24", since vLLM brings an older one (docs/numerics.md); or use '
                'engine = "torch"'
            )
        for name, policy in policies.items():
            _check_served(name, policy, models[name])
        self._policies = dict(policies)
        self._models = {id(loaded.model): loaded for loaded in models.values()}
        self._served: dict[int, _Served] = {}

    def version(self, policy: str) -> int:
        """Return the version of the weights it would generate with now."""
        return self._policies[policy].version

    def remembering(self) -> VllmEngine:
        """Return this engine, which has forgotten the prompts of earlier rollouts."""
        for served in self._served.values():
            served.forget()
        return self

    def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Return one completion per candidate for each request, in order; ``EngineError`` for another version."""
        by_model: dict[int, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_model[id(asked(self._policies, request).model)].append(index)
        answers: dict[int, tuple[Completion, ...]] = {}
        for model, indices in by_model.items():
            answers.update(zip(indices, self._answers(model, [requests[i] for i in indices]), strict=True))
        return [answers[index] for index in range(len(requests))]

    def close(self) -> None:
        """Give back vLLM's memory and what it has of ``torch.distributed``; if asked again, it loads again."""
        for served in self._served.values():
            served.close()
        if self._served:
            self._served.clear()
            from vllm.distributed import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()

    def _answers(self, model: int, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        if model not in self._served:
            mine = [policy for policy in self._policies.values() if id(policy.model) == model]
            self._served[model] = _Served(mine, self._models[model])
        from vllm.exceptions import VLLMError

        try:
            return self._served[model].answers(self._policies, requests)
        except (VLLMError, ValueError, RuntimeError) as error:
            # Acts that are still under way would be answered in the next call.
            self._served.pop(model).close()
            raise EngineError(f"vLLM failed: {type(error).__name__}: {error}") from error


class _Served:
    """A model in vLLM, and what it has of it."""

    def __init__(self, policies: Sequence[Policy], loaded: LoadedModel) -> None:
        self._policies = list(policies)
        self._has = self._model_stamp()
        self._adapters: dict[str, tuple[Stamp, Any]] = {}
        self._numbers = count(1)
        with tempfile.TemporaryDirectory() as folder:
            save(loaded, Path(folder), policies[0].model_weights())
            self._llm = _llm(folder, loaded, [p.adapter for p in policies if p.adapter is not None])

    def answers(self, policies: Mapping[str, Policy], requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        """Return the completions of each request, by the weights that the policies have now."""
        from vllm import TokensPrompt

        self._sync()
        rows = [(request, candidate) for request in requests for candidate in request.candidates]
        outputs = self._llm.generate(
            [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request, _ in rows],
            [_params(policies[request.policy], request, candidate) for request, candidate in rows],
            lora_request=[self._adapter(request.policy) for request, _ in rows],
            use_tqdm=False,
        )
        drawn = iter(
            _completion(policies[request.policy], request.sampling, output.outputs[0])
            for (request, _), output in zip(rows, outputs, strict=True)
        )
        return [tuple(next(drawn) for _ in request.candidates) for request in requests]

    def forget(self) -> None:
        """Forget all prompts."""
        if not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not empty its prefix cache, so prompts would go on from states of old weights")

    def close(self) -> None:
        """End it."""
        self._llm.llm_engine.engine_core.shutdown()

    def _sync(self) -> None:
        """Send what has changed since it was sent last."""
        stamp = self._model_stamp()
        changed = stamp != self._has
        if changed:
            weights = self._policies[0].model_weights().items()
            named = ((name, whole(weight.detach())) for name, weight in weights)
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": named})
            self._llm.apply_model(_pack_head)
            self._has = stamp
            self._adapters.clear()  # vLLM drops them with the weights beside which they were
        for policy in self._policies:
            if policy.adapter is None or policy.adapter.lora is None:
                continue
            stamp = _stamp(policy.version, policy.weights().values())
            if policy.name not in self._adapters or self._adapters[policy.name][0] != stamp:
                self._send(policy, policy.adapter, stamp)
                changed = True
        if changed:
            self.forget()

    def _model_stamp(self) -> Stamp:
        """Return the stamp of the model; beside adapters its versions are theirs."""
        owner = self._policies[0]
        return _stamp(0 if owner.adapter is not None else owner.version, owner.model_weights().values())

    def _adapter(self, policy: str) -> Any:
        return self._adapters[policy][1] if policy in self._adapters else None

    def _send(self, policy: Policy, adapter: Adapter, stamp: Stamp) -> None:
        """Give vLLM an adapter in the place of what it had of this policy."""
        from vllm.lora.request import LoRARequest

        assert adapter.lora is not None
        if policy.name in self._adapters:
            self._llm.llm_engine.remove_lora(self._adapters.pop(policy.name)[1].lora_int_id)
        number = next(self._numbers)
        layer = policy.model.get_submodule(f"{adapter.targets[0]}.base_layer")
        with tempfile.TemporaryDirectory() as folder:
            save_adapter(Path(folder), peft_config(adapter.lora, adapter.targets, layer), adapter.weights())
            request = LoRARequest(f"{policy.name}-{number}", number, folder)
            if not self._llm.llm_engine.add_lora(request):
                raise EngineError(f"vLLM did not take version {policy.version} of the adapter of {policy.name!r}")
        self._adapters[policy.name] = (stamp, request)


def _check_served(name: str, policy: Policy, loaded: LoadedModel) -> None:
    """Raise ``ConfigError`` for a policy that vLLM cannot serve."""
    if loaded.source.partition(":")[0] == "tiny":
        raise ConfigError(
            f'policies.{name}.model = "{loaded.source}": vLLM has no such model; use engine = "torch" for it'
        )
    lora = policy.adapter.lora if policy.adapter is not None else None
    if lora is not None and lora.rank > LORA_RANKS[-1]:
        raise ConfigError(f"policies.{name}.lora.rank = {lora.rank}: vLLM takes at most {LORA_RANKS[-1]}")


def _llm(folder: str, loaded: LoadedModel, adapters: Sequence[Adapter]) -> Any:
    """Return vLLM with the model of a folder, and room for its adapters."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process, where the weights are
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM

    ranks = [adapter.lora.rank for adapter in adapters if adapter.lora is not None]
    lora: dict[str, Any] = {}
    if ranks:
        rank = next(rank for rank in LORA_RANKS if rank >= max(ranks))
        lora = {"enable_lora": True, "max_loras": len(ranks), "max_lora_rank": rank}
    set_threads, threads = torch.set_num_threads, torch.get_num_threads()
    try:
        return LLM(
            model=folder,
            dtype=str(loaded.model.dtype).removeprefix("torch."),
            max_model_len=loaded.context,
            max_num_seqs=MAX_SEQUENCES,
            kv_cache_memory_bytes=_room(loaded.model, loaded.context),
            # What a checkpoint recommends for sampling must not leak into ours.
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            # On a CPU compiling takes minutes, and is off beside adapters anyway.
            enforce_eager=loaded.model.device.type == "cpu",
            **lora,
        )
    finally:
        # On a CPU vLLM puts a function that does nothing in its place; the learner's threads are the recipe's.
        torch.set_num_threads = set_threads
        torch.set_num_threads(threads)


def _pack_head(model: torch.nn.Module) -> None:
    """Prepare the output head of a model in vLLM again: tied to the embeddings it is not loaded by itself, and on a CPU
    it goes on multiplying with a packed copy of what it was.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def _room(model: PreTrainedModel, context: int) -> int:
    """Return the bytes of the keys and values of as many tokens as are kept."""
    config = model.config.get_text_config().to_dict()
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    values = 2 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * width
    blocks = -(-max(KEPT_TOKENS, context) // _BLOCK) + 2
    return int(values * model.dtype.itemsize * blocks * _BLOCK)


def _params(policy: Policy, request: Request, candidate: int) -> Any:
    """Return how vLLM draws a candidate: from the whole distribution, until one of the policy's end tokens."""
    from vllm import SamplingParams

    sampling = request.sampling
    if 0.0 < sampling.temperature < COLDEST:
        raise EngineError(f"temperature {sampling.temperature:g}: vLLM has 0 (greedy), or {COLDEST:g} and more")
    return SamplingParams(
        temperature=sampling.temperature,
        seed=candidate_key(request, candidate) % 2**63,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop),
        stop_token_ids=sorted(policy.end_ids),
        ignore_eos=True,  # what else vLLM takes for an end
        logprobs=0,
        detokenize=bool(sampling.stop),
    )


def _completion(policy: Policy, sampling: Sampling, output: Any) -> Completion:
    """Return what vLLM drew, ended where ``Sampling.ending`` ends it: vLLM decodes and looks for stops differently."""
    ids = tuple(output.token_ids)
    if output.finish_reason not in ("stop", "length") or not ids:
        raise EngineError(f"vLLM ended a completion of {len(ids)} tokens for the reason {output.finish_reason!r}")
    decode = policy.renderer.decode
    length, ending = 0, None
    while ending is None and length < len(ids):
        length += 1
        ending = sampling.ending(ids[:length], policy.end_ids, decode)
    if ending is None:  # the context is full, or vLLM sees a stop string in what decodes to another text
        ending = StopReason.LENGTH if output.finish_reason == "length" else StopReason.STOP, None
    rows = zip(ids[:length], output.logprobs[:length], strict=True)
    # Greedy tokens are certain. Else rounding may leave a little more than 0 of one that nearly is.
    logprobs = tuple(0.0 if sampling.temperature == 0.0 else min(row[token].logprob, 0.0) for token, row in rows)
    stop, text = ending
    return Completion(
        ids=ids[:length], logprobs=logprobs, text=decode(ids[:length]) if text is None else text, stop_reason=stop
    )


def _stamp(version: int, tensors: Iterable[torch.Tensor]) -> Stamp:
    """Return what differs once any of the tensors was written to, by an update or by anything else in place."""
    return version, *(tensor._version for tensor in tensors)
