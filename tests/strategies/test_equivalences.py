"""Where one algorithm reduces to another, and what stays true in every round, in float64 with fixed batches."""

from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import RecordDict
from torch import nn
from torch.nn.functional import cross_entropy

from fedstrat import CRAFT, SCAFFOLD, ConFIG, FedAvg, FedAvgM, FedProx, FedSAM, FedVSSAM, LocalSession, MoFedSAM
from fedstrat.payloads import decode
from fedstrat.simulation import InProcessGrid
from tests.strategies import small
from tests.strategies.small import SIZES, Loader, Recorder, bits

COMMON = {"seed": 3, "fraction_evaluate": 0.0}
LR = 0.1


def fixed(client: int) -> Loader:
    """One to three batches: clients take unequal steps."""
    return small.batches(client, 8, torch.float64)


def equal(client: int) -> Loader:
    """Two batches of four rows for everybody."""
    return small.batches(client, 4, torch.float64, examples=8)


def whole(client: int) -> Loader:
    return small.batches(client, None, torch.float64)


def alike(_: int) -> Loader:
    return whole(1)


def models(
    algorithm: Callable[..., Any], num_rounds: int = 4, *, nodes: int = 5, loader: Any = fixed, **settings: Any
) -> np.ndarray:
    """The model before and after every round, one row each."""
    clients = {name: settings.pop(name) for name in ("lr", "epochs") if name in settings}
    strategy = algorithm(**{**COMMON, **settings})
    run = small.run(strategy, small.double, num_rounds, num_nodes=nodes, loader=loader, **{"lr": LR, **clients})
    return np.stack([small.vector(model) for model in run.models])


def check_same(one: np.ndarray, other: np.ndarray, tolerance: float) -> None:
    assert np.abs(one[-1] - one[0]).max() > 1e-3, "nothing moved"
    assert np.abs(one - other).max() <= tolerance


# --- one algorithm is another ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (FedProx, {"mu": 0.0, "gamma": 0.0}),
        (FedAvgM, {"momentum": 0.0}),
        (FedAvgM, {"momentum": 0.0, "nesterov": True}),
        (FedAvgM, {"momentum": 0.0, "server_lr": 0.7}),
        (FedSAM, {"rho": 0.0}),
        (FedSAM, {"rho": 0.0, "server_lr": 0.7}),
    ],
    ids=str,
)
def test_is_fedavg_bit_by_bit(algorithm: Any, settings: dict[str, Any]) -> None:
    server = {"server_lr": settings["server_lr"]} if "server_lr" in settings else {}
    # With normalisation and dropout, in float32: the same random numbers are drawn, too.
    common = {**COMMON, "fraction_train": 0.6, "trainable": small.TRAINED}
    run = small.run(algorithm(**common, **settings), small.everything, epochs=2)
    fedavg = small.run(FedAvg(**common, **server), small.everything, epochs=2)
    assert [bits(m) for m in run.models] == [bits(m) for m in fedavg.models]
    assert bits(run.models[-1]) != bits(run.models[0])


@pytest.mark.parametrize("option", [1, 2])
def test_scaffolds_first_round_is_fedavg(option: int) -> None:
    scaffold = models(SCAFFOLD, 2, option=option, weighting="examples", server_lr=0.7)
    fedavg = models(FedAvg, 2, server_lr=0.7)
    check_same(scaffold[:2], fedavg[:2], 1e-12)
    assert np.abs(scaffold[2] - fedavg[2]).max() > 1e-4
    uniform = models(SCAFFOLD, 1, option=option, loader=equal)
    check_same(uniform, models(FedAvg, 1, loader=equal), 1e-12)


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
@pytest.mark.parametrize("option", [1, 2])
def test_scaffold_of_identical_clients_with_whole_batches_is_fedavg(option: int, weighting: str) -> None:
    # One step a round: c_i = c is the gradient at x, and cancels. (With more, c_i is what all share, and cancels too.)
    settings = {"option": option, "weighting": weighting, "epochs": 3, "server_lr": 0.7}
    check_same(models(SCAFFOLD, loader=alike, **settings), models(FedAvg, loader=alike, epochs=3, server_lr=0.7), 1e-12)


