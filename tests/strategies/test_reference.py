"""Every strategy with its client half against its NumPy twin, after every round.

Clients differ in size and so in steps and weight; half of them take part; they train two epochs with batches
of unequal size and a learning rate of their own that falls inside the round, with weight decay; the model has
one frozen tensor, two floating buffers and one integer buffer.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, MetricRecord
from flwr.clientapp import ClientApp

import fedstrat
from fedstrat.simulation import InProcessGrid
from tests.reference import config, craft, fedavg, fedavgm, fedprox, fedsam, fedvssam, mofedsam, scaffold
from tests.reference.problem import SHAPES, SIZES, Task, make_task
from tests.reference.rounds import Twin
from tests.strategies.problem import decoded, initial_arrays, one_line, own_loop, run_config

ROUNDS = 6
TOLERANCE = {np.float32: 1e-4, np.float64: 1e-10}


@dataclass(frozen=True)
class Case:
    """An algorithm under settings that both sides call by the same names."""

    strategy: type[Any]
    twin: type[Twin]
    settings: dict[str, Any] = field(default_factory=dict)
    task: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in {**self.settings, **self.task}.items()]
        return "-".join([self.strategy.__name__, *words])


CLIP = {"clip_norm": 1.1}
LONG = {
    "epochs": 4,
    "weight_decay": 0.2,
}  # room to stop early, and a decay without which they'd stop elsewhere
IDLE = {"idle": 3}  # client 3 moves less than float32 resolves: it has no direction
CASES = [
    Case(fedstrat.FedAvg, fedavg.FedAvg),
    Case(fedstrat.FedAvg, fedavg.FedAvg, {"server_lr": 0.7}, CLIP),
    Case(fedstrat.FedAvgM, fedavgm.FedAvgM, {"momentum": 0.6}),
    Case(fedstrat.FedAvgM, fedavgm.FedAvgM, {"momentum": 0.6, "nesterov": True, "server_lr": 0.5}, CLIP),
    Case(fedstrat.FedProx, fedprox.FedProx, {"mu": 0.5}),
    Case(fedstrat.FedProx, fedprox.FedProx, {"mu": 0.5}, CLIP),
    Case(fedstrat.FedProx, fedprox.FedProx, {"mu": 0.2, "gamma": 0.4}, LONG),
    Case(fedstrat.FedProx, fedprox.FedProx, {"mu": 0.2, "gamma": 0.6}, LONG),
    Case(fedstrat.SCAFFOLD, scaffold.SCAFFOLD),
    Case(fedstrat.SCAFFOLD, scaffold.SCAFFOLD, {"weighting": "examples", "server_lr": 0.8}, CLIP),
    Case(fedstrat.SCAFFOLD, scaffold.SCAFFOLD, {"option": 1}),
    Case(fedstrat.SCAFFOLD, scaffold.SCAFFOLD, {"option": 1, "weighting": "examples"}),
    Case(fedstrat.CRAFT, craft.CRAFT),
    Case(fedstrat.CRAFT, craft.CRAFT, {"grouping": "tensor", "server_lr": 0.3}, CLIP),
    Case(fedstrat.CRAFT, craft.CRAFT, {"grouping": "model", "server_lr": 0.3}),
    Case(fedstrat.CRAFT, craft.CRAFT, {"rtol": 0.6}),
    Case(fedstrat.CRAFT, craft.CRAFT, {"max_norm": 1.02}),
    Case(fedstrat.CRAFT, craft.CRAFT, {"min_norm": 0.4}),  # with groups where one client or none is active
    Case(fedstrat.CRAFT, craft.CRAFT, {"min_norm": 0.0}, {"idle": 3}),  # a client that moves less than x's rounding
    Case(fedstrat.CRAFT, craft.CRAFT, {"min_norm": 0.4, "single_client": "raw"}),
    Case(fedstrat.ConFIG, config.ConFIG),
    Case(fedstrat.ConFIG, config.ConFIG, {"length": "raw", "server_lr": 0.3}, CLIP),
    Case(fedstrat.ConFIG, config.ConFIG, {"length": "mean_norm", "grouping": "tensor"}),
    Case(fedstrat.ConFIG, config.ConFIG, {"weights": "equal", "grouping": "model"}),
    Case(fedstrat.ConFIG, config.ConFIG, {}, IDLE),
    Case(fedstrat.ConFIG, config.ConFIG, {"length": "raw"}, IDLE),
    Case(fedstrat.ConFIG, config.ConFIG, {"length": "mean_norm"}, IDLE),
    Case(fedstrat.FedSAM, fedsam.FedSAM),
    Case(fedstrat.FedSAM, fedsam.FedSAM, {"rho": 0.3, "server_lr": 0.7}, CLIP),
    Case(fedstrat.MoFedSAM, mofedsam.MoFedSAM, {"alpha": 0.3}),
    Case(fedstrat.MoFedSAM, mofedsam.MoFedSAM, {"rho": 0.3, "alpha": 0.6, "server_lr": 0.7}, CLIP),
    Case(fedstrat.FedVSSAM, fedvssam.FedVSSAM),
    Case(fedstrat.FedVSSAM, fedvssam.FedVSSAM, {"rho": 0.3, "gamma_l": 0.7, "server_lr": 0.7}, CLIP),
    Case(fedstrat.FedVSSAM, fedvssam.FedVSSAM, {"rho": 0.3, "perturb": "gradient"}),
    Case(fedstrat.FedVSSAM, fedvssam.FedVSSAM, {"rho": 0.3, "update": "gradient"}),
    Case(
        fedstrat.FedVSSAM,
        fedvssam.FedVSSAM,
        {"gamma_g": 1.0, "server_lr": 1.5, "server_lr_scale": "absolute"},
    ),
]


def run(strategy: Any, grid: InProcessGrid, task: Task) -> tuple[list[dict[str, np.ndarray]], list[list[int]]]:
    """The model before and after every round, and who trained."""
    models, cohorts = [], []

    def keep(_round: int, arrays: ArrayRecord) -> MetricRecord:
        models.append(decoded(arrays))
        return MetricRecord()

    strategy.start(
        grid=grid,
        initial_arrays=initial_arrays(task),
        num_rounds=ROUNDS,
        evaluate_fn=keep,
        on_round=lambda report: cohorts.append([int(client) for client in report.trained]),
    )
    assert len(models) == ROUNDS + 1
    assert len(cohorts) == ROUNDS
    assert {len(cohort) for cohort in cohorts} == {4}
    assert len(set(map(tuple, cohorts))) > 3
    return models, cohorts


def check_equals_twin(case: Case, dtype: type[np.floating], app: Callable[[Task], ClientApp], **training: Any) -> None:
    task = make_task(dtype, **case.task, **training)
    strategy = case.strategy(
        **case.settings, fraction_train=0.5, fraction_evaluate=0.0, seed=11, trainable=list(SHAPES)
    )
    grid = InProcessGrid(app(task), num_nodes=len(SIZES), run_config=run_config(task))
    models, cohorts = run(strategy, grid, task)

    # The twin computes in float64 whatever the strategy's dtype: the stricter comparison.
    twin = case.twin(make_task(np.float64, **case.task, **training), **case.settings)
    limit = TOLERANCE[dtype]
    for model, cohort in zip(models[1:], cohorts, strict=True):
        twin.round(cohort)
        x = np.concatenate([model[name].ravel() for name in SHAPES])
        assert x.dtype == dtype
        off, moved = np.linalg.norm(x - twin.x), np.linalg.norm(twin.x - twin.task.x0)
        assert off <= limit * moved, f"round {twin.t}: off by {off / moved:.2g} of the way"
        np.testing.assert_allclose(model["norm.running_mean"], twin.buffers.mean, rtol=limit, atol=limit)
        np.testing.assert_allclose(model["norm.running_var"], twin.buffers.var, rtol=limit)
        assert model["norm.num_batches_tracked"].dtype == np.int64
        assert model["norm.num_batches_tracked"] == twin.buffers.batches
        np.testing.assert_array_equal(model["embed.weight"], models[0]["embed.weight"])


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_strategy_equals_its_twin(case: Case, dtype: type[np.floating]) -> None:
    check_equals_twin(case, dtype, own_loop)


TRAIN_CASES = [
    Case(fedstrat.FedAvgM, fedavgm.FedAvgM, {}, CLIP),
    Case(fedstrat.FedProx, fedprox.FedProx, {"mu": 0.2, "gamma": 0.6}, LONG),
    Case(fedstrat.SCAFFOLD, scaffold.SCAFFOLD, {"option": 1}),
    Case(fedstrat.SCAFFOLD, scaffold.SCAFFOLD, {"weighting": "examples"}, CLIP),
    Case(fedstrat.CRAFT, craft.CRAFT),
    Case(fedstrat.FedVSSAM, fedvssam.FedVSSAM, {"rho": 0.3}, CLIP),
]


@pytest.mark.parametrize("case", TRAIN_CASES, ids=str)
def test_one_line_client_equals_the_twin(case: Case) -> None:
    check_equals_twin(case, np.float64, one_line, epoch_decay=1.0)


def test_some_groups_have_one_active_client_or_none() -> None:
    """The cases with a large min_norm meet every branch of the active set."""
    case = Case(fedstrat.CRAFT, craft.CRAFT, {"min_norm": 0.4})
    task = make_task()
    strategy = case.strategy(min_norm=0.4, fraction_train=0.5, fraction_evaluate=0.0, seed=11, trainable=list(SHAPES))
    _, cohorts = run(strategy, InProcessGrid(own_loop(task), num_nodes=len(SIZES)), task)
    twin, counts = craft.CRAFT(task, min_norm=0.4), set()
    for cohort in cohorts:
        twin.round(cohort)
        counts |= {len(clients) for clients in twin.active.values()}
    assert {0, 1, 2} <= counts
