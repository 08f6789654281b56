"""What a recipe places where, and what is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.cluster.entry import check_placement, placed
from coterie.cluster.placement import Bundle, Layout, check_fits, layout_of, local_nodes
from coterie.config import dump_recipe, parse_recipe
from coterie.errors import ConfigError
from coterie.hardware import HardwareTable
from coterie.lineup import assemble, check_env_fits
from learning_toys import MIX, PER_ROLE, toy_recipe

RAY = "hardware.backend=ray"


def layout(*settings: str) -> Layout:
    return layout_of(assemble(check_env_fits(toy_recipe(RAY, *settings))))


def test_every_policy_has_a_pool_of_its_own() -> None:
    pools = layout(*PER_ROLE, "hardware.rollout_workers=2", "hardware.policies.other.rollout_workers=1").pools
    assert [pool.policies for pool in pools] == [("main",), ("other",)]
    assert [(len(pool.rollout), len(pool.update), len(pool.bundles)) for pool in pools] == [(2, 1, 3), (1, 1, 2)]


def test_policies_that_share_a_model_share_the_pool_and_only_the_trained_ones_are_updated() -> None:
    pools = layout(*MIX).pools
    assert [pool.policies for pool in pools] == [("main",), ("a", "b", "frozen")]
    assert [seat.name for seat in pools[1].update] == ["update worker 0 of a", "update worker 0 of b"]


def test_colocated_workers_stand_on_one_bundle_that_has_the_devices_of_both() -> None:
    (pool,) = layout("hardware.colocated=true", "hardware.rollout_gpus=0.5", "hardware.update_gpus=0.5").pools
    assert pool.bundles == (Bundle(2.0, 1.0),)
    assert (pool.rollout[0].bundle, pool.update[0].bundle) == (0, 0)


def test_policies_that_share_a_model_cannot_have_different_engines() -> None:
    with pytest.raises(ConfigError, match="share one model in memory, and so their rollout workers"):
        layout(*MIX, "hardware.policies.b.rollout_workers=2")


def test_what_no_worker_can_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="its reference is not sharded"):
        layout("hardware.update_workers=2", "policies.main.kl.coef=0.1")


def test_a_cluster_fits_if_every_bundle_finds_a_node_and_is_refused_with_the_numbers_otherwise() -> None:
    """Three bundles: 1 CPU + 1 GPU to sample, as much to train, 1 CPU to play; two nodes with a GPU each hold them."""
    wanted = layout("hardware.rollout_gpus=1", "hardware.update_gpus=1")
    check_fits(wanted, [Bundle(2.0, 1.0), Bundle(1.0, 1.0)])
    with pytest.raises(
        ConfigError, match=r"needs 3 CPU \+ 2 GPU in 3 bundles, and one of 1 CPU \+ 1 GPU finds no room"
    ):
        check_fits(wanted, [Bundle(8.0, 1.0)])
    with pytest.raises(ConfigError, match="the cluster's nodes have none"):
        check_fits(wanted, [])


def test_nodes_that_are_started_here_hold_their_share_of_the_workers() -> None:
    """One sampler, one learner, 8 environments: 10 CPUs, so 5 for each of two nodes, and one for the largest bundle."""
    hardware = HardwareTable(backend="ray", env_workers=8, local_nodes=2)
    wanted = layout("hardware.env_workers=8")
    assert [node.cpus for node in local_nodes(hardware, wanted)] == [6, 6]
    assert [n.cpus for n in local_nodes(hardware.model_copy(update={"local_cpus": 3}), wanted)] == [3, 3]


def test_the_gpus_of_this_machine_are_on_one_of_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two nodes of one machine with 8 GPUs have 8 together: eight workers with one each fit, nine do not."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    settings = ("hardware.local_nodes=2", "hardware.rollout_gpus=1", "hardware.update_gpus=1")
    hardware = HardwareTable(backend="ray", local_nodes=2)
    wanted = layout(*settings, "hardware.rollout_workers=7")
    nodes = local_nodes(hardware, wanted)
    assert [(node.cpus, node.gpus) for node in nodes] == [(8, 8), (8, 0)]
    check_fits(wanted, nodes)
    with pytest.raises(ConfigError, match=r"one of 1 CPU \+ 1 GPU finds no room"):
        check_fits(layout(*settings, "hardware.rollout_workers=8"), nodes)


def test_check_names_every_worker_and_its_devices() -> None:
    pytest.importorskip("ray", reason="ray is not installed: pip install 'coterie[ray]'")
    rows = check_placement(assemble(check_env_fits(toy_recipe(RAY, "hardware.env_workers=2"))))
    assert rows == [
        ("rollout worker 0 of main", "main", "main/0: 1 CPU"),
        ("update worker 0 of main", "main", "main/1: 1 CPU"),
        ("environment worker 0", "", "1 CPU"),
        ("environment worker 1", "", "1 CPU"),
    ]
    with pytest.raises(ConfigError, match="finds no room: the cluster's nodes have 1 CPU"):
        check_placement(assemble(check_env_fits(toy_recipe(RAY, "hardware.local_cpus=1"))))


def test_on_one_machine_nothing_is_placed_and_the_lineup_stays_as_it_is() -> None:
    lineup = assemble(check_env_fits(toy_recipe()))
    assert check_placement(lineup) == []
    with placed(lineup, lambda kind, fields: None, Path()) as same:
        assert same is lineup


def test_without_the_package_the_backend_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'not installed: pip install "coterie\[ray\]", or use backend = "local"'):
        check_placement(assemble(check_env_fits(toy_recipe(RAY))))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["hardware.env_workers=2"], 'env_workers is read only with backend = "ray"'),
        (["hardware.policies.main.rollout_workers=2"], 'policies is read only with backend = "ray"'),
        ([RAY, "hardware.address=10.0.0.1:6379", "hardware.local_nodes=2"], "remove them or address"),
        ([RAY, "hardware.policies.mian.rollout_workers=2"], "hardware.policies.mian: no such policy"),
        ([RAY, "hardware.policies.main.model=tiny"], "unknown key 'hardware.policies.main.model'"),
        ([RAY, "hardware.env_worker=2"], "did you mean 'hardware.env_workers'"),
    ],
)
def test_keys_that_nobody_would_read_are_refused(settings: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        toy_recipe(*settings)


def test_a_recipe_with_hardware_is_read_back_as_it_was_written() -> None:
    recipe = toy_recipe(RAY, "hardware.policies.main.rollout_workers=2")
    assert parse_recipe(dump_recipe(recipe), "again") == recipe
    assert parse_recipe(dump_recipe(toy_recipe()), "again") == toy_recipe()
