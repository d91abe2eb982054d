"""A part of the training data is held back: nobody trains on it, and the final model is scored on it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, RecordDict
from safetensors.torch import load_file

from client_app.app import app as client_app
from fedstrat.data.clients import _hold_back, assign, num_examples
from fedstrat.data.loaders import client_data
from fedstrat.data.protocols import Share
from fedstrat.errors import ConfigError
from fedstrat.metrics.fairness import fairness
from fedstrat.models import build
from fedstrat.runs import config
from fedstrat.runs.history import load
from fedstrat.simulation import InProcessGrid
from server_app.app import main

CLIENTS = 5
HELD_BACK = {"dataset.validation-fraction": 0.25}


def flat(**settings: Any) -> dict[str, Any]:
    given = {name.replace("__", ".").replace("_", "-"): value for name, value in settings.items()}
    small = {"num-clients": CLIENTS, "num-server-rounds": 2, "model.hidden": "8", "train.device": "cpu"}
    return {**config.defaults(), **small, "algorithm": "fedavg", "dataset.alpha": 1.0, **given}


def run(folder: Path, **settings: Any) -> dict[str, Any]:
    settings = flat(results_dir=str(folder), state_dir=str(folder / "state"), **settings)
    grid = InProcessGrid(client_app, CLIENTS, run_config=settings)
    main(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config=settings))
    summary = load(folder).summary
    assert summary is not None
    return summary


def parts(fraction: float) -> list[dict[str, set[int]]]:
    found = []
    for i in range(CLIENTS):
        own = assign(flat(dataset__validation_fraction=fraction), {"partition-id": i, "num-partitions": CLIENTS})
        found.append({name: set(getattr(own, name).tolist()) for name in ("train", "validation", "test")})
    return found


def test_what_is_held_back_comes_out_of_the_training_part_alone() -> None:
    for without, own in zip(parts(0.0), parts(0.25), strict=True):
        assert without["validation"] == set()
        assert own["test"] == without["test"]
        assert own["train"] | own["validation"] == without["train"]
        assert not own["train"] & own["validation"]
        assert len(own["train"]) == int(0.75 * len(without["train"]))


def test_it_differs_from_seed_to_seed_and_not_from_call_to_call() -> None:
    assert parts(0.25) == parts(0.25)
    node = {"partition-id": 0, "num-partitions": CLIENTS}
    one, other = (assign(flat(seed=s, dataset__validation_fraction=0.25), node).validation for s in (1, 2))
    assert not np.array_equal(one, other)


def test_clients_train_on_what_is_left_and_say_so() -> None:
    node = {"partition-id": 1, "num-partitions": CLIENTS}
    settings = flat(dataset__validation_fraction=0.25)
    data = client_data(settings, node, seed=0)
    assert num_examples(settings, node) == data.train.num_examples == len(assign(settings, node).train)
    assert data.validation.num_examples == len(assign(settings, node).validation) > 0


def test_a_node_with_private_data_holds_back_some_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "train.npz", x=np.zeros((40, 3), np.float32), y=np.arange(40) % 2)
    own = assign(flat(dataset__name="npz", dataset__validation_fraction=0.25), {"dataset.dir": str(tmp_path)})
    assert (len(own.train), len(own.validation), len(own.test)) == (24, 8, 8)


def test_the_final_model_is_scored_on_it_and_the_summary_says_so(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", dataset__validation_fraction=0.25)
    model = build("mlp", input_shape=(1, 8, 8), num_classes=10, hidden=[8])
    model.load_state_dict(load_file(tmp_path / "run" / "model.safetensors"))
    counts = {}
    for i in range(CLIENTS):
        own = assign(flat(dataset__validation_fraction=0.25), {"partition-id": i, "num-partitions": CLIENTS})
        with torch.no_grad():
            logits = model(torch.from_numpy(own.source.features(own.validation)))
        y = torch.from_numpy(own.source.y[own.validation])
        loss = float(torch.nn.functional.cross_entropy(logits, y, reduction="sum"))
        counts[str(i)] = (int((logits.argmax(1) == y).sum()), loss, len(y))
    expected = fairness(counts)
    assert expected is not None
    for name in ("mean", "accuracy", "worst10", "loss"):
        assert summary["validation"][name] == pytest.approx(getattr(expected, name), rel=1e-5)
    assert summary["validation"]["mean"] != summary["final"]["mean"]
    assert summary["validation_personal"] is None


def test_scoring_it_changes_nothing_of_the_run(tmp_path: Path) -> None:
    """The same training data without the extra evaluation: the fraction is what moved them."""
    with_it = run(tmp_path / "a", dataset__validation_fraction=0.25)
    without = run(tmp_path / "b")
    again = run(tmp_path / "c", dataset__validation_fraction=0.25)
    assert "validation" not in without
    assert with_it["model_sha256"] == again["model_sha256"] != without["model_sha256"]
    assert with_it["bytes"] == without["bytes"]


def test_personal_models_are_scored_on_it_too(tmp_path: Path) -> None:
    summary = run(tmp_path / "run", algorithm="ditto", dataset__validation_fraction=0.25)
    assert 0.0 <= summary["validation_personal"]["mean"] <= 1.0
    assert summary["validation_personal"] != summary["validation"]


@pytest.mark.parametrize("fraction", [-0.1, 1.0])
def test_the_share_is_below_one(fraction: float) -> None:
    with pytest.raises(ConfigError, match="validation-fraction"):
        config.parse(flat(dataset__validation_fraction=fraction))


def test_copies_of_a_sample_are_held_back_together() -> None:
    own = Share(np.repeat(np.arange(20), 3), np.arange(20, 25))
    divided = _hold_back(own, {"dataset.validation-fraction": 0.25}, seed=3)
    assert len(divided.validation) == 5
    assert not set(divided.train) & set(divided.validation)
    assert len(divided.train) == 45
