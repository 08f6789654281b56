"""A policy of a run as a plain model folder, which ``transformers`` loads without Coterie."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from coterie.durable import atomic_write_json, sync_file, sync_folder
from coterie.errors import ConfigError
from coterie.models.loading import save
from coterie.trained import TrainedPolicy, load_trained, saved_version

ORIGIN = "coterie.json"
"""The file that says where an exported model comes from."""


def export_policy(policy: TrainedPolicy, folder: Path) -> None:
    """Write a policy to a new (or empty) folder, all of it or nothing.

    ``AutoModelForCausalLM.from_pretrained`` and ``AutoTokenizer.from_pretrained`` read it; its chat template, end
    tokens and greedy answers are those of the run. ``ConfigError`` for a folder in use, and where the disk refuses.
    """
    check_free(folder)
    temporary = folder.parent / f".tmp-{folder.name}-{os.getpid()}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        _WRITERS[policy.table.train](policy, temporary)
        _write_origin(policy, temporary)
        for path in temporary.iterdir():
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


def check_free(folder: Path) -> None:
    """Raise ``ConfigError`` unless the folder is absent or empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        what = "is not empty" if folder.is_dir() else "is a file"
        raise ConfigError(f"{folder} {what}; nothing was changed. Give a folder that is new or empty with --to")


def _write_model(policy: TrainedPolicy, folder: Path) -> None:
    """Write whole weights, config and tokenizer."""
    save(load_trained(policy, dtype=policy.table.dtype, context=None), folder)


_WRITERS: dict[str, Callable[[TrainedPolicy, Path], None]] = {
    "full": _write_model,
    "lora": _write_model,  # with the adapter merged
    "frozen": _write_model,
}
"""How a policy is written, by its ``train``."""


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
            "checkpoint": None if checkpoint is None else checkpoint.path.name,
            "version": 0 if checkpoint is None else saved_version(checkpoint.path / policy.name),
            "sampling": sampling.model_dump(mode="json", include={"temperature", "max_tokens", "stop", "roles"}),
        },
    )
