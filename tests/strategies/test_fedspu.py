"""FedSPU: which numbers belong to a sub-model, what travels, what stands still."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import nn
from torch.nn.functional import cross_entropy

import fedstrat
from fedstrat import FedAvg, FedSPU
from fedstrat.aggregation.units import Axes, choose, merge, plan, region, shape
from fedstrat.errors import ConfigError
from fedstrat.local.state import open_store, peek
from fedstrat.metrics.traffic import array_payload_bytes
from fedstrat.models import build
from fedstrat.payloads import decode, raw_array
from tests.strategies import small
from tests.strategies.small import Recorder, bits, start

WIDTH = 10
NUM_PARAMS = 6 * WIDTH + WIDTH + WIDTH * 3 + 3


def params(model: nn.Module) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in model.named_parameters()}


def net() -> nn.Module:
    """Two layers, always at the same starting point."""
    generator = torch.Generator().manual_seed(5)
    model = nn.Sequential(nn.Linear(small.FEATURES, WIDTH), nn.Tanh(), nn.Linear(WIDTH, small.CLASSES))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.5 * torch.randn(p.shape, generator=generator))
    return model


def strategy(**settings: Any) -> FedSPU:
    return FedSPU(**{"fraction_evaluate": 0.0, "seed": 3, **settings})


def received(record: RecordDict) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    return tuple({n: t.numpy() for n, t in decode(record[r], r).items()} for r in ("units", "sub-model"))  # type: ignore[return-value]


# --- layers and their inputs -----------------------------------------------------------------------------------------


def test_a_chain_of_layers_is_found() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(54, 8), nn.Linear(8, 4)
    )
    cut = plan(params(model))
    assert cut.widths == {"0.weight": 4, "2.weight": 6, "4.weight": 8}
    assert cut.axes == {
        "0.weight": Axes("0.weight"),
        "0.bias": Axes("0.weight"),
        "1.weight": Axes("0.weight"),
        "1.bias": Axes("0.weight"),
        "2.weight": Axes("2.weight", "0.weight"),
        "2.bias": Axes("2.weight"),
        "4.weight": Axes("4.weight", "2.weight", 9),  # 3 x 3 pixels of each of 6 channels
        "4.bias": Axes("4.weight"),
        "5.weight": Axes(None, "4.weight"),
        "5.bias": Axes(),  # classes, though the first layer has 4 units, too
    }


@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet20"])
def test_built_in_models_are_cut(name: str) -> None:
    """Every hidden layer's input is the layer before, or nothing in the first."""
    shape_ = (1, 28, 28) if name == "cnn" else (3, 32, 32) if name == "resnet20" else (64,)
    own = params(build(name, input_shape=shape_, num_classes=10, hidden=[30, 20]))
    cut = plan(own)
    layers = [n for n, p in own.items() if p.ndim > 1]
    assert list(cut.widths) == layers[:-1]
    assert [cut.axes[n].columns for n in layers] == [None, *layers[:-1]]
    chosen = choose(cut.widths, 0.5, np.random.default_rng(0))
    numbers = sum(int(np.prod(shape(p, cut.axes[n], chosen))) for n, p in own.items())
    assert 0.2 < numbers / sum(p.numel() for p in own.values()) < 0.55  # r^2, and the first and last layer's r
    for n, p in own.items():
        assert p[region(p, cut.axes[n], chosen)].shape == shape(p, cut.axes[n], chosen)


def test_a_shortcut_takes_its_input_from_the_layer_that_fits() -> None:
    shapes = {
        "conv.weight": (4, 3, 3, 3),
        "block.conv.weight": (8, 4, 3, 3),
        "block.shortcut.weight": (8, 4, 1, 1),
        "depthwise.weight": (8, 1, 3, 3),
        "scale": (),
        "classes.weight": (5, 8),
    }
    cut = plan({n: torch.empty(s) for n, s in shapes.items()})
    assert cut.axes["block.shortcut.weight"] == Axes("block.shortcut.weight", "conv.weight")
    assert cut.axes["depthwise.weight"] == Axes("depthwise.weight")
    assert cut.axes["scale"] == Axes()


