"""More strategies with their client halves against their NumPy twins, on the problem of test_reference."""

import numpy as np
import pytest

import fedstrat
from tests.reference import afl, craft, fedacg, fedgamma, fednova, fedsmoo, normalisedfedavgm, qfedavg
from tests.strategies.problem import one_line, own_loop
from tests.strategies.test_reference import CLIP, Case, check_equals_twin

MOMENTUM = {"momentum": 0.7}  # of the local steps
CASES = [
    Case(fedstrat.FedNova, fednova.FedNova),
    Case(fedstrat.FedNova, fednova.FedNova, {"mu": 0.5, "server_lr": 0.7}, CLIP),
    Case(fedstrat.FedNova, fednova.FedNova, {"momentum": 0.6}, MOMENTUM),
    Case(fedstrat.FedNova, fednova.FedNova, {"mu": 0.5}, MOMENTUM),
    Case(fedstrat.QFedAvg, qfedavg.QFedAvg),
    Case(fedstrat.QFedAvg, qfedavg.QFedAvg, {"q": 2.5}, CLIP),
    Case(fedstrat.QFedAvg, qfedavg.QFedAvg, {"q": 0.0}, MOMENTUM),
    Case(fedstrat.AFL, afl.AFL),
    Case(fedstrat.AFL, afl.AFL, {"lambda_lr": 0.2, "server_lr": 0.7}, CLIP),
    Case(fedstrat.AFL, afl.AFL, {"lambda_lr": 5.0}),  # the mixture leaves whole cohorts out
    Case(fedstrat.FedACG, fedacg.FedACG),
    Case(fedstrat.FedACG, fedacg.FedACG, {"momentum": 0.5, "beta": 0.5}, {**CLIP, **MOMENTUM}),
    Case(fedstrat.FedGAMMA, fedgamma.FedGAMMA),
    Case(fedstrat.FedGAMMA, fedgamma.FedGAMMA, {"rho": 0.3, "weighting": "examples", "server_lr": 0.8}, CLIP),
    Case(fedstrat.FedSMOO, fedsmoo.FedSMOO),
    Case(fedstrat.FedSMOO, fedsmoo.FedSMOO, {"rho": 0.3, "lamb": 0.4}, CLIP),
    Case(fedstrat.FedSMOO, fedsmoo.FedSMOO, {"rho": 0.0}),
    Case(fedstrat.FedSMOO, fedsmoo.FedSMOO, {"lamb": 0.0}),
    Case(fedstrat.NormalisedFedAvgM, normalisedfedavgm.NormalisedFedAvgM),
    Case(
        fedstrat.NormalisedFedAvgM,
        normalisedfedavgm.NormalisedFedAvgM,
        {"momentum": 0.6, "length": "momentum", "grouping": "tensor"},
        CLIP,
    ),
    Case(fedstrat.NormalisedFedAvgM, normalisedfedavgm.NormalisedFedAvgM, {"grouping": "model", "server_lr": 0.3}),
    Case(fedstrat.NormalisedFedAvgM, normalisedfedavgm.NormalisedFedAvgM, {"min_norm": 0.35}),
    Case(fedstrat.CRAFT, craft.CRAFT, {"reference": "ema"}),
    Case(fedstrat.CRAFT, craft.CRAFT, {"reference": "ema", "reference_decay": 0.4, "min_norm": 0.4}),
]


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_strategy_equals_its_twin(case: Case, dtype: type[np.floating]) -> None:
    check_equals_twin(case, dtype, own_loop)


TRAIN_CASES = [
    Case(fedstrat.FedNova, fednova.FedNova, {"mu": 0.5}, {**CLIP, **MOMENTUM}),
    Case(fedstrat.QFedAvg, qfedavg.QFedAvg, {"q": 1.0}),
    Case(fedstrat.AFL, afl.AFL, {"lambda_lr": 0.2}),
    Case(fedstrat.FedACG, fedacg.FedACG, {"beta": 0.5}),
    Case(fedstrat.FedGAMMA, fedgamma.FedGAMMA, {"rho": 0.3}),
    Case(fedstrat.FedSMOO, fedsmoo.FedSMOO, {"rho": 0.3}, CLIP),
]


@pytest.mark.parametrize("case", TRAIN_CASES, ids=str)
def test_one_line_client_equals_the_twin(case: Case) -> None:
    check_equals_twin(case, np.float64, one_line, epoch_decay=1.0)
