"""A learner in two processes computes what it computes in one, and their checkpoints are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coterie.errors import ConfigError
from coterie.policy_tables import KLTable, PolicyTable
from coterie.sharded import check_can_shard
from coterie.tensors import load_tensors
from sharded_toys import gradients, learner, num_batches, policy, samples

LIMIT_S = 280.0
NEAR = 1e-3
"""Of weights after two steps: AdamW divides by its own size also a gradient that is nothing but rounding."""


def in_two_processes(kind: str, out: Path, source: str = "") -> None:
    out.mkdir()
    script = Path(__file__).parent / "sharded_toys.py"
    arguments = [str(out / "store"), "{rank}", "2", kind, str(out), source]
    running = [
        subprocess.Popen(
            [sys.executable, str(script), *(text.format(rank=rank) for text in arguments)],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=LIMIT_S)[1] for process in running]
    finally:
        for process in running:
            process.kill()  # nothing to one that has ended
    assert [process.returncode for process in running] == [0, 0], "\n".join(errors)


def far(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest norm of a difference over the norm of all."""
    assert one.keys() == other.keys()
    size = torch.stack([tensor.norm() for tensor in one.values()]).norm()
    return float(torch.stack([(one[name] - other[name]).norm() for name in one]).norm() / size)


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_two_processes_take_the_steps_of_one_and_each_goes_on_from_the_others_checkpoint(
    kind: str, tmp_path: Path
) -> None:
    """Three micro-batches, so that one process has nothing left to compute when the other computes the third."""
    owner = policy(kind)
    assert num_batches(owner) == 3
    alone = learner(kind, owner)
    expected = {name: grad.clone() for name, grad in gradients(alone).items()}
    (tmp_path / "first").mkdir()
    first = alone.step(samples(0))
    alone.save(tmp_path / "first")
    second = alone.step(samples(1))
    in_two_processes(kind, tmp_path / "two")
    assert far(expected, load_tensors(tmp_path / "two" / "gradients.safetensors")) <= 1e-5
    weights = {name: weight.detach() for name, weight in alone.policy.weights().items()}
    assert far(weights, load_tensors(tmp_path / "two" / "weights.safetensors")) <= NEAR
    updates = json.loads((tmp_path / "two" / "updates.json").read_text())
    assert [row["loss"] for row in updates] == pytest.approx([first.loss, second.loss], rel=1e-4, abs=1e-6)
    assert [row["grad_norm"] for row in updates] == pytest.approx([first.grad_norm, second.grad_norm], rel=1e-4)
    # one process goes on from two, and two from one
    again = learner(kind, policy(kind))
    again.load(tmp_path / "two")
    assert far(weights, {name: weight.detach() for name, weight in again.policy.weights().items()}) <= NEAR
    in_two_processes(kind, tmp_path / "resumed", str(tmp_path / "first"))
    assert far(weights, load_tensors(tmp_path / "resumed" / "weights.safetensors")) <= NEAR


def test_a_kl_penalty_cannot_be_sharded_and_says_what_to_change() -> None:
    with pytest.raises(ConfigError, match=r"policies\.main\.kl.*use update_workers = 1"):
        check_can_shard("main", PolicyTable(model="tiny", kl=KLTable(coef=0.1)))
    check_can_shard("main", PolicyTable(model="tiny"))
