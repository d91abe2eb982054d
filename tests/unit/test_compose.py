"""docker-compose.yml is what the generator writes, and keeps what belongs to one node from the others."""

import importlib.util
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from fedstrat.deploy.keyring import Keyring

ROOT = Path(__file__).resolve().parents[2]
ONCE = {"keys", "register", "runner", "sample-data"}
AS_ROOT = {"keys", "sample-data"}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    loader = SourceFileLoader("deploy_nodes", str(ROOT / "deploy/nodes"))
    spec = importlib.util.spec_from_loader("deploy_nodes", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def services(text: str) -> dict[str, dict[str, Any]]:
    return yaml.safe_load(text)["services"]


def mounts(service: dict[str, Any]) -> dict[str, tuple[str, bool]]:
    """Where -> (what, whether only for reading)."""
    found = {}
    for mount in service.get("volumes", []):
        what, where, *mode = mount.replace(":-", "-").split(":")
        found[where] = (what, mode == ["ro"])
    return found


def test_the_files_at_hand_are_the_generators_for_three(generator):
    assert (ROOT / "docker-compose.yml").read_text() == generator.compose(3)
    assert (ROOT / "deploy/docker-compose.gpu.yml").read_text() == generator.gpu(3)


def test_one_more_node_changes_nothing_about_the_others(generator):
    three, four = services(generator.compose(3)), services(generator.compose(4))
    assert set(four) - set(three) == {"node-4", "node-4-executor"}
    stay = set(three) - ONCE
    assert {name: four[name] for name in stay} == {name: three[name] for name in stay}


@pytest.mark.parametrize("count", [1, 3, 7])
def test_what_belongs_to_a_node_is_its_own(generator, count):
    found = services(generator.compose(count))
    nodes = [f"node-{number}" for number in range(1, count + 1)]
    for node in nodes:
        supernode, executor = found[node], found[f"{node}-executor"]
        assert mounts(supernode) == {"/keys": (f"{node}-keys", True)}
        variable = f"{node}_DATA".upper().replace("-", "_")
        assert mounts(executor) == {
            "/keys": (f"{node}-executor-keys", True),
            "/data": (f"${{{variable}-{node}-data}}", True),
            "/state": (f"{node}-state", False),
        }
        assert supernode["networks"] == ["fleet", node]
        assert executor["networks"] == [node]
        assert f'client-id="{node}"' in " ".join(supernode["command"])
    networks = yaml.safe_load(generator.compose(count))["networks"]
    assert all(networks[name] == {"internal": True} for name in ["control", *nodes])


def test_what_stays_up_is_restarted_watched_and_has_no_rights(generator):
    for name, service in services(generator.compose(3)).items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["read_only"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert ("user" in service) == (name in AS_ROOT), name
        if name in AS_ROOT:
            assert service["network_mode"] == "none", name
        if name not in ONCE:
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"][:2] == ["CMD", "healthy"], name
            assert mounts(service)["/keys"][1], name


def test_the_keyring_is_spread_over_the_volumes_whole(generator, tmp_path):
    found = services(generator.compose(3))
    Keyring(tmp_path).make([f"node-{number}" for number in (1, 2, 3)])
    assert set(mounts(found["keys"])) == {f"/keyring/{path.name}" for path in tmp_path.iterdir()}
    reads = {name: mounts(service)["/keys"][0] for name, service in found.items() if "/keys" in mounts(service)}
    for name, volume in reads.items():
        folder = next(where for where, (what, _) in mounts(found["keys"]).items() if what == volume)
        held = tmp_path / folder.removeprefix("/keyring/")
        for word in " ".join(found[name].get("command", [])).replace("=", " ").split():
            if word.startswith("/keys/"):
                assert (held / word.removeprefix("/keys/")).is_file(), (name, word)
    assert "authority" not in reads.values()


def test_everything_named_is_declared(generator):
    whole = yaml.safe_load(generator.compose(5))
    for name, service in whole["services"].items():
        for what, _ in mounts(service).values():
            assert what.rpartition("DATA-")[2].rstrip("}") in whole["volumes"], name
        assert set(service.get("networks", [])) <= set(whole["networks"]), name
        assert set(service.get("depends_on", {})) <= set(whole["services"]), name


def test_every_node_has_a_gpu_of_its_own(generator):
    given = [
        service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"][0]
        for service in services(generator.gpu(4)).values()
    ]
    assert given == [f"${{NODE_{number + 1}_GPU:-{number}}}" for number in range(4)]
