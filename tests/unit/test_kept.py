"""Kept models: a run with them is the run with fresh ones, and what they hold is never taken for something else."""

import logging
from typing import Any

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from torch import nn

import fedstrat
from client_app.app import app
from fedstrat.errors import PayloadError
from fedstrat.local import kept
from fedstrat.local.session import load_some
from fedstrat.models import trainable_names
from fedstrat.payloads import numpy_array
from fedstrat.runs import config
from fedstrat.runs import model as models
from fedstrat.runs.model import client_model, initial_model
from fedstrat.simulation import InProcessGrid
from tests.strategies.small import batches, bits, convex


def record(**values: float) -> ArrayRecord:
    """A ``convex`` model all of whose numbers are ``weight`` and ``bias``."""
    like = convex().state_dict()
    return fedstrat.to_arrays({n: torch.full_like(like[n], value) for n, value in values.items()})


def holds(model: nn.Module, **values: float) -> bool:
    return all(bool((model.state_dict()[n] == value).all()) for n, value in values.items())


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[ArrayRecord]:
    """Every record that was really loaded."""
    loaded: list[ArrayRecord] = []
    load_into = kept.load_into
    monkeypatch.setattr(kept, "load_into", lambda own, record: (loaded.append(record), load_into(own, record)))
    return loaded


# --- what is loaded ------------------------------------------------------------------------------------------


def test_the_same_arrays_are_loaded_once_and_others_every_time(loads: list[ArrayRecord]):
    model = convex()
    kept.keep(model)
    a, b = record(weight=1.0, bias=2.0), record(weight=3.0, bias=4.0)
    for sent in (a, a, ArrayRecord(dict(a))):  # a record of its own, of the same bytes
        kept.load(model, sent, stays=True)
        assert holds(model, weight=1.0, bias=2.0)
    assert loads == [a]
    for sent in (b, a):
        kept.load(model, sent, stays=True)
        assert holds(model, weight=3.0 if sent is b else 1.0)
    assert loads == [a, b, a]


def test_one_array_of_other_bytes_loads_them_all(loads: list[ArrayRecord]):
    model = convex()
    kept.keep(model)
    a, b = record(weight=1.0, bias=2.0), record(weight=3.0, bias=4.0)
    kept.load(model, a, stays=True)
    kept.load(model, ArrayRecord({"weight": a["weight"], "bias": b["bias"]}), stays=True)
    assert holds(model, weight=1.0, bias=4.0)
    a["weight"].data = b["weight"].data  # the array is the one of before, what it holds isn't
    kept.load(model, a, stays=True)
    assert holds(model, weight=3.0, bias=2.0)
    assert len(loads) == 3


def test_arrays_swapped_between_two_names_are_others():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    kept.keep(model)
    ones, twos = (numpy_array(torch.full((2, 2), value)) for value in (1.0, 2.0))
    kept.load(model, ArrayRecord({"0.weight": ones, "1.weight": twos}), stays=True)
    kept.load(model, ArrayRecord({"0.weight": twos, "1.weight": ones}), stays=True)
    assert [float(t[0, 0]) for t in model.state_dict().values()] == [2.0, 1.0]


def test_what_does_not_stay_is_loaded_anew(loads: list[ArrayRecord]):
    model = convex()
    kept.keep(model)
    a = record(weight=1.0, bias=2.0)
    kept.load(model, a)
    kept.load(model, a, stays=True)
    kept.forget(model)
    kept.load(model, a, stays=True)
    kept.load(model, record(weight=3.0), ["weight"], stays=True)  # a part, as load_arrays loads it
    assert holds(model, weight=3.0, bias=2.0)
    kept.load(model, a, stays=True)
    assert holds(model, weight=1.0, bias=2.0)
    load_some(model, {"bias": torch.full((3,), 4.0)}, "a part")
    assert holds(model, weight=1.0, bias=4.0)
    kept.load(model, a, stays=True)
    assert holds(model, weight=1.0, bias=2.0)
    assert len(loads) == 5


@pytest.mark.parametrize("wrong", ["shape", "dtype", "serialisation", "missing"])
def test_the_same_bytes_under_another_label_are_refused(wrong: str):
    model = convex()
    kept.keep(model)
    a = record(weight=1.0, bias=2.0)
    kept.load(model, a, stays=True)
    w = a["weight"]
    arrays = {
        "shape": {"weight": Array(w.dtype, (w.shape[1], w.shape[0]), w.stype, w.data)},
        "dtype": {"weight": Array("float64", w.shape, w.stype, w.data)},
        "serialisation": {"weight": Array(w.dtype, w.shape, "pickle", w.data)},
        "missing": {},
    }[wrong]
    if wrong == "missing":
        del a["bias"]
    with pytest.raises(PayloadError, match="missing" if wrong == "missing" else "arrays/weight"):
        kept.load(model, ArrayRecord({**a, **arrays}), stays=True)


def test_a_model_that_is_not_kept_is_loaded_every_time():
    model, a = convex(), record(weight=1.0, bias=2.0)
    kept.load(model, a, stays=True)
    with torch.no_grad():
        model.weight.zero_()
    kept.load(model, a, stays=True)
    assert holds(model, weight=1.0)


