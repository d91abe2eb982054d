"""Simulating on a Ray cluster: what it has room for, and what the SuperLink's processes are told."""

from pathlib import Path

import pytest

from fedstrat.errors import ConfigError
from fedstrat.runs import cluster, launch
from fedstrat.runs.superlink import LocalSuperLink


@pytest.mark.parametrize(
    ("nodes", "device", "at_once", "gpu_share"),
    [
        ([(4, 0), (2, 0)], "auto", 6, 0.0),
        ([(4, 1), (2, 8)], "auto", 3, 1.0),  # 1 on the first, 2 on the second: a client needs both a core and a GPU
        ([(4, 1), (2, 0)], "cuda", 1, 1.0),
        ([(4, 1), (2, 0)], "cpu", 6, 0.0),
    ],
)
def test_a_cluster_has_room_node_by_node(nodes, device, at_once, gpu_share):
    share = cluster.plan(nodes, device)
    assert (share.at_once, share.gpu_share) == (at_once, gpu_share)
    assert "2 Ray nodes" in share.limit
    # Ray refuses to be told the size of a cluster that it didn't start.
    assert share.federation(9) == (
        f"num-supernodes=9 client-resources-num-cpus=1 client-resources-num-gpus={gpu_share}"
    )


@pytest.mark.parametrize(
    ("nodes", "device", "said"),
    [
        ([(0, 0)], "cpu", "has no room for a client"),
        ([(4, 0)], "cuda", r"has no room for a client .*\[\(4, 0\)\]"),
        ([(4, 2)], "cuda:1", "set train.device to cuda"),
    ],
)
def test_a_cluster_without_room_is_refused(nodes, device, said):
    with pytest.raises(ConfigError, match=said):
        cluster.plan(nodes, device)


@pytest.mark.parametrize("address", ["auto", "ray://head:10001", "head", ":1"])
def test_an_address_is_host_and_port(address):
    with pytest.raises(ConfigError, match="expected the HOST:PORT"):
        cluster.nodes(address)


@pytest.mark.parametrize("address", ["", "head:6379"])
def test_ray_is_told_of_a_cluster_only_where_it_was_asked_for(address, tmp_path):
    superlink = LocalSuperLink({"RAY_ADDRESS": "another:1", "PATH": "/bin"}, address)
    superlink.folder = tmp_path
    told = superlink._environment()
    assert told.get("RAY_ADDRESS", "") == address
    assert ("RAY_TMPDIR" in told) == (address == "")


def test_a_connection_has_no_cluster():
    with pytest.raises(ConfigError, match="give one of them"):
        launch.launch(launch.RunRequest("site", app=Path(), ray_address="head:6379"))


def test_an_engine_without_ray_has_no_cluster():
    request = launch.RunRequest(app=Path(), ray_address="head:6379", engine=launch.Engine.IN_PROCESS)
    with pytest.raises(ConfigError, match="is for the engine ray, not for in-process"):
        launch.launch(request)
