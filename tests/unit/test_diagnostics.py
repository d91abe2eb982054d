"""Conflict, drift and sharpness: each against the definition written out, and none of them changes a run."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

import fedstrat
from fedstrat.aggregation.diagnostics import agreement, drift, whole
from fedstrat.aggregation.packs import from_packs, gram, to_packs
from fedstrat.local.sharpness import RHO, sharpness
from fedstrat.models import trainable_names
from fedstrat.payloads import NOTHING, Update
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies import ALGORITHMS, measure
from fedstrat.strategies.state import ServerState
from tests.strategies import small


def rows(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape)


def as_gram(matrix: np.ndarray) -> torch.Tensor:
    return torch.tensor(matrix @ matrix.T)


def test_agreement_counts_pairs_one_by_one() -> None:
    d = rows(7, 30) + 0.25
    cosines = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in itertools.combinations(d, 2)]
    found = agreement(as_gram(d))
    assert 0.0 < found["conflict_rate"] < 1.0
    assert found == pytest.approx({
        "conflict_rate": sum(c < 0 for c in cosines) / 21,
        "min_cosine": min(cosines),
        "mean_cosine": sum(cosines) / 21,
        "rank": 7,
    })  # fmt: skip


def test_rank_leaves_out_copies_and_small_updates_have_no_direction() -> None:
    d = np.vstack([rows(3, 30), 2.0 * rows(3, 30)[:1], 1e-9 * np.ones((1, 30)), np.zeros((1, 30))])
    found = agreement(as_gram(d), smallest=1e-6)
    assert found["rank"] == np.linalg.matrix_rank(d[:4]) == 3
    assert found["conflict_rate"] * 6 == pytest.approx(sum(a @ b < 0 for a, b in itertools.combinations(d[:4], 2)))
    assert agreement(as_gram(d[2:3])) == {}
    assert agreement(as_gram(d[4:]), smallest=1e-6) == {}


def test_drift_is_the_length_of_the_updates() -> None:
    d = rows(4, 9)
    lengths = np.linalg.norm(d, axis=1)
    assert drift(as_gram(d)) == pytest.approx({"drift_mean": lengths.mean(), "drift_max": lengths.max()})
    parts = {"a": as_gram(d[:, :4]), "b": as_gram(d[:, 4:])}
    torch.testing.assert_close(whole(parts), as_gram(d))


@pytest.mark.parametrize("content", ["delta", "weights"])
def test_packs_are_multiplied_as_dense_updates_would_be(content: Any) -> None:
    like = {"w": torch.zeros(5, 7), "b": torch.zeros(6)}
    x = to_packs({n: torch.tensor(rows(*t.shape), dtype=torch.float32) for n, t in like.items()}, 4)
    sent, dense = [], []
    for client in range(3):
        index = torch.tensor(sorted(np.random.default_rng(client).choice(len(x), 6, replace=False)), dtype=torch.int32)
        value = torch.tensor(rows(6, 4, seed=client), dtype=torch.float32)
        value[index == len(x) - 1, 1:] = x[-1, 1:] if content == "weights" else 0.0  # the padding stands still
        delta = torch.zeros_like(x)
        delta[index.long()] = value - (x[index.long()] if content == "weights" else 0.0)
        sent.append((index, torch.ones(6), value))
        dense.append(torch.cat([part.flatten() for part in from_packs(delta, like).values()]).double())
    stacked = torch.stack(dense)
    torch.testing.assert_close(gram(x, sent, content=content), stacked @ stacked.T, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1.0, 1e19, 1e25])
def test_large_models_are_multiplied_in_float32_where_that_loses_no_number(
    scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update that runs away is what these numbers are for; its squares are beyond float32."""
    monkeypatch.setattr("fedstrat.aggregation.gram.EXACT_NUMBERS", 0)
    d = torch.tensor(rows(5, 400), dtype=torch.float32)
    d[:3] *= scale
    x = {"w": torch.zeros(400)}
    strategy = fedstrat.FedAvg()
    told: Any = {"client": "0", "num_examples": 1, "num_steps": 1, "lr_sum": 0.1, "extra": NOTHING}
    updates = [Update(**told, params={"w": row}) for row in d]
    (found,) = strategy.grams(ServerState(params=x), updates).values()
    exact = d.double() @ d.double().T
    lengths = exact.diagonal().sqrt()
    cosines, expected = (g / lengths[:, None] / lengths for g in (found, exact))
    torch.testing.assert_close(cosines, expected, rtol=1e-5, atol=1e-6)
    assert drift(found) == pytest.approx(drift(exact), rel=1e-6)
    assert agreement(found) == pytest.approx(agreement(exact), rel=1e-4, abs=1e-6)


