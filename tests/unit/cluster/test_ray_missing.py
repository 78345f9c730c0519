"""What of runs on a Ray cluster is known without Ray: it is missing, its options, the room and the versions of nodes."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
from samples import Regress, make_trainer

from nbtrain import AddOnError, ConfigError, MultiGPUAddon, RayAddon
from nbtrain.cluster.ray import interface_of
from nbtrain.cluster.ray_cluster import check_node, check_room, connect, looker, own_versions


def test_without_ray_the_package_to_install_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.cluster.ray_cluster.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r'^RayAddon needs Ray, which is not installed.\n  pip install "ray\[default\]"$'):
        make_trainer(Regress.add_on(RayAddon), workers=2)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nbtrain.cluster.ray.check_installed", lambda: None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers=0 must be 1 or more."),
        ({"max_restarts": -1}, "max_restarts=-1 must be 0 or more."),
        ({"gpus_per_worker": 2}, "gpus_per_worker=2 is invalid.\n  A worker trains on one device"),
        ({"strategy": "auto"}, "strategy='auto' does not know the memory of the workers."),
        ({"strategy": "fsdp3"}, "strategy"),
        (
            {"address": "ray://head:10001"},
            "address='ray://head:10001' is that of a Ray client, which can't start a run.\n"
            '  Run on a machine of the cluster, with address="auto" or "HOST:6379", or send a script to one with `ray job submit`.',
        ),
    ],
)
def test_invalid_options_are_refused(installed: None, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        RayAddon(**options)
    assert str(raised.value).startswith(said)


def test_a_client_that_ray_init_has_connected_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    client = SimpleNamespace(is_connected=lambda: True, is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "ray", client)
    monkeypatch.setitem(sys.modules, "ray.util.client", SimpleNamespace(ray=client))
    with pytest.raises(ConfigError, match="^This process is connected as a Ray client, which can't start a run.\n  Run on a machine of"):
        connect("auto")


def test_it_is_a_launcher_of_as_many_readers_as_workers(installed: None) -> None:
    trainer = make_trainer(Regress.add_on(RayAddon), workers=4, strategy="tp", tensor_parallel_size=2, tensor_plan={"0": "colwise"})
    assert (trainer.launcher.n_processes, trainer.launcher.n_readers, trainer.device.type) == (4, 2, "cpu")
    with pytest.raises(AddOnError, match="MultiGPUAddon and RayAddon both decide where a run executes"):
        Regress.add_on(MultiGPUAddon, RayAddon)


def test_room_is_counted_by_nodes_that_are_alive() -> None:
    node = {"Alive": True, "Resources": {"CPU": 3.0, "GPU": 1.0}}
    check_room([node, node], 2, {"CPU": 2})
    with pytest.raises(
        ConfigError, match=r"room for 1 of 2 workers: each needs 2 CPU.\n  Its nodes have 3 CPUs and 1 GPUs.\n  Give workers=1"
    ):
        check_room([node, node | {"Alive": False}], 2, {"CPU": 2})
    with pytest.raises(ConfigError, match="Give gpus_per_worker=0 to train on CPUs"):
        check_room([{"Alive": True, "Resources": {"CPU": 8.0}}], 1, {"CPU": 1, "GPU": 1})


def test_a_node_is_looked_at_without_nbtrain_and_its_lacks_are_named(tmp_path: Path) -> None:
    data = cloudpickle.dumps(looker())
    assert b"_make_function" in data  # by value, not by the name of a module
    look = pickle.loads(data)
    (tmp_path / "seen").touch()
    found = look(str(tmp_path), "seen")
    check_node(found, str(tmp_path), has_shards=True)
    assert [path.name for path in tmp_path.iterdir()] == ["seen"] and found["versions"] == own_versions()
    apart = look(str(tmp_path), "not there")
    check_node(apart, str(tmp_path))
    with pytest.raises(ConfigError, match=r"can't use the run folder: each rank writes its shard, .+\n  .+\n  .+, or save_type='merged'."):
        check_node(apart, str(tmp_path), has_shards=True)
    with pytest.raises(ConfigError, match=r"can't use the run folder: File exists.\n  .+\n  Give a save_path on a disk .+, or none."):
        check_node(look(str(tmp_path / "seen"), "seen"), str(tmp_path / "seen"))
    other = found | {"node": "gpu-3", "versions": own_versions() | {"torch": "2.9.0", "nbtrain": ""}}
    with pytest.raises(
        ConfigError, match="^The node gpu-3 has no nbtrain, torch 2.9.0; this process has nbtrain .+, torch .+.\n  Install the same"
    ):
        check_node(other, "")


def test_gloo_gets_the_interface_of_an_address() -> None:
    assert interface_of("127.0.0.1") == "lo" and interface_of("192.0.2.255") is None