def test_scaffolds_options_agree_for_one_whole_batch() -> None:
    settings = {"loader": whole, "fraction_train": 0.6, "num_rounds": 6}
    check_same(models(SCAFFOLD, option=2, **settings), models(SCAFFOLD, option=1, **settings), 1e-12)


PATH = LR * 2  # eta_l K of ``equal``
PAIRS: dict[str, tuple[Any, dict[str, Any], Any, dict[str, Any]]] = {
    "MoFedSAM without momentum is FedSAM": (
        MoFedSAM,
        {"alpha": 1.0, "rho": 0.2, "server_lr": 0.7},
        FedSAM,
        {"rho": 0.2, "server_lr": 0.7},
    ),
    "FedVSSAM without memory is FedSAM, absolute rate": (
        FedVSSAM,
        {"gamma_l": 1.0, "gamma_g": 1.0, "rho": 0.2, "server_lr": 0.3, "server_lr_scale": "absolute"},
        FedSAM,
        {"rho": 0.2, "server_lr": 0.3 / PATH},
    ),
    "FedVSSAM without memory is FedSAM, relative rate": (
        FedVSSAM,
        {"gamma_l": 1.0, "gamma_g": 1.0, "rho": 0.2, "server_lr": 0.7},
        FedSAM,
        {"rho": 0.2, "server_lr": 0.7},
    ),
    "FedVSSAM without memory and perturbation is FedAvg": (
        FedVSSAM,
        {"gamma_l": 1.0, "gamma_g": 1.0, "rho": 0.0, "server_lr": PATH, "server_lr_scale": "absolute"},
        FedAvg,
        {},
    ),
    "FedVSSAM that perturbs by its gradient and forgets is MoFedSAM": (
        FedVSSAM,
        {"gamma_l": 0.3, "gamma_g": 1.0, "rho": 0.2, "perturb": "gradient", "server_lr": PATH}
        | {"server_lr_scale": "absolute"},
        MoFedSAM,
        {"alpha": 0.3, "rho": 0.2},
    ),
}


@pytest.mark.parametrize("pair", PAIRS)
def test_sharpness_aware_relatives(pair: str) -> None:
    one, settings, other, others = PAIRS[pair]
    check_same(models(one, loader=equal, **settings), models(other, loader=equal, **others), 1e-12)


def test_fedvssam_that_forgets_is_mofedsam_also_with_unequal_steps() -> None:
    fedvssam = models(FedVSSAM, gamma_l=0.3, gamma_g=1.0, rho=0.2, perturb="gradient", server_lr=0.7)
    check_same(fedvssam, models(MoFedSAM, alpha=0.3, rho=0.2, server_lr=0.7), 1e-12)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [(MoFedSAM, {"alpha": 0.3, "rho": 0.0}), (FedVSSAM, {"gamma_l": 0.3, "gamma_g": 1.0, "rho": 0.0})],
    ids=str,
)
def test_without_perturbation_it_is_fedcm(algorithm: Any, settings: dict[str, Any]) -> None:
    # FedCM by hand: y <- y - eta (alpha g + (1 - alpha) h), h <- mean (x - y_i) / (eta K_i), x <- x - eta mean(K) h.
    x = small.matrix(small.initial(small.double))
    h, path = np.zeros_like(x), [x]
    for _ in range(4):
        directions, lengths = [], []
        for client in range(len(SIZES)):
            y, loader = x, fixed(client)
            for features, labels in loader:
                y = y - LR * (0.3 * small.gradient(y, features.numpy(), labels.numpy()) + 0.7 * h)
            lengths.append(LR * len(loader))
            directions.append((x - y) / lengths[-1])
        h = np.mean(directions, axis=0)
        x = x - np.mean(lengths) * h
        path.append(x)
    by_hand = np.stack([np.concatenate([x[:, :-1].ravel(), x[:, -1]]) for x in path])
    check_same(models(algorithm, **settings), by_hand, 1e-12)


