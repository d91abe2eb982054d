"""Which setting is chosen, what is reported, and that nothing is dropped silently: pure functions of outcomes."""

import math
import statistics

import pytest

from fedstrat.experiments.recipe import Method
from fedstrat.experiments.selection import Outcome, Reached, make_row, pair

SEEDS = (1, 2)
METHOD = Method("FedAvg", "fedavg", {}, {"train.lr": (0.1, 0.2, 0.4), "fedavg.server-lr": (1.0, 2.0)})
BEST = (("train.lr", 0.2), ("fedavg.server-lr", 2.0))


def outcome(setting, seed, *, validation=0.5, mean=0.5, method="FedAvg", **more):
    final = {"mean": mean, "best10": 0.9, "worst10": 0.1, "std": 0.2}
    given = {"status": "completed", "validation": validation, "final": final, "best": 0.95, "reached": (), **more}
    return Outcome(method, setting, seed, **given)


def outcomes(validation=lambda setting, seed: 0.5, mean=lambda setting, seed: 0.5, seeds=SEEDS, method=METHOD):
    return [
        outcome(s, seed, validation=validation(s, seed), mean=mean(s, seed), method=method.label)
        for seed in seeds
        for s in method.settings
    ]


def test_validation_chooses_and_test_is_reported():
    """Test scores are best where validation isn't."""
    runs = outcomes(lambda s, _: 0.8 if s == BEST else 0.7, lambda s, seed: 0.5 + 0.1 * seed if s == BEST else 0.9)
    row = make_row(METHOD, SEEDS, runs[::-1])
    assert row.setting == BEST
    assert row.validation == pytest.approx(0.8)
    # .6 and .7 of the two seeds: .65, sample deviation .1 / sqrt(2)
    assert (row.scores["mean"].mean, row.scores["mean"].std) == pytest.approx((0.65, 0.1 / math.sqrt(2)))
    assert row.scores["mean"].n == 2
    assert row.grid_mean == pytest.approx((0.65 + 5 * 0.9) / 6)
    assert row.edges == ("fedavg.server-lr",)  # .2 lies inside of its grid
    assert (row.num_runs, row.num_failed, row.num_missing, row.why_none) == (12, 0, 0, "")


def test_of_equals_the_first_in_the_order_of_the_grid_is_chosen():
    row = make_row(METHOD, SEEDS, outcomes()[::-1])
    assert row.setting == METHOD.settings[0] == (("train.lr", 0.1), ("fedavg.server-lr", 1.0))


def test_one_lucky_seed_does_not_choose():
    lucky = (("train.lr", 0.4), ("fedavg.server-lr", 1.0))
    row = make_row(METHOD, SEEDS, outcomes(lambda s, seed: (0.95 if seed == 1 else 0.1) if s == lucky else 0.6))
    assert row.setting != lucky


def test_a_setting_with_a_failed_run_is_not_chosen_but_counted():
    runs = outcomes(lambda s, _: 0.9 if s == BEST else 0.6, lambda s, _: 0.4)
    runs = [
        outcome(BEST, 1, status="failed", validation=0.99, mean=0.2) if (r.setting, r.seed) == (BEST, 1) else r
        for r in runs
    ]
    row = make_row(METHOD, SEEDS, runs)
    assert row.setting == METHOD.settings[0]
    assert (row.num_failed, row.num_runs) == (1, 12)
    assert row.grid_mean == pytest.approx((11 * 0.4 + 0.2) / 12)


def test_a_failed_run_without_an_evaluation_counts_as_zero_in_the_grid():
    runs = outcomes(mean=lambda *_: 0.6)
    runs[0] = Outcome("FedAvg", runs[0].setting, runs[0].seed, status="failed")
    assert make_row(METHOD, SEEDS, runs).grid_mean == pytest.approx(11 * 0.6 / 12)


def test_where_every_setting_failed_there_is_no_row_of_scores_but_a_reason():
    runs = [Outcome("FedAvg", s, seed, status="failed") for seed in SEEDS for s in METHOD.settings]
    row = make_row(METHOD, SEEDS, runs)
    assert (row.setting, row.why_none, row.num_failed, row.scores) == (None, "every setting has a failed run", 12, {})


def test_a_diverged_run_is_counted_and_keeps_its_score():
    runs = outcomes(lambda s, _: 0.9 if s == BEST else 0.6)
    runs = [outcome(r.setting, r.seed, mean=0.1, diverged=True) if r.setting == METHOD.settings[0] else r for r in runs]
    row = make_row(METHOD, SEEDS, runs)
    assert row.num_diverged == 2
    assert row.grid_mean == pytest.approx((2 * 0.1 + 10 * 0.5) / 12)


