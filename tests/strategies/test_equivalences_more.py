"""What FedNova, q-FedAvg, AFL, FedACG, FedGAMMA, FedSMOO and normalised FedAvgM reduce to, and what stays true."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import MetricRecord, RecordDict
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedstrat import (
    AFL,
    CRAFT,
    SCAFFOLD,
    FedACG,
    FedAvg,
    FedAvgM,
    FedGAMMA,
    FedNova,
    FedProx,
    FedSAM,
    FedSMOO,
    LocalSession,
    NormalisedFedAvgM,
    QFedAvg,
)
from fedstrat.errors import RuleError
from fedstrat.payloads import NOTHING, Update
from fedstrat.strategies.fedsmoo import FedSMOORule
from tests.strategies import small
from tests.strategies.small import SIZES, Recorder, Run, bits
from tests.strategies.test_equivalences import COMMON, LR, check_same, equal, fixed, models, whole

ALONE = {"min_train_nodes": 1, "min_available_nodes": 1}


def record(algorithm: Any, num_rounds: int, loader: Any = fixed, **settings: Any) -> tuple[Recorder, Run]:
    grid = Recorder(small.client_app(small.double, loader, lr=LR))
    return grid, small.start(algorithm(**COMMON, **settings), grid, small.double, num_rounds)


# --- one algorithm is another ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "settings", "other", "others"),
    [
        (FedACG, {"momentum": 0.0, "beta": 0.0}, FedAvg, {}),
        (FedACG, {"momentum": 0.0, "beta": 0.3}, FedProx, {"mu": 0.3}),
        (FedGAMMA, {"rho": 0.0, "weighting": "examples"}, SCAFFOLD, {"weighting": "examples"}),
        (CRAFT, {"reference": "ema", "reference_decay": 0.0}, CRAFT, {}),
        (CRAFT, {"reference_decay": 0.5}, CRAFT, {}),
    ],
    ids=str,
)
def test_bit_by_bit(algorithm: Any, settings: dict[str, Any], other: Any, others: dict[str, Any]) -> None:
    common = {**COMMON, "fraction_train": 0.6, "trainable": small.TRAINED}
    one = small.run(algorithm(**common, **settings), small.everything, epochs=2)
    two = small.run(other(**common, **others), small.everything, epochs=2)
    assert [bits(m) for m in one.models] == [bits(m) for m in two.models]
    assert bits(one.models[-1]) != bits(one.models[0])


PAIRS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    # One whole batch: three steps for everybody, with unequal weights.
    "FedNova of equal steps is FedAvg": (FedNova, {"server_lr": 0.7}, FedAvg, {"server_lr": 0.7}),
    "FedNova of equal steps with server momentum is FedAvgM": (FedNova, {"momentum": 0.6}, FedAvgM, {"momentum": 0.6}),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_normalised_averaging_of_equal_steps(pair: str) -> None:
    one, settings, other, others = PAIRS[pair]
    shared = {"loader": whole, "epochs": 3, "fraction_train": 0.6}
    check_same(models(one, **shared, **settings), models(other, **shared, **others), 1e-12)
    assert np.abs(models(one, **settings) - models(other, **others)).max() > 1e-3, "unequal steps differ"


def test_fedgammas_first_round_is_fedsam() -> None:
    gamma = models(FedGAMMA, 2, rho=0.2, weighting="examples", server_lr=0.7)
    sam = models(FedSAM, 2, rho=0.2, server_lr=0.7)
    check_same(gamma[:2], sam[:2], 1e-12)
    assert np.abs(gamma[2] - sam[2]).max() > 1e-4


def test_fedsmoo_without_duals_and_regulariser_is_fedsam(monkeypatch: pytest.MonkeyPatch) -> None:
    with_duals = models(FedSMOO, loader=equal, rho=0.2, lamb=0.0)
    monkeypatch.setattr(FedSMOORule, "renew_dual", lambda *_: None)
    sam = models(FedSAM, loader=equal, rho=0.2)
    check_same(models(FedSMOO, loader=equal, rho=0.2, lamb=0.0), sam, 1e-12)
    assert np.abs(with_duals - sam).max() > 1e-4


def test_fedsmoo_without_perturbation_is_feddyn() -> None:
    alpha = 0.4
    grid, run = record(FedSMOO, 6, fraction_train=0.6, rho=0.0, lamb=alpha)
    # FedDyn by hand: a gradient memory per client, and their sum h on the server.
    x = small.matrix(run.models[0])
    memory = [np.zeros_like(x) for _ in SIZES]
    h = np.zeros_like(x)
    for t in range(1, 7):
        ys = []
        for client in map(int, (trip.client for trip in grid.of(t))):
            y = x
            for features, labels in fixed(client):
                gradient = small.gradient(y, features.numpy(), labels.numpy())
                y = y - LR * (gradient - memory[client] + alpha * (y - x))
            memory[client] = memory[client] - alpha * (y - x)
            h = h - alpha / len(SIZES) * (y - x)
            ys.append(y)
        x = np.mean(ys, axis=0) - h / alpha
        assert len(ys) == 3
        assert np.abs(small.matrix(run.models[t]) - x).max() <= 1e-12
    assert np.abs(x - small.matrix(run.models[0])).max() > 0.1


@pytest.mark.parametrize(("algorithm", "settings"), [(QFedAvg, {"q": 0.0}), (AFL, {"lambda_lr": 0.0})], ids=str)
def test_every_client_counts_the_same(algorithm: Any, settings: dict[str, Any]) -> None:
    grid, run = record(algorithm, 5, fraction_train=0.6, **settings)
    means = [np.mean([small.vector(trip.reply["arrays"]) for trip in grid.of(t)], axis=0) for t in range(1, 6)]
    for t, mean in enumerate(means[:-1], start=1):
        np.testing.assert_allclose(small.vector(grid.of(t + 1)[0].sent["arrays"]), mean, atol=1e-12)
    # AFL evaluates the mean of its models.
    last = np.mean(means, axis=0) if algorithm is AFL else means[-1]
    np.testing.assert_allclose(small.vector(run.result.arrays), last, atol=1e-12)


# --- FedACG ----------------------------------------------------------------------------------------------------------


def test_look_ahead_is_nesterovs_model_and_the_model_is_the_clients_mean() -> None:
    grid, run = record(FedACG, 6, fraction_train=0.6, momentum=0.6, beta=0.0)
    nesterov = models(FedAvgM, 6, fraction_train=0.6, momentum=0.6, nesterov=True)
    for t in range(1, 7):
        trips = grid.of(t)
        np.testing.assert_allclose(small.vector(trips[0].sent["arrays"]), nesterov[t - 1], atol=1e-12)
        ys = [small.vector(trip.reply["arrays"]) for trip in trips]
        mean = np.average(ys, axis=0, weights=[SIZES[int(trip.client)] for trip in trips])
        np.testing.assert_allclose(small.vector(run.models[t]), mean, atol=1e-12)
    assert np.abs(small.vector(run.models[-1]) - nesterov[-1]).max() > 1e-3


# --- FedNova ---------------------------------------------------------------------------------------------------------


def weights_in_update(rho: float, mu: float, lrs: Sequence[float]) -> tuple[np.ndarray, float]:
    """A client's x - y where its k-th gradient is the k-th unit vector, so that entry k is a_k; and its step-norm."""

    class Line(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.y = nn.Parameter(torch.zeros(len(lrs), dtype=torch.float64))

    def walk(session: LocalSession, model: Any, _: int) -> None:
        optimizer = session.optimizer(lr=lrs[0], momentum=rho)
        for k, lr in enumerate(lrs):
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step(lambda k=k: model.y[k])

    grid = Recorder(small.own_loop(Line, walk), 1)
    small.start(FedNova(**COMMON, **ALONE, mu=mu), grid, Line, 1)
    reply = grid.of(1)[0].reply
    return -small.vector(reply["arrays"]), reply["metrics"]["step-norm"]


@pytest.mark.parametrize("rho", [0.0, 0.7])
@pytest.mark.parametrize("mu", [0.0, 0.5])
@pytest.mark.parametrize("lrs", [[0.1] * 6, [0.3, 0.2, 0.1], [0.5]], ids=str)
def test_step_norm_is_the_sum_of_the_gradients_weights(rho: float, mu: float, lrs: list[float]) -> None:
    a, norm = weights_in_update(rho, mu, lrs)
    assert norm == pytest.approx(a.sum(), rel=1e-12)
    assert norm == pytest.approx(np.abs(a).sum(), rel=1e-12)  # with few steps none is negative
    lr, steps = lrs[0], len(lrs)
    if len(set(lrs)) > 1 or (rho and mu):
        return
    if rho:
        assert norm == pytest.approx(lr * (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho))
    else:
        assert norm == pytest.approx((1 - (1 - lr * mu) ** steps) / mu if mu else lr * steps)


def test_fednova_stays_at_the_optimum_however_unequal_the_steps() -> None:
    # f_i(y) = h_i/2 (y - a_i)^2, with 9 and 3 examples: sum_i p_i f_i is least at sum p h a / sum p h.
    h, a, p, steps = np.array([0.5, 2.0]), np.array([-1.0, 3.0]), np.array([0.75, 0.25]), (2, 20)
    optimum = float((p * h * a).sum() / (p * h).sum())

    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.y = nn.Parameter(torch.tensor(optimum, dtype=torch.float64))

    def leaves(algorithm: Any, lr: float) -> float:
        def walk(session: LocalSession, model: Any, client: int) -> None:
            optimizer = session.optimizer(lr=lr)
            for _ in range(steps[client]):
                optimizer.step(lambda: 0.5 * h[client] * (model.y - a[client]) ** 2)

        grid = Recorder(small.own_loop(Number, walk, examples=(9, 3).__getitem__), 2)
        run = small.start(algorithm(**COMMON), grid, Number, 1)
        return abs(small.vector(run.result.arrays)[0] - optimum)

    # A step of second order in the rate against one of first order.
    assert leaves(FedNova, 2e-4) / leaves(FedNova, 1e-4) == pytest.approx(4.0, rel=0.02)
    assert leaves(FedAvg, 2e-4) / leaves(FedAvg, 1e-4) == pytest.approx(2.0, rel=0.02)


def number_update(client: int, y: float, **fields: Any) -> Update[Any]:
    numbers = {"num_examples": 1.0, "num_steps": 1, "lr_sum": 0.1, "metrics": {}, **fields}
    return Update(client=str(client), params={"y": torch.tensor([y], dtype=torch.float64)}, extra=NOTHING, **numbers)


def at_zero(strategy: Any) -> Any:
    return strategy.init_state({"y": torch.zeros(1, dtype=torch.float64)})


def test_fednovas_scales_are_not_normalised_again() -> None:
    # |a| = 1 and 4, y = 1 and 4: d = 1 for both, tau = (1 + 4) / 2 = 2.5. Divided by their sum, 2.5/2 (1 + 1/4), the
    # scales would give 1.6.
    strategy = FedNova()
    updates = [number_update(i, y, metrics={"step-norm": y}) for i, y in enumerate((1.0, 4.0))]
    after = strategy.aggregate(at_zero(strategy), updates)
    assert float(after.params["y"]) == pytest.approx(2.5)
    # A client without a step has no part, not even in p.
    idle = number_update(2, 0.0, num_examples=50.0, num_steps=0, lr_sum=0.0, metrics={"step-norm": 0.0})
    assert float(strategy.aggregate(at_zero(strategy), [*updates, idle]).params["y"]) == pytest.approx(2.5)
    assert strategy.aggregate(after, [idle]) is after


@pytest.mark.parametrize(
    "base",
    [
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
        lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.5),
        lambda params: torch.optim.Adam(params, lr=0.1),
    ],
)
def test_fednova_refuses_optimizers_whose_weights_it_does_not_know(base: Callable[[Any], Any]) -> None:
    def walk(session: LocalSession, model: nn.Module, _: int) -> None:
        with pytest.raises(RuleError, match=r"torch\.optim\.SGD with one momentum"):
            session.optimizer(base=base(model.parameters()))

    small.start(FedNova(**COMMON, **ALONE), Recorder(small.own_loop(small.double, walk), 1), small.double, 1)


