"""Checkpoints: what is saved comes back, whatever happens to the newest file."""

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from fedstrat.errors import StateError
from fedstrat.runs.checkpoint import CheckpointFolder, read
from fedstrat.strategies.state import ServerState, Snapshot, pack_state, unpack_state

TIED = torch.arange(6.0).reshape(2, 3)
MODEL = {
    "z.weight": TIED,
    "a.bias": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
    "a.weight": TIED,
    "norm.num_batches_tracked": torch.tensor(7),
    "empty": torch.zeros(0, 2),
    "turned": torch.arange(6.0).reshape(2, 3).T,
}


def snapshot(server_round: int = 1, **changes: Any) -> Snapshot:
    values: dict[str, Any] = {
        "round": server_round,
        "algorithm": "scaffold",
        "experiment_id": "e1",
        "settings": {"server_lr": 0.1 + 0.2, "seed": 7, "weighting": "uniform", "nesterov": False},
        "model": MODEL,
        "trainable": ("z.weight", "a.bias"),
        "tensors": {"control": {"z.weight": torch.tensor([1e-30]), "a.bias": torch.tensor([server_round * 1.0])}},
        "numbers": {"num_clients": 5, "weights": {"10": 0.1, "2": 1 / 3}, "nothing": {}, "steps": [3, 4], "off": None},
        "accepted": {"10": 3, "2": 1},
        "seen": ("2", "10"),
        "moving": ("norm.num_batches_tracked",),
        "metrics": {
            "train_metrics_clientapp": {"1": {"train-loss": 0.1, "each": [1.0, 2.0], "diverged": float("inf")}}
        },
    }
    return Snapshot(**{**values, **changes})


def assert_same(got: Snapshot, expected: Snapshot) -> None:
    for f in dataclasses.fields(Snapshot):
        a, b = getattr(got, f.name), getattr(expected, f.name)
        if f.name not in ("model", "tensors"):
            assert a == b, f.name
            assert type(a) is type(b), f.name
    for a, b in [(got.model, expected.model), *((got.tensors[n], expected.tensors[n]) for n in expected.tensors)]:
        assert list(a) == list(b)
        for name, tensor in b.items():
            assert a[name].dtype == tensor.dtype
            assert a[name].shape == tensor.shape
            assert torch.equal(a[name], tensor)


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_comes_back_with_its_order_and_dtypes(tmp_path):
    folder = CheckpointFolder(tmp_path / "a" / "checkpoints")
    folder.save(snapshot())
    assert_same(folder.latest(), snapshot())
    assert [*folder.latest().accepted] == ["10", "2"]


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_the_last_few_are_kept(tmp_path, keep):
    folder = CheckpointFolder(tmp_path, keep=keep)
    for server_round in (8, 9, 10, 11, 100):
        folder.save(snapshot(server_round))
    assert files(tmp_path) == [f"round-{t:06d}.safetensors" for t in (8, 9, 10, 11, 100)[-keep:]]
    assert folder.latest().round == 100


@pytest.mark.parametrize("every", [0, 1, 3])
def test_which_rounds_are_saved(every):
    folder = CheckpointFolder(Path("nowhere"), every=every)
    due = [t for t in range(1, 8) if folder.due(t, every_round=False, last=t == 7)]
    assert due == {0: [], 1: [1, 2, 3, 4, 5, 6, 7], 3: [3, 6, 7]}[every]
    always = [t for t in range(1, 8) if folder.due(t, every_round=True, last=t == 7)]
    assert always == ([] if every == 0 else [*range(1, 8)])


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, 0.5, -1])
def test_a_truncated_checkpoint_gives_way_to_the_one_before_and_is_named(tmp_path, caplog, length):
    folder = CheckpointFolder(tmp_path)
    folder.save(snapshot(1))
    folder.save(snapshot(2))
    newest = tmp_path / "round-000002.safetensors"
    data = newest.read_bytes()
    newest.write_bytes(data[: int(len(data) * length) if isinstance(length, float) else length])
    assert_same(folder.latest(), snapshot(1))
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("the checkpoint ")
    assert str(newest) in said
    assert said.endswith("trying the one before")


def test_where_all_are_damaged_each_is_named(tmp_path):
    folder = CheckpointFolder(tmp_path)
    for t in (1, 2):
        folder.save(snapshot(t))
    for name in files(tmp_path):
        (tmp_path / name).write_bytes(b"no")
    with pytest.raises(StateError, match=r"round-000002.*damaged.*round-000001.*damaged"):
        folder.latest()


def test_files_of_others_are_refused_by_name(tmp_path):
    path = tmp_path / "round-000001.safetensors"
    safetensors.torch.save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(StateError, match=r"round-000001.*foreign"):
        read(path)
    safetensors.torch.save_file({"weight": torch.ones(2)}, path, {"fedstrat": json.dumps({"format": 99})})
    with pytest.raises(StateError, match="another format"):
        read(path)
    safetensors.torch.save_file({"weight": torch.ones(2)}, path, {"fedstrat": json.dumps({"format": 1, "arrays": []})})
    with pytest.raises(StateError, match="foreign"):
        read(path)


def test_no_checkpoint_is_an_error_that_names_the_folder(tmp_path):
    with pytest.raises(StateError, match=f"no checkpoint in {tmp_path / 'nowhere'}"):
        CheckpointFolder(tmp_path / "nowhere").latest()


def test_a_full_disk_leaves_the_checkpoints_before(tmp_path, monkeypatch):
    folder = CheckpointFolder(tmp_path)
    folder.save(snapshot(1))

    def no_space(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(StateError, match=r"round 2 can't be written.*No space left.*resume"):
        folder.save(snapshot(2))
    assert files(tmp_path) == ["round-000001.safetensors"]
    assert_same(folder.latest(), snapshot(1))


def test_another_algorithm_or_setting_is_refused_by_the_first_that_differs():
    saved = snapshot()
    saved.check("scaffold", saved.settings)
    saved.check("scaffold", {**saved.settings, "round_timeout": 5.0, "new": 1})
    with pytest.raises(StateError, match="is of 'scaffold', but this strategy is 'craft'"):
        saved.check("craft", saved.settings)
    with pytest.raises(StateError, match=r"with seed = 7, but this strategy has 8") as error:
        saved.check("scaffold", {**saved.settings, "seed": 8, "weighting": "examples"})
    assert "weighting" not in str(error.value)


def test_settings_that_decide_nothing_may_change():
    free = {"min_replies": 1, "max_failed_rounds": 3, "connect_timeout": 5.0, "fraction_evaluate": 1.0}
    snapshot(settings=free).check("scaffold", dict.fromkeys(free, 9))


@dataclasses.dataclass(frozen=True, kw_only=True)
class State(ServerState):
    control: Any
    count: int


def test_the_fields_of_a_state_are_told_apart_and_put_together():
    state = State(params={"a": torch.ones(1)}, control={"a": torch.zeros(1)}, count=3)
    tensors, numbers = pack_state(state)
    assert set(tensors) == {"control"}
    assert numbers == {"count": 3}
    again = unpack_state(State(params=state.params, control={}, count=0), tensors, numbers)
    assert again == state
    with pytest.raises(StateError, match=r"\['count'\].*\['control', 'count'\]"):
        unpack_state(state, {}, numbers)
