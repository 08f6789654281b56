"""A policy of a run as a plain folder without Coterie: a model for ``transformers``, or an adapter for ``peft``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from peft import TaskType

from coterie.config import LoraTable
from coterie.durable import atomic_write_json, sync_file, sync_folder
from coterie.errors import ConfigError
from coterie.models.adapters import peft_config
from coterie.models.loading import plain_place, save
from coterie.tensors import save_adapter
from coterie.trained import PREFIX, TrainedPolicy, adapter_tensors, load_base, load_trained, saved_version

ORIGIN = "coterie.json"
"""The file that says where an exported model comes from."""
BASE = "base"
"""In the folder of an adapter: the model it goes beside, where that is nowhere else."""


def export_policy(policy: TrainedPolicy, folder: Path, *, merge: bool = False) -> str | None:
    """Write a policy to a new (or empty) folder, all of it or nothing; return the base of an adapter.

    A whole model, or an adapter with ``merge``, is read by ``AutoModelForCausalLM.from_pretrained``, an adapter by
    ``PeftModel.from_pretrained``, and ``AutoTokenizer.from_pretrained`` reads both; chat template, end tokens and
    greedy answers are those of the run. ``ConfigError`` for a folder in use, where the disk refuses, and for ``merge``
    without an adapter.
    """
    check_free(folder)
    if merge and policy.table.lora is None:
        raise ConfigError(
            f'policy {policy.name!r} has no adapter to merge (train = "{policy.table.train}"): it is written as a '
            "whole model anyway. Leave --merge out"
        )
    base = None
    temporary = folder.parent / f".tmp-{folder.name}-{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        if policy.table.lora is None or merge:
            save(load_trained(policy, dtype=policy.table.dtype, context=None), temporary)
        else:
            base = _write_adapter(policy, policy.table.lora, temporary, folder)
        _write_origin(policy, temporary)
        for path in temporary.rglob("*"):
            sync_file(path)
        sync_folder(temporary)
        temporary.rename(folder)
        sync_folder(folder.parent)
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written ({error}); nothing was left there. Choose another folder with --to, or free "
            "some space"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return base


def check_free(folder: Path) -> None:
    """Raise ``ConfigError`` unless the folder is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise ConfigError(f"{folder} {what}; nothing was changed. Give a folder that is new or empty with --to")


def _write_adapter(policy: TrainedPolicy, lora: LoraTable, folder: Path, final: Path) -> str:
    """Write an adapter as ``peft`` does, with the tokenizer and generation config it was trained with; return its base.

    The base is the recipe's own model where plain ``transformers`` finds those weights. Where it does not (fresh or
    GGUF weights, a policy of a run, a model that the run warmed) it is written too, and is to be found in the ``final``
    folder.
    """
    assert policy.checkpoint is not None, "a policy with an adapter is trained"
    loaded, source = load_base(policy, dtype=policy.table.dtype, context=None), policy.table.model
    base = None if policy.recipe.imitate is not None or source.startswith(PREFIX) else plain_place(source)
    if base is None:
        (folder / BASE).mkdir()
        save(loaded, folder / BASE)
        base = str((final / BASE).resolve())
    tensors = adapter_tensors(policy, policy.checkpoint)
    targets = sorted({name.partition(".lora_")[0] for name in tensors})
    config = peft_config(lora, targets, loaded.model.get_submodule(targets[0]))
    config.task_type, config.base_model_name_or_path, config.inference_mode = TaskType.CAUSAL_LM, base, True
    save_adapter(folder, config, tensors)
    loaded.tokenizer.save_pretrained(folder)
    loaded.model.generation_config.save_pretrained(folder)
    return base


def _write_origin(policy: TrainedPolicy, folder: Path) -> None:
    """Write where the folder comes from, and what a caller needs beside it to play as the run does."""
    checkpoint, sampling = policy.checkpoint, policy.recipe.sampling
    atomic_write_json(
        folder / ORIGIN,
        {
            "run": policy.run_dir.resolve().name,
            "policy": policy.name,
            "roles": policy.roles,
            "model": policy.table.model,
            "dtype": policy.table.dtype,
            "checkpoint": None if checkpoint is None else checkpoint.path.name,
            "version": 0 if checkpoint is None else saved_version(checkpoint.path / policy.name),
            "sampling": sampling.model_dump(mode="json", include={"temperature", "max_tokens", "stop", "roles"}),
        },
    )