# --- q-FedAvg and AFL ------------------------------------------------------------------------------------------------


def test_the_unit_of_the_loss_is_irrelevant_where_the_rate_makes_up_for_it() -> None:
    def path(q: float, scale: float) -> np.ndarray:
        run = small.run(
            QFedAvg(**COMMON, q=q),
            small.double,
            loader=fixed,
            lr=LR / scale,  # the same local steps
            loss_fn=lambda outputs, labels: scale * nn.functional.cross_entropy(outputs, labels),
        )
        return np.stack([small.vector(model) for model in run.models])

    # F to 3 F and L to 3 L: both sums grow alike, but for the 1e-10 beside F.
    check_same(path(0.0, 3.0), path(0.0, 1.0), 1e-12)
    check_same(path(2.0, 3.0), path(2.0, 1.0), 1e-10)
    assert np.abs(path(2.0, 1.0) - path(0.0, 1.0)).max() > 1e-2


def test_q_fedavg_by_hand() -> None:
    # eta = 0.1 and 0.3: L = 1/0.2 = 5. q = 2, F = 1 and 3, y = 2 and -1: w = 10 and -5.
    # h = 2*1*100 + 5*1 and 2*3*25 + 5*9; x = (1*10 - 9*5) / (205 + 195) = -35/400.
    def step(q: float, scale: float = 1.0) -> float:
        strategy = QFedAvg(q=q)
        updates = [
            number_update(0, 2.0, num_steps=2, lr_sum=0.2, metrics={"loss-before": scale}),
            number_update(1, -1.0, num_steps=1, lr_sum=0.3, metrics={"loss-before": 3.0 * scale}),
        ]
        return float(strategy.aggregate(at_zero(strategy), updates).params["y"])

    assert step(2.0) == pytest.approx(-35 / 400)
    # With F = 2 and 6: h = 2*2*100 + 5*4 and 2*6*25 + 5*36; x = (4*10 - 36*5) / (420 + 480).
    assert step(2.0, scale=2.0) == pytest.approx(-140 / 900)
    assert step(0.0, scale=2.0) == step(0.0) == pytest.approx(0.5)
    # A loss of 0 has no power below 0, and a large power overflows: neither may show.
    for q, losses in ((0.5, (0.0, 0.0)), (0.5, (-1.0, 2.0)), (300.0, (1e3, 2e3))):
        strategy = QFedAvg(q=q)
        hard = [number_update(i, 1.0 + i, metrics={"loss-before": loss}) for i, loss in enumerate(losses)]
        assert 0.0 <= float(strategy.aggregate(at_zero(strategy), hard).params["y"]) <= 2.0