@pytest.mark.parametrize("algorithm", [FedAvg, FedAvgM, FedProx, SCAFFOLD, FedSAM, MoFedSAM, FedVSSAM])
def test_identical_clients_are_one_client(algorithm: Any) -> None:
    settings = {"loader": alike, "epochs": 3}
    one = models(algorithm, nodes=1, min_train_nodes=1, min_available_nodes=1, **settings)
    check_same(models(algorithm, nodes=5, **settings), one, 1e-12)


# --- FedAvg and FedAvgM ----------------------------------------------------------------------------------------------


def test_fedavg_of_one_client_is_its_model() -> None:
    grid = Recorder(small.client_app(small.double, fixed), 1)
    strategy = FedAvg(**COMMON, min_train_nodes=1, min_available_nodes=1)
    run = small.start(strategy, grid, small.double, 1)
    np.testing.assert_allclose(small.vector(run.models[1]), small.vector(grid.of(1)[0].reply["arrays"]), rtol=1e-14)


def test_fedavg_of_one_whole_batch_is_gradient_descent() -> None:
    x = small.matrix(small.initial(small.double))
    p = np.array(SIZES) / sum(SIZES)
    run = small.run(FedAvg(**COMMON), small.double, 3, loader=whole, lr=LR)
    for model in run.models[1:]:
        x = x - LR * sum(p[i] * small.gradient(x, *small.rows(i)) for i in range(len(SIZES)))
        assert np.abs(small.matrix(model) - x).max() <= 1e-12


def steps(algorithm: Any, num_rounds: int, lost: int = 0, **settings: Any) -> list[np.ndarray]:
    """The server's steps when the clients' mean displacement never changes; round ``lost`` fails."""
    slope = torch.linspace(-1.0, 2.0, 21, dtype=torch.float64)

    def walk(session: LocalSession, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=LR)
        optimizer.step(lambda: slope @ nn.utils.parameters_to_vector(model.parameters()))

    grid = Recorder(small.own_loop(small.double, walk), alter=lambda t, _, content: None if t == lost else content)
    run = small.start(algorithm(**COMMON, **settings), grid, small.double, num_rounds)
    return [small.vector(after) - small.vector(before) for before, after in pairwise(run.models)]


def test_momentum_of_a_constant_displacement() -> None:
    beta, (plain,) = 0.6, steps(FedAvg, 1)
    for nesterov in (False, True):
        found = steps(FedAvgM, 30, momentum=beta, nesterov=nesterov)
        for t, step in enumerate(found, start=1):
            m = (1 - beta**t) / (1 - beta)
            np.testing.assert_allclose(step, (1 + beta * m if nesterov else m) * plain, atol=1e-12)
        np.testing.assert_allclose(found[-1], plain / (1 - beta), rtol=1e-6, atol=1e-12)  # both in the limit
    assert np.linalg.norm(plain) == pytest.approx(LR * np.linalg.norm(np.linspace(-1.0, 2.0, 21)))


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_begins_with_the_first_round_that_counts(nesterov: bool) -> None:
    (plain,) = steps(FedAvg, 1)
    nothing, first, _ = steps(FedAvgM, 3, lost=1, momentum=0.6, nesterov=nesterov)
    assert not nothing.any()
    np.testing.assert_allclose(first, (1.6 if nesterov else 1.0) * plain, atol=1e-12)


# --- FedProx ---------------------------------------------------------------------------------------------------------

# One client's least squares: f(y) = |X y - t|^2 / 2n = y'Ay/2 - b'y + const, by its first 20 rows.
X, TARGETS = small.rows(1)[0], small.rows(1)[1] - 1.0
A, B = X.T @ X / len(X), X.T @ TARGETS / len(X)


def regression() -> nn.Module:
    model = nn.Linear(small.FEATURES, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1.0, 1.0, small.FEATURES, dtype=torch.float64))
    return model


def half_squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return 0.5 * (outputs.squeeze(1) - targets).square().mean()