def test_a_flattened_channel_takes_its_pixels_along() -> None:
    """Channels 0 and 2 of 3, four pixels each: columns 0-3 and 8-11, whichever rows."""
    weight = torch.arange(60.0).reshape(5, 12)
    own = {"conv.weight": torch.zeros(3, 1, 2, 2), "fc.weight": weight, "out.weight": torch.zeros(2, 5)}
    cut = plan(own)
    units = {"conv.weight": torch.tensor([0, 2], dtype=torch.int32), "fc.weight": torch.tensor([1, 4])}
    part = weight[region(weight, cut.axes["fc.weight"], units)]
    rows = [[12.0 * r + c for c in (0, 1, 2, 3, 8, 9, 10, 11)] for r in (1, 4)]
    assert part.tolist() == rows


def test_a_layer_without_units_is_no_input() -> None:
    cut = plan({"a.weight": torch.empty(0, 6), "b.weight": torch.empty(3, 0)})
    assert cut.axes["b.weight"] == Axes()
    assert choose(cut.widths, 0.5, np.random.default_rng(0))["a.weight"].tolist() == []


def test_drift_is_that_of_what_counts() -> None:
    run = start(strategy(ratios="0.5", max_update_norm=1e-3), Recorder(small.client_app(net)), net, 1)
    assert 0 < run.reports[0].diagnostics["drift-max"] <= 1.001e-3


def test_so_many_units_are_drawn() -> None:
    drawn = choose({"a": 100, "b": 3, "c": 1}, 0.29, np.random.default_rng(1))
    assert {n: len(units) for n, units in drawn.items()} == {"a": 29, "b": 1, "c": 1}  # .29 * 100 is 28.999… in binary
    assert bool((drawn["a"].diff() > 0).all())
    again = choose({"a": 100}, 0.29, np.random.default_rng(2))
    assert again["a"].tolist() != drawn["a"].tolist()
    assert choose({"a": 7}, 1.0, np.random.default_rng(0))["a"].tolist() == [*range(7)]


# --- the mean --------------------------------------------------------------------------------------------------------


def test_every_number_is_the_mean_of_those_who_sent_it() -> None:
    """By loops over single numbers; (0, 1) of the first layer is in nobody's sub-model."""
    generator = torch.Generator().manual_seed(0)
    x = {"a": torch.randn(3, 2, generator=generator), "b": torch.randn(2, 3, generator=generator)}
    cut = plan(x)
    sent, dense = [], []
    for n, chosen in ((2.0, [1, 2]), (5.0, [2])):
        units = {"a": torch.tensor(chosen, dtype=torch.int32)}
        y = {name: torch.randn(p.shape, generator=generator) for name, p in x.items()}
        sent.append((n, units, {name: y[name][region(p, cut.axes[name], units)] for name, p in x.items()}))
        dense.append((n, chosen, y))
    after = merge(x, sent, cut)
    for name, at in [(name, (i, j)) for name, p in x.items() for i in range(p.shape[0]) for j in range(p.shape[1])]:
        unit = at[0] if name == "a" else at[1]
        who = [(n, float(y[name][at])) for n, chosen, y in dense if unit in chosen]
        expected = sum(n * v for n, v in who) / sum(n for n, _ in who) if who else float(x[name][at])
        assert float(after[name][at]) == pytest.approx(expected, rel=1e-6), (name, at)
    assert torch.equal(after["a"][0], x["a"][0])


def test_all_units_are_fedavg() -> None:
    run = start(strategy(ratios="1.0"), Recorder(small.client_app(net)), net, 3)
    plain = small.run(FedAvg(fraction_evaluate=0.0, seed=3), net)
    assert bits(run.result.arrays) == bits(plain.result.arrays)


def test_a_clients_part_is_clipped_as_a_whole() -> None:
    settings = {"min_train_nodes": 1, "min_available_nodes": 1, "ratios": "0.5"}
    free = start(strategy(**settings), Recorder(small.client_app(net), 1), net, 1)

    def moved(run: small.Run) -> np.ndarray:
        return small.vector(run.models[1]) - small.vector(run.models[0])

    length = float(np.linalg.norm(moved(free)))
    for share in (0.5, 2.0):
        bound = strategy(**settings, max_update_norm=share * length)
        limited = start(bound, Recorder(small.client_app(net), 1), net, 1)
        np.testing.assert_allclose(moved(limited), min(share, 1.0) * moved(free), atol=1e-6)


