"""LoRA adapters of several policies beside one resident model: whose tensors are whose, and which act in a pass.

Outside of ``only`` and ``rows`` the model acts as itself, and nothing on it asks for a gradient. Inside ``only`` one
adapter acts and its tensors ask for gradients, no others. So one policy cannot train another by accident, whatever
``peft`` switches when it activates an adapter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, LoraModel
from peft.tuners.lora import LoraLayer
from torch.nn import Parameter
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from coterie.errors import ConfigError
from coterie.keyed import stable_hash
from coterie.policy_tables import LoraTable

BASE = "__base__"
"""The route of a row that goes through no adapter; peft's own word for it."""
_INSIDE = ".base_layer"


class Resident:
    """One model in memory that several policies share, each with an adapter of its own or with none."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take over a model without adapters; its weights no longer ask for gradients."""
        self.model = model
        model.requires_grad_(False)
        head = model.get_output_embeddings()
        self._linear = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | Conv1D) and module is not head
        }
        self._tuner: LoraModel | None = None
        self._layers: dict[str, LoraLayer] = {}
        self._tensors: dict[str, dict[str, Parameter]] = {}

    def attach(self, policy: str, lora: LoraTable, seed: int) -> Adapter:
        """Return a new adapter, float32, that changes nothing yet: its B is 0.

        Its A is drawn from the seed, the policy's name and the tensor's; the global random state is not used.
        ``ConfigError`` where a target matches no linear module.
        """
        # Not the policy's name: peft refuses some names and looks for others inside module names.
        key = f"adapter{len(self._tensors)}"
        targets = self._targets(policy, lora)
        config = peft_config(lora, targets, self._linear[targets[0]])
        with torch.random.fork_rng(devices=[]):
            if self._tuner is None:
                self._tuner = LoraModel(self.model, config, key)
            else:
                self._tuner.peft_config[key] = config
                self._tuner.inject_adapter(self.model, key)
        self._layers = {name: m for name, m in self.model.named_modules() if isinstance(m, LoraLayer)}
        tensors = self._tensors[key] = self._found(key)
        self._activate(BASE)
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.data = tensor.data.float()
                if name.endswith("lora_A.weight"):
                    tensor.copy_(_uniform(tensor, stable_hash("lora", seed, policy, name)))
                else:
                    tensor.zero_()
        return Adapter(self, key, lora, tuple(targets))

    def find_again(self) -> None:
        """Look for the adapters' tensors once more: sharding puts others into the modules."""
        self._tensors = {key: self._found(key) for key in self._tensors}

    def _found(self, key: str) -> dict[str, Parameter]:
        """Return the tensors of an adapter as they are in the model's modules now."""
        tensors: dict[str, Parameter] = {}
        for name, layer in self._layers.items():
            if key in layer.lora_A:
                tensors[f"{name}.lora_A.weight"] = layer.lora_A[key].weight
                tensors[f"{name}.lora_B.weight"] = layer.lora_B[key].weight
        return tensors

    def adapter_off(self) -> Adapter:
        """Return what a policy has that plays the model as it is."""
        return Adapter(self, BASE, None, ())

    def copy(self, adapter: Adapter) -> Adapter:
        """Return a new adapter with the values that one has now."""
        if adapter.lora is None:
            return self.adapter_off()
        again = self.attach("copy", adapter.lora, 0)
        with torch.no_grad():
            for name, tensor in again.weights().items():
                tensor.copy_(adapter.weights()[name])
        return again

    def weights(self) -> dict[str, Parameter]:
        """Return the model's own weights, by the names they have without adapters."""
        mine = {id(tensor) for tensors in self._tensors.values() for tensor in tensors.values()}
        named = self.model.named_parameters()
        return {name.replace(_INSIDE, ""): weight for name, weight in named if id(weight) not in mine}

    def tensors(self, key: str) -> dict[str, Parameter]:
        """Return the tensors of one adapter by the names peft writes, without its prefix; none for ``BASE``."""
        return dict(self._tensors[key]) if key != BASE else {}

    @contextmanager
    def only(self, key: str) -> Iterator[None]:
        """Let one adapter (or with ``BASE`` none) act in all passes, backward ones included, and ask for gradients."""
        self._activate(key)
        try:
            yield
        finally:
            self._activate(BASE)

    @contextmanager
    def rows(self, routes: Sequence[str]) -> Iterator[None]:
        """Let row i of every pass go through adapter ``routes[i]``. No gradients.

        The list may be shortened between passes. Rows are prompts, so nothing is shared across adapters.
        """
        if len(set(routes)) == 1:
            with torch.no_grad(), self.only(routes[0]):
                yield
            return

        def route(module: LoraLayer, args: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:  # noqa: ARG001
            return args, {**options, "adapter_names": routes}

        hooks = [layer.register_forward_pre_hook(route, with_kwargs=True) for layer in self._layers.values()]
        try:
            with torch.no_grad():
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _activate(self, key: str) -> None:
        """Switch adapters; afterwards the tensors of this one ask for gradients, and no others of the model."""
        for layer in self._layers.values():
            # In inference mode this takes every gradient flag of the layer's adapters away; none is given yet.
            layer.set_adapter([] if key == BASE else [key], inference_mode=True)
        for tensor in self.tensors(key).values():
            tensor.requires_grad_(True)

    def _targets(self, policy: str, lora: LoraTable) -> list[str]:
        """Return the full names of the modules that an adapter goes beside."""
        wanted = lora.target_modules
        if wanted == "all-linear":
            return list(self._linear)
        for target in wanted:
            if not any(_matches(name, target) for name in self._linear):
                known = sorted({name.rpartition(".")[2] for name in self._linear})
                raise ConfigError(
                    f"policies.{policy}.lora.target_modules: {target!r} matches no linear module of "
                    f"{type(self.model).__name__} (the output head is left out); there are {known}. Name some of "
                    'these, or use "all-linear"'
                )
        return [name for name in self._linear if any(_matches(name, target) for target in wanted)]


@dataclass(frozen=True, slots=True)
class Adapter:
    """What one policy adds to a resident model: the tensors under a key, or with ``BASE`` nothing.

    ``targets`` are the full names of the modules it goes beside.
    """

    resident: Resident
    key: str
    lora: LoraTable | None
    targets: tuple[str, ...]

    def weights(self) -> dict[str, Parameter]:
        """Return the adapter's tensors; the names are the same for every policy."""
        return self.resident.tensors(self.key)


def peft_config(lora: LoraTable, targets: Sequence[str], module: torch.nn.Module) -> LoraConfig:
    """Return peft's description of an adapter beside the modules of these full names; ``module`` is one of them."""
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(targets),
        lora_dropout=lora.dropout,
        fan_in_fan_out=isinstance(module, Conv1D),
    )


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _uniform(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return the values a fresh linear layer of this shape would have: uniform, at most 1 / sqrt(inputs)."""
    generator = torch.Generator().manual_seed(seed % 2**63)
    bound = 1.0 / math.sqrt(tensor.shape[1])
    return torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator)