def test_loss_at_the_received_model_changes_no_batch() -> None:
    def shuffled(client: int) -> DataLoader:
        (rows,) = small.batches(client, None, torch.float64, examples=8)
        return DataLoader(TensorDataset(*rows), batch_size=2, shuffle=True)

    check_same(models(QFedAvg, loader=shuffled, q=0.0), models(FedAvg, loader=shuffled), 1e-12)


def test_the_mixture_goes_to_the_client_of_largest_loss() -> None:
    strategy = AFL(lambda_lr=0.05)
    state = strategy.admit(at_zero(strategy), dict.fromkeys("0123", 1.0))
    losses = [1.0, 3.0, 1.5, 0.5]
    for t in range(16):
        updates = [number_update(i, 1.0, metrics={"loss-before": losses[i]}) for i in range(4)]
        before, state = state.mixture["1"], strategy.aggregate(state, updates)
        assert all(weight >= 0.0 for weight in state.mixture.values())
        assert sum(state.mixture.values()) == pytest.approx(1.0, abs=1e-12)
        assert state.mixture["1"] > before or before == 1.0
        assert state.rounds == t + 1
    assert state.mixture == pytest.approx({"0": 0.0, "1": 1.0, "2": 0.0, "3": 0.0})
    # Nobody of this cohort has weight: they count the same, and only they rise.
    cohort = [number_update(i, y, metrics={"loss-before": 4.0}) for i, y in ((0, 5.0), (2, 7.0))]
    after = strategy.aggregate(state, cohort)
    assert float(after.params["y"]) == pytest.approx(6.0)
    assert after.mixture == pytest.approx({"0": 0.2 / 3 * 1, "1": 1 - 0.4 / 3, "2": 0.2 / 3, "3": 0.0})
    # A newcomer gets its share of those known.
    joined = strategy.admit(after, {"4": 1.0})
    assert joined.mixture["4"] == pytest.approx(0.2)
    assert joined.mixture["1"] == pytest.approx(0.8 * (1 - 0.4 / 3))


