"""Tensors on disk, exact to the bit and without pickle: safetensors for numbers, JSON for the rest."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors.torch
import torch
from peft import PeftConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from torch.distributed.tensor import DTensor, distribute_tensor

from coterie.errors import CheckpointError, TrainError
from coterie.types import Json

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return all of a tensor that may be sharded over processes; then all of them must ask, in the same order."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def give_shards(tensors: Mapping[str, torch.Tensor]) -> None:
    """Take part in the gathering of tensors that another process writes or sends, in the same order."""
    for tensor in tensors.values():
        whole(tensor.detach())


def like(full: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return a tensor that every process has, sharded as the target is."""
    if not isinstance(target, DTensor):
        return full
    return distribute_tensor(full.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write named tensors (any device, shape and dtype) as one safetensors file; ``OSError`` where the disk refuses.

    Tensors that share memory are written one by one; loading gives independent ones.
    """
    owned: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, tensor in tensors.items():
        plain = whole(tensor.detach()).to("cpu").contiguous()
        address = plain.untyped_storage().data_ptr()
        # safetensors refuses shared memory, and tied weights share theirs
        owned[name] = plain.clone() if address in seen else plain
        seen.add(address)
    try:
        safetensors.torch.save_file(owned, path, metadata={"format": "pt"})
    except SafetensorError as error:
        # the writer reports a full disk as text; the callers must be able to tell it from a bug
        match = _OS_ERROR.search(str(error))
        if match is None:
            raise
        raise OSError(int(match[1]), str(error), str(path)) from error


def save_adapter(folder: Path, config: PeftConfig, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write an adapter into a folder as ``peft`` reads it; the names are those without peft's prefix."""
    config.save_pretrained(folder)
    save_tensors(folder / SAFETENSORS_WEIGHTS_NAME, {f"base_model.model.{name}": t for name, t in tensors.items()})


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, on the CPU, bit for bit as saved; ``CheckpointError`` where it cannot be read."""
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from error
    return tensors


def tensor_bytes(tensors: Mapping[str, torch.Tensor]) -> bytes:
    """Return named tensors as the bytes of a safetensors file; no two may share memory."""
    data: bytes = safetensors.torch.save(
        {name: whole(t.detach()).to("cpu").contiguous() for name, t in tensors.items()}
    )
    return data


def tensors_of(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors that ``tensor_bytes`` was given, on the CPU, bit for bit."""
    tensors: dict[str, torch.Tensor] = safetensors.torch.load(data)
    return tensors


def restore_tensors(path: Path, targets: Mapping[str, torch.Tensor]) -> None:
    """Copy a file's tensors into these; ``CheckpointError`` unless it has every name and no other, in the same shapes.

    Nothing is copied where something does not fit.
    """
    copy_tensors(load_tensors(path), targets, str(path))


@torch.no_grad()
def copy_tensors(saved: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], path: str) -> None:
    """Copy tensors into others, as ``restore_tensors`` does; ``path`` says in errors where they come from."""
    if set(saved) != set(targets):
        different = sorted(set(saved) ^ set(targets))
        raise CheckpointError(f"{path}: tensors differ from the policy's, first {different[0]!r} of {len(different)}")
    for name, tensor in targets.items():
        if saved[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: {name!r} has shape {tuple(saved[name].shape)}, the policy's {tuple(tensor.shape)}; resume "
                "with the model and adapter settings the checkpoint was written with"
            )
    for name, tensor in targets.items():
        tensor.copy_(like(saved[name], tensor))


def flatten_optimizer(
    optimizer: torch.optim.Optimizer, names: Sequence[str]
) -> tuple[dict[str, torch.Tensor], dict[str, Json]]:
    """Return an optimiser's state as flat tensors (``"layer.weight/exp_avg"``) and JSON (groups, plain numbers).

    ``names`` are the parameters' names in the order of the param groups.
    """
    state = optimizer.state_dict()
    _check_names(optimizer, names)
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Json] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{names[index]}/{key}"] = value
            else:
                plain[f"{names[index]}/{key}"] = value
    groups: list[Json] = []
    for group in state["param_groups"]:
        for key, value in group.items():
            if isinstance(value, torch.Tensor):
                raise TrainError(f"optimiser option {key!r} is a tensor: expected a number, which JSON keeps exactly")
        groups.append({**group, "params": [names[index] for index in group["params"]]})
    return tensors, {"state": plain, "groups": groups}


def restore_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    plain: Mapping[str, Json],
) -> None:
    """Give an optimiser the state that ``flatten_optimizer`` returned, exact to the bit.

    Raises ``CheckpointError`` where parameters, groups or shapes are not those of the saved optimiser.
    """
    _check_names(optimizer, names)
    current = optimizer.state_dict()["param_groups"]
    saved_groups, saved_state = plain["groups"], plain["state"]
    if not isinstance(saved_groups, list) or not isinstance(saved_state, Mapping):
        raise CheckpointError("optimiser state: expected {'groups': [...], 'state': {...}}")
    saved_names = [group["params"] for group in saved_groups]
    own_names = [[names[index] for index in group["params"]] for group in current]
    if saved_names != own_names:
        raise CheckpointError(
            f"optimiser state is of parameters {_shortened(saved_names)}, this optimiser has {_shortened(own_names)}: "
            "resume with the model and adapter settings the checkpoint was written with"
        )
    index_of = {name: index for index, name in enumerate(names)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state: dict[int, dict[str, object]] = {}
    for full_key, value in [*tensors.items(), *saved_state.items()]:
        name, _, key = full_key.rpartition("/")
        if name not in index_of:
            raise CheckpointError(f"optimiser state {full_key!r} belongs to no parameter of this optimiser")
        shape = parameters[index_of[name]].shape
        if isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape != shape:
            raise CheckpointError(
                f"optimiser state {full_key!r} has shape {tuple(value.shape)}, expected {tuple(shape)}"
            )
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            value = like(value, parameters[index_of[name]])
        state.setdefault(index_of[name], {})[key] = value
    groups = [
        {key: tuple(value) if isinstance(own.get(key), tuple) else value for key, value in saved.items()}
        | {"params": own["params"]}
        for saved, own in zip(saved_groups, current, strict=True)
    ]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
    for name, entries in ((names[index], state[index]) for index in state):
        for key, kept in entries.items():
            loaded = optimizer.state[parameters[index_of[name]]][key]
            if isinstance(kept, torch.Tensor) and loaded.dtype != kept.dtype:
                # torch casts the state to the parameter's dtype without a word: the low bits would be lost
                raise CheckpointError(f"optimiser state '{name}/{key}' is {kept.dtype}, but loads as {loaded.dtype}")


def _check_names(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> None:
    """Raise ``TrainError`` unless there is one name per parameter, each once."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if len(names) != count or len(set(names)) != count:
        raise TrainError(f"{len(names)} names ({len(set(names))} different) for the {count} parameters of an optimiser")


def _shortened(names: Sequence[Sequence[str]]) -> str:
    flat = [name for group in names for name in group]
    return f"{flat[:3]}... ({len(flat)} in {len(names)} groups)" if len(flat) > 3 else str(flat)


def check_owner(folder: Path, state: Mapping[str, Json], policy: str) -> None:
    """Raise ``CheckpointError`` unless a folder's ``learner.json`` says that it is this policy's."""
    if state.get("policy") != policy:
        raise CheckpointError(
            f"{folder} holds the state of policy {state.get('policy')!r}, expected that of {policy!r}; adapters of one "
            "model cannot be told apart by their tensors. Give the right folder, or ask for the other policy by name"
        )