def solve_locally(mu: float, gamma: float = 0.0, *, lr: float = 0.1, epochs: int = 600) -> tuple[np.ndarray, int]:
    """One client's y from x, and how many steps it took."""
    loader = [(torch.tensor(X), torch.tensor(TARGETS))]
    app = small.client_app(regression, lambda _: loader, lr=lr, epochs=epochs, loss_fn=half_squares)
    grid = Recorder(app, 1)
    strategy = FedProx(**COMMON, mu=mu, gamma=gamma, min_train_nodes=1, min_available_nodes=1)
    small.start(strategy, grid, regression, 1)
    reply = grid.of(1)[0].reply
    return small.vector(reply["arrays"]), int(reply["metrics"]["num-steps"])


START = np.linspace(-1.0, 1.0, small.FEATURES)


def test_proximal_term_on_a_quadratic() -> None:
    assert 0.1 * (np.linalg.eigvalsh(A)[-1] + 8.0) < 2.0, "the steps are small enough"
    moved = []
    for mu in (0.0, 0.3, 2.0, 8.0):
        y, _ = solve_locally(mu)
        if mu:
            # f(y) + mu/2 |y - x|^2 is least where (A + mu I) y = b + mu x.
            fixed_point = np.linalg.solve(A + mu * np.eye(len(A)), B + mu * START)
            np.testing.assert_allclose(y, fixed_point, atol=1e-9)
            assert np.linalg.norm(y - START) <= np.linalg.norm(A @ START - B) / mu
        moved.append(np.linalg.norm(y - START))
    assert moved == sorted(moved, reverse=True)
    assert len(set(moved)) == len(moved)


def test_proximal_term_is_zero_at_first_and_diverges_when_the_rate_is_too_large() -> None:
    np.testing.assert_array_equal(solve_locally(8.0, epochs=1)[0], solve_locally(0.0, epochs=1)[0])
    far, _ = solve_locally(25.0, epochs=40)  # eta mu = 2.5
    assert np.linalg.norm(far - START) > 1e3


def test_inexact_solutions_stop_sooner_the_more_inexact() -> None:
    mu, start_norm = 0.3, np.linalg.norm(A @ START - B)
    taken = []
    for gamma in (0.01, 0.1, 0.3, 0.6, 1.0):
        y, num_steps = solve_locally(mu, gamma)
        assert np.linalg.norm(A @ y - B + mu * (y - START)) <= gamma * start_norm
        before, _ = solve_locally(mu, epochs=num_steps - 1) if num_steps > 1 else (START, 0)
        if gamma < 1.0:
            assert np.linalg.norm(A @ before - B + mu * (before - START)) > gamma * start_norm
        taken.append(num_steps)
    assert taken == sorted(taken, reverse=True)
    assert taken[0] > taken[2] > taken[-1] == 1
    assert solve_locally(mu, 0.01, epochs=3)[1] == 3


# --- SCAFFOLD --------------------------------------------------------------------------------------------------------


def watch(
    algorithm: Any, num_rounds: int, loader: Callable[[int], Loader] = fixed, *, decay: float = 0.0, **settings: Any
) -> tuple[Recorder, dict[tuple[int, str], list[np.ndarray]]]:
    """Run with clients that write down every gradient they evaluate, weight decay included: (round, client) -> them."""
    seen: dict[tuple[int, str], list[np.ndarray]] = defaultdict(list)

    def walk(session: LocalSession, model: nn.Module, client: int) -> None:
        optimizer = session.optimizer(lr=LR, weight_decay=decay)
        for x, y in loader(client):

            def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                loss = cross_entropy(model(x), y)
                loss.backward()
                raw = [(p.grad + decay * p.detach()).ravel().numpy() for p in model.parameters()]
                seen[session.server_round, str(client)].append(np.concatenate(raw))
                return loss

            optimizer.step(closure)

    grid = Recorder(small.own_loop(small.double, walk))
    small.start(algorithm(**COMMON, **settings), grid, small.double, num_rounds)
    return grid, seen


