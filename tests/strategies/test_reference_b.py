"""The fair, the layer-wise and the contrastive methods against their NumPy twins; see test_reference.py."""

import numpy as np
import pytest

from fedstrat import MOON, FedFV, FedLF, FedMGDAPlus, FedNTD
from tests.reference import fedfv, fedlf, fedmgdaplus, fedntd, moon, objective
from tests.reference.problem import make_task
from tests.reference.rounds import Twin
from tests.strategies.problem import one_line, own_loop
from tests.strategies.test_reference import CLIP, IDLE, Case, check_equals_twin

CASES = [
    Case(FedMGDAPlus, fedmgdaplus.FedMGDAPlus),
    Case(FedMGDAPlus, fedmgdaplus.FedMGDAPlus, {"epsilon": 0.3, "server_lr": 0.5}, CLIP),
    Case(FedMGDAPlus, fedmgdaplus.FedMGDAPlus, {"epsilon": 1.0}, IDLE),
    Case(FedFV, fedfv.FedFV),
    Case(FedFV, fedfv.FedFV, {"alpha": 0.5, "tau": 3, "server_lr": 0.7}, CLIP),
    Case(FedFV, fedfv.FedFV, {"alpha": 0.0, "tau": 2}),
    Case(FedLF, fedlf.FedLF),
    Case(FedLF, fedlf.FedLF, {"grouping": "layer", "server_lr": 0.7}, CLIP),
    Case(FedLF, fedlf.FedLF, {"grouping": "model"}, IDLE),
    Case(MOON, moon.MOON),
    Case(MOON, moon.MOON, {"mu": 5.0, "temperature": 0.2}, CLIP),
    Case(FedNTD, fedntd.FedNTD),
    Case(FedNTD, fedntd.FedNTD, {"beta": 3.0, "temperature": 2.0}, CLIP),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_strategy_equals_its_twin(case: Case, dtype: type[np.floating]) -> None:
    check_equals_twin(case, dtype, own_loop)


@pytest.mark.parametrize("case", [CASES[i] for i in (0, 4, 6, 10, 12)], ids=str)
def test_one_line_client_equals_the_twin(case: Case) -> None:
    check_equals_twin(case, np.float64, one_line, epoch_decay=1.0)


COHORTS = [[0, 3, 5], [1, 2, 3, 7], [4, 6], [0, 5, 6], [2, 3, 7], [1, 4]]


def after(twin: Twin) -> np.ndarray:
    for cohort in COHORTS:
        twin.round(cohort)
    return twin.x


def test_the_problem_meets_the_branches() -> None:
    """The twins project inside and outside of the round, join layers and remember clients."""
    twin = fedfv.FedFV(make_task(), tau=3)
    after(twin)
    assert min(twin.projected.values()) > 0
    layers = fedlf.FedLF(make_task())
    after(layers)
    assert layers.joined > 0
    assert layers.remembered > 0


@pytest.mark.parametrize(
    "twin", [moon.MOON(make_task(), mu=2.0, temperature=0.3), fedntd.FedNTD(make_task(), beta=2.0, temperature=0.7)]
)
def test_the_twins_terms_have_the_slope_of_their_value(twin: moon.MOON | fedntd.FedNTD) -> None:
    twin.round([0, 3])
    twin.round([0, 3])
    task, client = twin.task, 3
    rows, labels = task.rows[client], task.labels[client]
    f = rows @ task.embed.T
    batch = f.mean(axis=0), f.var(axis=0)
    at_rest = twin.buffers.mean, twin.buffers.var

    def value(y: np.ndarray) -> float:
        at = objective.forward(task, y, rows, *batch)
        before = objective.forward(task, twin.x, rows, *at_rest)
        if isinstance(twin, moon.MOON):
            own, buffers = twin.previous[client]
            s_g, _ = moon.cosines(at.h, before.h)
            s_p, _ = moon.cosines(at.h, objective.forward(task, own, rows, buffers.mean, buffers.var).h)
            e_g, e_p = np.exp(s_g / 0.3), np.exp(s_p / 0.3)
            return float(-2.0 * np.log(e_g / (e_g + e_p)).mean())
        p, p_g = (fedntd.others(s, labels, 0.7) for s in (at.s, before.s))
        terms = np.where(p > 0, p_g * np.log(np.where(p > 0, p_g / np.where(p > 0, p, 1), 1)), 0)
        return 2.0 * 0.7**2 * float(terms.sum(axis=1).mean())

    y, h = twin.x + 0.1 * np.random.default_rng(0).normal(size=twin.x.shape), 1e-6
    slopes = [(value(y + h * e) - value(y - h * e)) / (2 * h) for e in np.eye(len(y))]
    np.testing.assert_allclose(twin.term(client)(y, rows, labels, *batch), slopes, atol=1e-7)
    assert np.abs(slopes).max() > 1e-3