def test_a_kept_model_dies_with_its_owner():
    model = convex()
    kept.keep(model)
    count = len(kept._KEPT)
    del model
    assert len(kept._KEPT) == count - 1


# --- client calls --------------------------------------------------------------------------------------------


def asked(kind: str, arrays: ArrayRecord, **more: Any) -> Message:
    own = {
        "server-round": 1,
        "fedstrat.algorithm": "fedavg",
        "fedstrat.experiment-id": "x",
        "fedstrat.accepted-round": 0,
    }
    message = Message(RecordDict({"arrays": arrays, "config": ConfigRecord({**own, **more})}), 1, kind)
    message.metadata.__dict__["_message_id"] = "a"  # as a grid does
    return message


def context() -> Context:
    return Context(
        run_id=1, node_id=1, node_config={"partition-id": 0}, state=RecordDict(), run_config={"train.lr": 0.1}
    )


@pytest.mark.parametrize(
    "between", ["nothing", "training", "failed training", "personal evaluation", "sharpness", "reset"]
)
def test_whatever_a_call_did_the_next_evaluation_is_that_of_its_message(between: str, loads: list[ArrayRecord]):
    grid = InProcessGrid(app, 1)
    grid.get_node_ids()  # lends the identity that messages need, as long as the grid lives
    model, data = convex(), batches(0)
    keeper = kept.keep(model)
    arrays = fedstrat.to_arrays(convex())
    first = fedstrat.evaluate(asked("evaluate", arrays), context(), model, data)
    if between == "training":
        fedstrat.train(asked("train", arrays), context(), model, data, epochs=1)
        assert bits(fedstrat.to_arrays(model)) != bits(arrays)
    elif between == "failed training":
        with pytest.raises(ZeroDivisionError):
            fedstrat.train(asked("train", arrays), context(), model, data, epochs=1, batch_hook=_second_fails())
        assert bits(fedstrat.to_arrays(model)) != bits(arrays)
    elif between == "personal evaluation":
        fedstrat.evaluate(asked("evaluate", arrays, **{"fedstrat.evaluate-personal": True}), context(), model, data)
    elif between == "sharpness":
        fedstrat.evaluate(asked("evaluate", arrays, **{"fedstrat.sharpness": True}), context(), model, data)
    elif between == "reset":
        keeper.reset(weights=True)
    before = len(loads)
    again = fedstrat.evaluate(asked("evaluate", arrays), context(), model, data)
    assert dict(again.content["metrics"]) == dict(first.content["metrics"])
    assert len(loads) - before == (0 if between == "nothing" else 1)
    assert bits(fedstrat.to_arrays(model)) == bits(arrays)


def _second_fails() -> Any:
    seen: list[Any] = []

    def hook(batch: Any) -> None:
        seen.append(batch)
        1 / (2 - len(seen))

    return hook


# --- whole runs ----------------------------------------------------------------------------------------------

RUN = {
    "num-clients": 4, "fraction-train": 0.5, "num-server-rounds": 3, "model.hidden": "4", "train.device": "cpu",
    "dataset.partition": "iid", "diagnostics": "full",
}  # fmt: skip


def outcome(settings: dict[str, Any]) -> Any:
    run = config.parse(settings)
    model = initial_model(run.flat)
    result = run.strategy(trainable=trainable_names(model)).start(
        grid=InProcessGrid(app, run.num_clients, run_config=run.flat),
        initial_arrays=fedstrat.to_arrays(model),
        num_rounds=run.num_server_rounds,
        diagnostics=run.diagnostics,
    )
    metrics = (result.train_metrics_clientapp, result.evaluate_metrics_clientapp)
    return bits(result.arrays), [{t: dict(record) for t, record in kind.items()} for kind in metrics]


@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "fedavg"},
        {"algorithm": "fedavg", "evaluate-personal": True},
        {"algorithm": "fedavg", "evaluate-in-train": True},
        {"algorithm": "scaffold"},
        {"algorithm": "ditto"},
        {"algorithm": "fedcspack", "fedcspack.pack-size": 8},
        {"algorithm": "fedcspack", "fedcspack.pack-size": 8, "fedcspack.initial-model": "seed"},
        {"algorithm": "fedspu"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_a_run_with_a_kept_model_is_the_run_with_a_fresh_one_every_call(
    settings: dict[str, Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.ERROR, "flwr")
    with_kept = outcome({**RUN, **settings, "state-dir": str(tmp_path / "a")})
    monkeypatch.setattr(models, "client_model", lambda run, node, **_: initial_model(run, node))
    assert with_kept == outcome({**RUN, **settings, "state-dir": str(tmp_path / "b")})


def test_a_client_s_model_is_as_new_unless_it_is_overwritten():
    flat = config.parse({**RUN, "algorithm": "fedavg"}).flat
    node = {"partition-id": 0, "num-partitions": 4}
    model = client_model(flat, node)
    fresh = initial_model(flat, node).state_dict()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
            p.grad = torch.ones_like(p)
    assert client_model(flat, node, overwritten=True) is model
    assert all(torch.equal(t, fresh[n] + 1.0) for n, t in model.state_dict().items())
    assert client_model(flat, node) is model
    assert all(torch.equal(t, fresh[n]) for n, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert client_model({**flat, "seed": 2}, node) is not model