@pytest.mark.parametrize("weighting", ["uniform", "examples"])
def test_control_variates_are_mean_gradients(weighting: str) -> None:
    grid, seen = watch(SCAFFOLD, 6, decay=0.05, weighting=weighting, fraction_train=0.4)
    p = np.array(SIZES) / sum(SIZES) if weighting == "examples" else np.full(len(SIZES), 1 / len(SIZES))
    own = np.zeros((len(SIZES), 21))
    for t in range(1, 7):
        cohort = grid.of(t)
        assert len(cohort) == 2
        for trip in cohort:
            c = small.vector(trip.sent["control"])
            np.testing.assert_allclose(c, p @ own, atol=1e-10)
        for trip in cohort:
            own[int(trip.client)] += small.vector(trip.reply["control-delta"])
            mean_gradient = np.mean(seen[t, trip.client], axis=0)
            np.testing.assert_allclose(own[int(trip.client)], mean_gradient, atol=1e-10)
    assert np.count_nonzero(own.any(axis=1)) > 2


def test_a_client_without_a_step_keeps_its_control_variate() -> None:
    app = small.client_app(small.double, fixed, lr=LR, epochs=lambda t: int(t != 2))
    grid = Recorder(app)
    run = small.start(SCAFFOLD(**COMMON), grid, small.double, 3)
    for trip in grid.of(2):
        assert not small.vector(trip.reply["control-delta"]).any()
    assert bits(grid.of(3)[0].sent["control"]) == bits(grid.of(2)[0].sent["control"])
    assert bits(run.models[2]) == bits(run.models[1])
    assert small.vector(grid.of(2)[0].sent["control"]).any()


@pytest.mark.parametrize(("fraction", "num_rounds"), [(1.0, 20), (0.4, 80)])
def test_scaffold_finds_the_optimum_of_quadratics_that_disagree(fraction: float, num_rounds: int) -> None:
    # f_i(y) = (y - a_i)' H_i (y - a_i) / 2 over three numbers; the optimum solves sum H_i y = sum H_i a_i.
    rng = np.random.default_rng(0)
    hessians = [np.diag(rng.uniform(0.3, 1.5, 3)) for _ in SIZES]
    centres = [3.0 * rng.normal(size=3) for _ in SIZES]
    optimum = np.linalg.solve(sum(hessians), sum(h @ a for h, a in zip(hessians, centres, strict=True)))

    def model() -> nn.Module:
        own = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(own.weight)
        return own

    def walk(session: LocalSession, own: nn.Module, client: int) -> None:
        h, a = torch.tensor(hessians[client]), torch.tensor(centres[client])
        optimizer = session.optimizer(lr=0.2)
        for _ in range(10):
            optimizer.step(lambda: 0.5 * (own.weight[0] - a) @ h @ (own.weight[0] - a))

    def distance(algorithm: Any) -> float:
        grid = InProcessGrid(small.own_loop(model, walk, examples=lambda _: 10), len(SIZES))
        run = small.start(algorithm(**COMMON, fraction_train=fraction), grid, model, num_rounds)
        return float(np.linalg.norm(small.vector(run.result.arrays) - optimum))

    assert distance(SCAFFOLD) < 1e-4
    assert distance(FedAvg) > 0.1


# --- FedVSSAM and MoFedSAM -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("perturb", ["mixed", "gradient"])
def test_direction_is_a_running_mean_of_sharpness_aware_gradients(perturb: str) -> None:
    gamma_l, gamma_g = 0.4, 0.6
    settings = {"gamma_l": gamma_l, "gamma_g": gamma_g, "rho": 0.2, "perturb": perturb}
    grid, seen = watch(FedVSSAM, 5, fraction_train=0.6, **settings)
    h = np.zeros(21)
    for t in range(1, 6):
        np.testing.assert_allclose(small.vector(grid.of(t)[0].sent["direction"]), h, atol=1e-12)
        # Of every batch's two gradients the second is the sharpness-aware one.
        g = np.mean([np.mean(seen[t, trip.client][1::2], axis=0) for trip in grid.of(t)], axis=0)
        h = (1 - gamma_l * gamma_g) * h + gamma_l * gamma_g * g