def test_missing_runs_leave_out_their_seed_and_are_counted():
    runs = outcomes(lambda s, seed: 0.9 if (s == BEST) == (seed == 1) else 0.6)
    row = make_row(METHOD, SEEDS, runs[:-1])
    assert row.setting == BEST  # seed 1 alone decides
    assert (row.num_missing, row.scores["mean"].n, [run.seed for run in row.chosen]) == (1, 1, [1])
    assert math.isnan(row.scores["mean"].std)
    nothing = make_row(METHOD, SEEDS, runs[: len(METHOD.settings) - 1])
    assert (nothing.setting, nothing.why_none) == (None, "no seed is finished")
    assert nothing.grid_mean == pytest.approx(0.5)


def test_settings_are_not_chosen_without_validation_scores():
    row = make_row(METHOD, SEEDS, outcomes(lambda *_: None))
    assert (row.setting, row.why_none) == (None, "no run has a validation score")


def test_one_setting_needs_no_validation():
    method = Method("FedAvg", "fedavg", {}, {})
    row = make_row(method, SEEDS, [outcome((), seed, validation=None, mean=0.4) for seed in SEEDS])
    assert (row.setting, row.validation, row.edges) == ((), None, ())
    assert row.scores["mean"].mean == pytest.approx(0.4)


def test_words_and_single_values_have_no_ends():
    method = Method("ConFIG", "config", {}, {"config.length": ("raw", "projection"), "train.lr": (0.1,)})
    row = make_row(method, (1,), [outcome(s, 1, method="ConFIG") for s in method.settings])
    assert row.edges == ()


def test_runs_of_other_methods_do_not_count():
    other = Method("Other", "fedavg", {}, METHOD.grid)
    runs = outcomes(mean=lambda *_: 0.3) + outcomes(lambda *_: 0.99, lambda *_: 0.9, method=other)
    assert make_row(METHOD, SEEDS, runs).scores["mean"].mean == pytest.approx(0.3)


def test_targets_are_kept_per_target_and_seed():
    method = Method("FedAvg", "fedavg", {}, {})
    runs = [outcome((), 1, reached=(Reached(3, 30), None)), outcome((), 2, reached=(Reached(5, 50), Reached(9, 90)))]
    assert make_row(method, SEEDS, runs).reached == ((Reached(3, 30), Reached(5, 50)), (None, Reached(9, 90)))


# --- paired with the first method ---------------------------------------------------------------------------

PLAIN = Method("A", "fedavg", {}, {})
OTHER = Method("B", "craft", {}, {})


def rows(first, other):
    """Final means per seed."""
    made = []
    for method, means in ((PLAIN, first), (OTHER, other)):
        runs = [outcome((), seed, mean=mean, method=method.label) for seed, mean in means.items()]
        made.append(make_row(method, tuple(means), runs))
    return made


def test_differences_are_taken_seed_by_seed():
    """.1, .3 and -.1 by hand, and Student's t for n = 3: 4.3027 (any table of quantiles)."""
    found = pair(*rows({1: 0.5, 2: 0.6, 3: 0.7}, {3: 0.6, 1: 0.6, 2: 0.9}))
    differences = [0.1, 0.3, -0.1]
    assert found is not None
    assert found.spread.mean == pytest.approx(statistics.fmean(differences))
    assert found.spread.std == pytest.approx(statistics.stdev(differences))
    half = 4.302653 * statistics.stdev(differences) / math.sqrt(3)
    assert (found.low, found.high) == pytest.approx((0.1 - half, 0.1 + half), rel=1e-5)
    assert (found.wins, found.losses, found.spread.n) == (2, 1, 3)


def test_equal_means_are_neither_won_nor_lost_and_one_seed_has_no_interval():
    found = pair(*rows({1: 0.5}, {1: 0.5}))
    assert found is not None
    assert (found.wins, found.losses, found.spread.n) == (0, 0, 1)
    assert math.isnan(found.low)


def test_only_common_seeds_are_compared():
    found = pair(*rows({1: 0.5, 2: 0.5}, {2: 0.8, 3: 0.1}))
    assert found is not None
    assert (found.spread.mean, found.spread.n) == (pytest.approx(0.3), 1)
    assert pair(*rows({1: 0.5}, {2: 0.8})) is None