def test_sharpness_is_the_rise_of_the_loss_one_step_up_the_slope() -> None:
    model, loader = small.convex(torch.float64), small.batches(3, dtype=torch.float64)
    params = list(model.parameters())
    x, y = (torch.cat(parts) for parts in zip(*loader, strict=True))

    def loss() -> torch.Tensor:
        return torch.nn.functional.cross_entropy(model(x), y)

    start = [p.detach().clone() for p in params]
    gradient = torch.autograd.grad(loss(), params)
    length = math.sqrt(sum(float((g * g).sum()) for g in gradient))
    low = loss().item()
    with torch.no_grad():
        for p, g in zip(params, gradient, strict=True):
            p.add_(g, alpha=0.3 / length)
    high = loss().item()
    with torch.no_grad():
        for p, s in zip(params, start, strict=True):
            p.copy_(s)
    assert sharpness(model, loader, torch.nn.functional.cross_entropy, rho=0.3) == pytest.approx(high - low, rel=1e-9)
    assert high > low
    assert all(torch.equal(p, s) and p.grad is None for p, s in zip(params, start, strict=True))
    assert sharpness(model, [], torch.nn.functional.cross_entropy) == 0.0
    for p in params:
        p.requires_grad_(False)
    assert sharpness(model, loader, torch.nn.functional.cross_entropy) == 0.0


def run(name: str, diagnostics: str, rounds: int = 3, **settings: Any) -> small.Run:
    model = small.convex if name not in ("moon", "fedntd") else small.everything
    trainable = trainable_names(model())
    strategy = ALGORITHMS[name].strategy(fraction_train=0.6, seed=3, trainable=trainable, **settings)
    grid = InProcessGrid(small.client_app(model), len(small.SIZES))
    return small.start(strategy, grid, model, rounds, diagnostics=diagnostics)


@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_a_run_is_bit_by_bit_the_same_with_and_without(name: str) -> None:
    settings = {"pack_size": 4, "weights": "full"} if name == "fedcspack" else {}
    with_them, without = (run(name, how, **settings) for how in ("full", "off"))
    assert [small.bits(m) for m in with_them.models] == [small.bits(m) for m in without.models]
    for ours, bare in zip(with_them.reports, without.reports, strict=True):
        assert ours.counts == bare.counts
        assert 0.0 <= ours.diagnostics["conflict-rate"] <= 1.0
        assert 0.0 < ours.diagnostics["drift-mean"] <= ours.diagnostics["drift-max"]
        assert ours.diagnostics["sharpness"] > 0.0
        assert not {"conflict-rate", "drift-mean", "sharpness"} & bare.diagnostics.keys()
        assert not bare.layers
    assert ("control-norm" in with_them.reports[0].diagnostics) == (name in ("scaffold", "fedgamma"))


@pytest.mark.parametrize("ratios", ["0.5", "1.0"])
def test_the_drift_of_a_sub_model_is_what_it_moves(ratios: str) -> None:
    names = trainable_names(small.everything())
    strategy = fedstrat.FedSPU(seed=1, ratios=ratios, fraction_train=0.2, min_train_nodes=1, trainable=names)
    grid = InProcessGrid(small.client_app(small.everything), len(small.SIZES))
    done = small.start(strategy, grid, small.everything, 1)
    # The server takes a single client's part as it is.
    before, after = (small.vector(model, names) for model in done.models)
    assert done.reports[0].diagnostics["drift-mean"] == pytest.approx(np.linalg.norm(after - before), rel=1e-5)


def test_light_measures_the_updates_every_round_and_the_final_model_once() -> None:
    reports = run("fedavg", "light").reports
    assert ["conflict-rate" in r.diagnostics for r in reports] == [True] * 3
    assert ["sharpness" in r.diagnostics for r in reports] == [False, False, True]


def test_the_numbers_are_those_of_the_replies() -> None:
    nodes = small.Recorder(small.client_app(small.everything), len(small.SIZES))
    names = trainable_names(small.everything())
    done = small.start(fedstrat.FedAvg(seed=1, trainable=names), nodes, small.everything, 1)
    x = small.vector(done.models[0], names)
    d = np.stack([small.vector(trip.reply["arrays"], names) - x for trip in nodes.of(1)])
    found = done.reports[0].diagnostics
    lengths = np.linalg.norm(d, axis=1)
    assert found["drift-max"] == pytest.approx(lengths.max(), rel=1e-6)
    pairs = list(itertools.combinations(d / lengths[:, None], 2))
    assert found["conflict-rate"] == pytest.approx(sum(a @ b < 0 for a, b in pairs) / len(pairs))
    assert found["min-cosine"] == pytest.approx(min(a @ b for a, b in pairs), rel=1e-5)
    layers = done.reports[0].layers
    assert len(layers) > 1
    assert all({"conflict-rate", "min-cosine", "mean-cosine", "rank"} == set(numbers) for numbers in layers.values())


def test_of_many_clients_some_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "MOST_CLIENTS", 2)
    assert run("fedavg", "light").reports[0].diagnostics["update-rank"] <= 2


def test_under_differential_privacy_nothing_about_single_updates_is_told() -> None:
    inner = fedstrat.FedAvg(seed=1)
    strategy = DifferentialPrivacyServerSideFixedClipping(inner, 0.1, 1.0, len(small.SIZES))
    inner.measures = True
    clients = small.client_app(small.convex, lambda client: small.batches(client, examples=8))
    grid = InProcessGrid(clients, len(small.SIZES))
    strategy.start(grid=grid, initial_arrays=small.initial(small.convex), num_rounds=1, timeout=0.01)
    assert inner.trained
    assert not inner.diagnostics


def test_a_loss_without_a_gradient_costs_the_sharpness_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    def detached(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, y).detach()

    model = small.convex()
    assert fedstrat.client._sharpness(model, small.batches(0), detached) is None
    assert "isn't measured" in caplog.text
    assert RHO == 0.05