@pytest.mark.parametrize("algorithm", [FedVSSAM, MoFedSAM])
def test_a_client_without_a_step_has_no_part_in_the_direction(algorithm: Any) -> None:
    def idle(client: int) -> Loader:
        return fixed(client) if client != 3 else []

    def lose(_: int, client: str, content: RecordDict) -> RecordDict | None:
        return None if client == "3" else content

    # Client 3 replies with 16 examples and no step; it is as if it had not replied.
    with_idle = watch(algorithm, 3, idle)[0]
    without = Recorder(small.client_app(small.double, fixed, lr=LR), alter=lose)
    small.start(algorithm(**COMMON), without, small.double, 3)
    for one, other in zip(with_idle.of(3), without.of(3), strict=False):
        for record in ("arrays", "direction"):
            assert bits(one.sent[record]) == bits(other.sent[record])
    assert [trip.reply["metrics"]["num-steps"] for trip in with_idle.of(3)] == [2, 3, 1, 0, 3]


# --- CRAFT and ConFIG ------------------------------------------------------------------------------------------------


def test_craft_with_one_client_and_its_raw_delta_is_fedavg() -> None:
    one = {"nodes": 1, "min_train_nodes": 1, "min_available_nodes": 1}
    craft = models(CRAFT, single_client="raw", server_lr=1.0, **one)
    assert np.array_equal(craft, models(FedAvg, **one))


@pytest.mark.parametrize("algorithm", [CRAFT, ConFIG])
def test_one_layer_is_the_whole_model(algorithm: Any) -> None:
    assert np.array_equal(models(algorithm, grouping="layer"), models(algorithm, grouping="model"))
    assert not np.array_equal(models(algorithm, grouping="tensor"), models(algorithm, grouping="model"))


@pytest.mark.parametrize("length", ["projection", "raw", "mean_norm"])
def test_crafts_first_direction_is_configs(length: str) -> None:
    common = {**COMMON, "grouping": "tensor", "server_lr": 1.0}
    steps_of = []
    for strategy in (CRAFT(**common, rtol=1e-3), ConFIG(**common, length=length)):
        run = small.run(strategy, small.double, 1, loader=fixed, lr=LR)
        before, after = (decode(model, "test") for model in run.models)
        steps_of.append({n: (after[n] - before[n]).ravel().numpy() for n in before})
    for name, craft in steps_of[0].items():
        config = steps_of[1][name]
        assert craft @ config >= (1 - 1e-12) * np.linalg.norm(craft) * np.linalg.norm(config)


@pytest.mark.parametrize("weights", ["examples", "equal"])
@pytest.mark.parametrize("length", ["projection", "raw", "mean_norm"])
def test_config_of_two_clients(length: str, weights: str) -> None:
    grid = Recorder(small.client_app(small.double, fixed, lr=LR), 2)
    run = small.start(ConFIG(**COMMON, length=length, weights=weights, grouping="model"), grid, small.double, 1)
    x = small.vector(run.models[0])
    deltas = np.stack([small.vector(trip.reply["arrays"]) - x for trip in grid.of(1)])
    norms = np.linalg.norm(deltas, axis=1)
    u, w = deltas / norms[:, None], np.array([12, 20]) / 32 if weights == "examples" else np.array([0.5, 0.5])
    # b = p u_1 + q u_2 with p + q c = w_1, p c + q = w_2 and c the cosine.
    c = u[0] @ u[1]
    b = ((w[0] - c * w[1]) * u[0] + (w[1] - c * w[0]) * u[1]) / (1 - c**2)
    unit = b / np.linalg.norm(b)
    step = {"raw": b, "projection": (w @ deltas @ unit) * unit, "mean_norm": (w @ norms) * unit}[length]
    np.testing.assert_allclose(small.vector(run.models[1]) - x, step, atol=1e-12)
