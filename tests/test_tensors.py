"""Tensors and optimiser state on disk: equal bits, equal next step, and a refusal where they do not fit."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from coterie.durable import json_text
from coterie.errors import CheckpointError, TrainError
from coterie.tensors import flatten_optimizer, load_tensors, restore_optimizer, save_tensors


def model(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))


def names(net: torch.nn.Module) -> list[str]:
    return [name for name, _ in net.named_parameters()]


def adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(net.parameters(), lr=0.1 / 3, betas=(0.9, 0.95), weight_decay=0.01)


def steps(net: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    for step in range(first, last):
        optimizer.zero_grad()
        net(torch.linspace(-1, step + 1.0, 3)).square().sum().backward()
        optimizer.step()


def test_tensors_come_back_bit_for_bit_with_their_dtypes_and_shapes(tmp_path: Path) -> None:
    tensors = {
        "float": torch.tensor([0.1, float("nan"), -0.0, 2.0**-149]),
        "bfloat": torch.tensor([[1.0, 3.14]], dtype=torch.bfloat16),
        "scalar": torch.tensor(7, dtype=torch.int64),
        "bytes": torch.get_rng_state(),
        "empty": torch.empty(0, 5),
        "strided": torch.arange(6.0).reshape(2, 3).T,
    }
    save_tensors(tmp_path / "t.safetensors", tensors)
    back = load_tensors(tmp_path / "t.safetensors")
    assert {k: (v.dtype, v.shape) for k, v in back.items()} == {k: (v.dtype, v.shape) for k, v in tensors.items()}
    for name, tensor in tensors.items():
        assert (
            back[name].flatten().view(torch.uint8).tolist() == tensor.contiguous().flatten().view(torch.uint8).tolist()
        )


def test_tied_tensors_are_saved_and_come_back_independent(tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    save_tensors(tmp_path / "t.safetensors", {"embed": weight, "head": weight, "part": weight[1:3]})
    back = load_tensors(tmp_path / "t.safetensors")
    back["head"].add_(1)
    assert back["embed"].tolist() == [0, 1, 2, 3]
    assert back["part"].tolist() == [1, 2]


def test_a_damaged_or_missing_file_is_a_checkpoint_error(tmp_path: Path) -> None:
    path = tmp_path / "t.safetensors"
    with pytest.raises(CheckpointError, match=r"t\.safetensors"):
        load_tensors(path)
    save_tensors(path, {"a": torch.zeros(100)})
    os.truncate(path, 50)
    with pytest.raises(CheckpointError, match=r"t\.safetensors"):
        load_tensors(path)


def test_a_folder_that_is_not_there_is_an_os_error_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file") as told:
        save_tensors(tmp_path / "nowhere" / "t.safetensors", {"a": torch.zeros(1)})
    assert told.value.errno == errno.ENOENT


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    command = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(command, check=False, capture_output=True).returncode != 0:
        pytest.skip("only root can mount a small file system")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_full_disk_is_told_apart_from_a_bug(small_disk: Path) -> None:
    with pytest.raises(OSError, match="No space left") as told:
        save_tensors(small_disk / "t.safetensors", {"a": torch.zeros(100_000)})
    assert told.value.errno == errno.ENOSPC


def test_a_restored_optimiser_takes_exactly_the_steps_the_first_one_would_have(tmp_path: Path) -> None:
    """CKPT-01: 6 steps straight and 3 + restore + 3 end in the same bits."""
    straight, first = model(0), model(0)
    steps(straight, adam(straight), 0, 6)
    optimizer = adam(first)
    steps(first, optimizer, 0, 3)
    tensors, plain = flatten_optimizer(optimizer, names(first))
    save_tensors(tmp_path / "o.safetensors", tensors)
    save_tensors(tmp_path / "w.safetensors", first.state_dict())
    text = json_text(plain)

    second = model(1)
    second.load_state_dict(load_tensors(tmp_path / "w.safetensors"))
    restored = adam(second)
    restored.param_groups[0]["lr"] = 99.0
    restore_optimizer(restored, names(second), load_tensors(tmp_path / "o.safetensors"), json.loads(text))
    assert restored.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]
    steps(second, restored, 3, 6)
    for ours, theirs in zip(second.parameters(), straight.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert sorted(tensors)[:3] == ["0.bias/exp_avg", "0.bias/exp_avg_sq", "0.bias/step"]


def test_an_optimiser_that_has_not_stepped_yet_has_no_tensors_and_can_be_restored() -> None:
    net = model(0)
    tensors, plain = flatten_optimizer(adam(net), names(net))
    assert tensors == {}
    other = adam(net)
    restore_optimizer(other, names(net), tensors, plain)
    assert other.state_dict()["state"] == {}


def test_state_of_other_parameters_or_shapes_is_refused() -> None:
    """CKPT-07: a renamed key fails, it is not skipped."""
    net = model(0)
    optimizer = adam(net)
    steps(net, optimizer, 0, 1)
    tensors, plain = flatten_optimizer(optimizer, names(net))
    renamed = [name.replace("0.bias", "0.offset") for name in names(net)]
    with pytest.raises(CheckpointError, match=r"0\.offset"):
        restore_optimizer(adam(net), renamed, tensors, plain)
    stray = {**tensors, "other.weight/exp_avg": torch.zeros(1)}
    with pytest.raises(CheckpointError, match=r"other\.weight/exp_avg"):
        restore_optimizer(adam(net), names(net), stray, plain)
    short = {**tensors, "0.bias/exp_avg": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"has shape \(3,\), expected \(4,\)"):
        restore_optimizer(adam(net), names(net), short, plain)
    with pytest.raises(TrainError, match="3 names"):
        flatten_optimizer(optimizer, names(net)[:3])


def test_state_that_torch_would_round_to_the_parameters_dtype_is_refused() -> None:
    net = model(0)
    optimizer = adam(net)
    steps(net, optimizer, 0, 1)
    tensors, plain = flatten_optimizer(optimizer, names(net))
    half = model(0).to(torch.bfloat16)
    with pytest.raises(CheckpointError, match=r"is torch\.float32, but loads as torch\.bfloat16"):
        restore_optimizer(adam(half), names(half), tensors, plain)