@pytest.mark.parametrize(
    ("algorithm", "metric"), [(FedNova, "step-norm"), (QFedAvg, "loss-before"), (AFL, "loss-before")]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_number_that_cannot_be_used_costs_the_reply(algorithm: Any, metric: str, value: float) -> None:
    def alter(_: int, client: str, content: RecordDict) -> RecordDict:
        metrics = MetricRecord({**content["metrics"], metric: value})
        return small.replaced(content, metrics=metrics) if client == "2" else content

    grid = Recorder(small.client_app(small.double, fixed), alter=alter)
    (report,) = small.start(algorithm(**COMMON), grid, small.double, 1).reports
    assert report.trained == ("0", "1", "3", "4")
    assert f"metrics/{metric}" in report.failed["2"]


# --- FedSMOO ---------------------------------------------------------------------------------------------------------


def test_drift_is_everybodys_mean_with_a_late_joiner_and_a_lost_state() -> None:
    grid = Recorder(small.client_app(small.double, fixed, lr=LR))
    late_id, late = grid.contexts.popitem()
    strategy = FedSMOO(**COMMON, fraction_train=1.0, min_train_nodes=4, min_available_nodes=4)
    total, numbers = np.zeros(21), []

    def check(report: Any) -> None:
        ys = []
        for trip in grid.of(report.round):
            if "arrays" in trip.reply:
                ys.append(small.vector(trip.reply["arrays"]))
                total.__iadd__(ys[-1] - small.vector(trip.sent["arrays"]))
        state = strategy.state
        drift, x, s = (
            np.concatenate([v.numpy().ravel() for v in tensors.values()])
            for tensors in (state.drift, state.params, state.perturbation)
        )
        np.testing.assert_allclose(drift, total / state.num_clients, atol=1e-12)
        np.testing.assert_allclose(x, np.mean(ys, axis=0) + drift, atol=1e-12)
        assert np.linalg.norm(s) == pytest.approx(strategy.rho)
        numbers.append((len(ys), state.num_clients))
        if report.round == 2:
            grid.contexts[late_id] = late
        if report.round == 3:
            grid.contexts[1001].state.clear()

    small.start(strategy, grid, small.double, 5, on_round=check)
    assert numbers == [(4, 4), (4, 4), (5, 5), (4, 6), (5, 6)]


# --- normalised FedAvgM ----------------------------------------------------------------------------------------------


def test_every_group_steps_by_the_servers_rate_whatever_the_clients_rate() -> None:
    settings = {"server_lr": 0.2, "momentum": 0.6, "grouping": "tensor", "fraction_train": 0.6}
    for lr in (1e-3, LR):
        x = models(NormalisedFedAvgM, lr=lr, **settings)
        for before, after in pairwise(x):
            np.testing.assert_allclose(np.linalg.norm((after - before)[:18]), 0.2)  # weight
            np.testing.assert_allclose(np.linalg.norm((after - before)[18:]), 0.2)  # bias


def test_without_momentum_it_is_fedavgs_direction() -> None:
    ours = models(NormalisedFedAvgM, 1, momentum=0.0, server_lr=0.2, grouping="model")
    theirs = models(FedAvg, 1)
    one, other = ours[1] - ours[0], theirs[1] - theirs[0]
    np.testing.assert_allclose(one, 0.2 * other / np.linalg.norm(other), atol=1e-12)