# --- what travels, what stands still ---------------------------------------------------------------------------------


def test_bytes_are_those_of_the_chosen_parts() -> None:
    """k of 10 units: k (6 + 1 + 3) + 3 numbers and k indices; the whole model down at first contact."""
    run = start(strategy(), grid := Recorder(small.client_app(net)), net, 3)
    for report in run.reports:
        up = down = 0
        for trip in grid.of(report.round):
            k = 2 * (int(trip.client) + 1)  # ratios .2, .4, … to clients 0, 1, …
            up += 4 * (k * 10 + 3 + k)
            first = report.round == 1
            down += 4 * (NUM_PARAMS + k) if first else 4 * (k * 10 + 3 + k)
            assert ("arrays" in trip.sent) == first
            assert "arrays" not in trip.reply
            assert sum(array_payload_bytes(a) for a in trip.reply["sub-model"].values()) == 4 * (k * 10 + 3)
        assert (report.traffic.train_up_payload, report.traffic.train_down_payload) == (up, down)


def test_units_change_from_round_to_round_and_differ_between_clients() -> None:
    start(strategy(ratios="0.5"), grid := Recorder(small.client_app(net)), net, 3)
    drawn = {(t, trip.client): tuple(received(trip.sent)[0]["0.weight"]) for t in (1, 2, 3) for trip in grid.of(t)}
    assert len(set(drawn.values())) > 10
    for t in (2, 3):
        for trip in grid.of(t):
            units, part = received(trip.sent)
            back_units, back = received(trip.reply)
            assert {n: u.tolist() for n, u in units.items()} == {n: u.tolist() for n, u in back_units.items()}
            assert {n: p.shape for n, p in part.items()} == {n: p.shape for n, p in back.items()}


@pytest.mark.parametrize("optimizer", ["momentum", "adamw", "decay"])
def test_nothing_outside_of_the_sub_model_moves(optimizer: str) -> None:
    """Whatever the optimizer remembers or decays; and everything inside does move."""
    seen: dict[tuple[int, str], tuple[Mapping[str, torch.Tensor], Mapping[str, torch.Tensor]]] = {}

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        before = {n: p.clone() for n, p in params(model).items()}
        if optimizer == "adamw":
            own = session.optimizer(base=torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5))
        else:
            own = session.optimizer(lr=0.1, momentum=0.9 if optimizer == "momentum" else 0.0, weight_decay=0.3)
        for x, y in small.batches(client):
            own.step(lambda x=x, y=y: cross_entropy(model(x), y))
        seen[session.server_round, str(client)] = before, {n: p.clone() for n, p in params(model).items()}

    start(strategy(ratios="0.3"), grid := Recorder(small.own_loop(net, steps)), net, 3)
    for t in (1, 2, 3):
        for trip in grid.of(t):
            unit = np.isin(np.arange(WIDTH), received(trip.sent)[0]["0.weight"])
            assert unit.sum() == 3
            before, after = seen[t, trip.client]
            masks = {"0.weight": unit[:, None] | np.zeros((1, 6), bool), "0.bias": unit}
            masks |= {"2.weight": unit[None] | np.zeros((3, 1), bool), "2.bias": np.ones(3, bool)}
            for name, mask in masks.items():
                np.testing.assert_array_equal((before[name] != after[name]).numpy(), mask)


