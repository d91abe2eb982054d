"""The benchmark's choice of settings: by validation alone, and honest about the ends of its ranges."""

import itertools

import pytest

from benchmarks.digits import METHODS, SEEDS, all_runs, run_config
from benchmarks.selection import SCORES, Method, choose, markdown
from fedstrat.runs import config

METHOD = Method("FedAvg", "fedavg", "server-lr", (0.5, 1.0, 2.0), (0.1, 0.2, 0.4))
CHOSEN = (0.2, 2.0)


def make_runs(validation):
    """One run per cell and seed; test scores are best where validation isn't."""
    runs = []
    for lr, value, seed in itertools.product(METHOD.lrs, METHOD.values, (1, 2)):
        scores = dict.fromkeys(SCORES, 0.5 if (lr, value) == CHOSEN else 0.9)
        scores["mean"] += 0.1 * seed
        runs.append(
            {"method": "FedAvg", "lr": lr, "value": value, "seed": seed, "test": scores}
            | {"validation": {"mean": validation(lr, value, seed)}, "mb": 1.0 + seed}
        )
    return runs


def test_validation_chooses_and_test_is_reported():
    runs = make_runs(lambda lr, value, seed: 0.8 if (lr, value) == CHOSEN else 0.7)
    row = choose(METHOD, (1, 2), runs)
    assert (row.lr, row.value) == CHOSEN
    # Test means .6 and .7 of the two seeds: .65, sample deviation .1 / sqrt(2).
    assert row.test["mean"] == pytest.approx((0.65, 0.1 / 2**0.5))
    assert row.grid["worst10"] == pytest.approx((0.5 + 8 * 0.9) / 9)
    assert row.edges == ("server-lr",)
    assert "lr 0.2, server-lr 2.0\\* | .650 ± .071" in markdown({METHOD: row}, {})
    assert " | 2.5 | – | " in markdown({METHOD: row}, {})
    assert " | 2.5 | 3.2 | " in markdown({METHOD: row}, {"FedAvg": 3.21})


def test_one_lucky_seed_does_not_choose():
    lucky = {(0.4, 0.5, 1): 0.9, (0.4, 0.5, 2): 0.1}
    runs = make_runs(lambda *cell: lucky.get(cell, 0.6 if cell[:2] == (0.1, 1.0) else 0.5))
    row = choose(METHOD, (1, 2), runs)
    assert (row.lr, row.value, row.edges) == (0.1, 1.0, ("lr",))


def test_an_unfinished_method_has_no_row():
    runs = make_runs(lambda *_: 0.5)
    assert choose(METHOD, (1, 2), runs[:-1]) is None
    assert "FedAvg" not in markdown({METHOD: None}, {})


def test_every_method_has_as_many_cells_and_a_valid_run_config():
    assert len(all_runs()) == len(METHODS) * 12 * len(SEEDS)
    assert all(len(method.lrs) * len(method.values) == 12 for method in METHODS)
    for run in all_runs():
        if run[3] == SEEDS[0]:
            config.parse(run_config(*run))