def test_the_personal_model_holds_what_came_and_its_own_elsewhere() -> None:
    """Client 1 misses rounds 2 and 3: in round 4 its own model of round 1 stands wherever nothing came."""
    begun: dict[tuple[int, str], dict[str, torch.Tensor]] = {}
    ended: dict[tuple[int, str], dict[str, torch.Tensor]] = {}

    def steps(session: fedstrat.LocalSession, model: nn.Module, client: int) -> None:
        at = session.server_round, str(client)
        begun[at] = {n: p.clone() for n, p in params(model).items()}
        own = session.optimizer(lr=0.1)
        for x, y in small.batches(client):
            own.step(lambda x=x, y=y: cross_entropy(model(x), y))
        ended[at] = {n: p.clone() for n, p in params(model).items()}

    algorithm, grid = strategy(ratios="0.4"), Recorder(small.own_loop(net, steps))
    node, context = next((n, c) for n, c in grid.contexts.items() if small.client_of(c) == 1)

    def leave_and_return(report: Any) -> None:
        if report.round == 1:
            del grid.contexts[node]
        elif report.round == 3:
            grid.contexts[node] = context

    run = start(algorithm, grid, net, 4, on_round=leave_and_return)
    (trip,) = [trip for trip in grid.of(4) if trip.client == "1"]
    units = received(trip.sent)[0]["0.weight"]
    x, mine, now = decode(run.models[3], "model"), ended[1, "1"], begun[4, "1"]
    for i in range(WIDTH):
        source = x if i in units else mine
        assert torch.equal(now["0.weight"][i], source["0.weight"][i])
        assert torch.equal(now["2.weight"][:, i], source["2.weight"][:, i])
    assert torch.equal(now["2.bias"], x["2.bias"])
    kept = peek(open_store(context, algorithm.experiment_id, "1"), 4)
    assert kept is not None
    for name, tensor in ended[4, "1"].items():
        assert torch.equal(kept[f"personal/{name}"], tensor)


# --- what is refused -------------------------------------------------------------------------------------------------


def units_of(change: Any) -> Any:
    return lambda c: small.with_array(c, "0.weight", raw_array(change(decode(c["units"], "u")["0.weight"])), "units")


MALFORMED = {
    "a unit beyond the layer": (units_of(lambda u: torch.cat([u[:-1], u.new_tensor([WIDTH])])), "units/0.weight"),
    "a unit below 0": (units_of(lambda u: torch.cat([u.new_tensor([-1]), u[1:]])), "units/0.weight"),
    "a unit twice": (units_of(lambda u: u[[0, 0, 1]]), "units/0.weight"),
    "units whose differences wrap around": (
        units_of(lambda u: torch.tensor([0, 2**31 - 1, -(2**31), -1, 3], dtype=torch.int32)),
        "units/0.weight",
    ),
    "no units": (units_of(lambda u: u[:0]), "units/0.weight"),
    "units of another type": (units_of(lambda u: u.long()), "units/0.weight"),
    "fewer units than rows": (units_of(lambda u: u[:-1]), "sub-model/0.weight"),
    "another layer": (lambda c: small.with_array(c, "1.weight", raw_array(torch.ones(1)), "units"), "layers"),
    "no sub-model": (lambda c: RecordDict({n: r for n, r in c.items() if n != "sub-model"}), "record 'sub-model'"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_sub_models_are_refused(name: str) -> None:
    change, said = MALFORMED[name]

    def alter(t: int, client: str, content: RecordDict) -> RecordDict:
        return change(content) if (t, client) == (2, "1") else content

    run = start(strategy(ratios="0.3"), Recorder(small.client_app(net), alter=alter), net, 3)
    assert set(run.reports[1].failed) == {"1"}
    assert said in run.reports[1].failed["1"]
    assert not run.reports[2].failed


def test_ratios_are_checked_and_may_be_a_function_of_the_client() -> None:
    for ratios in ("", "0", "0.5,1.2", "a", "0.5;0.6", "nan"):
        with pytest.raises(ConfigError, match="ratios"):
            FedSPU(ratios=ratios)
    assert [FedSPU(ratios="0.2,0.4").ratio(c) for c in ("0", "1", "2")] == [0.2, 0.4, 0.2]
    names = [f"hospital-{i}" for i in range(50)]
    assert {FedSPU().ratio(name) for name in names} == {0.2, 0.4, 0.6, 0.8, 1.0}
    assert FedSPU().ratio(names[0]) == FedSPU().ratio(names[0])
    own = FedSPU(ratio_of=lambda client: 0.9 if client == "big" else 2.0)
    assert own.ratio("big") == 0.9
    with pytest.raises(ConfigError, match=r"ratio_of\('small'\)"):
        own.ratio("small")
