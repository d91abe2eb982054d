"""Goals that end a run early, by hand."""

from dataclasses import replace

import pytest

from fedstrat.metrics.fairness import fairness
from fedstrat.metrics.rounds import RoundReport
from fedstrat.runs.goals import Goals


def ends_at(goals: Goals, means: list[float | None]) -> int | None:
    """Index of the round after which the run ends."""
    return next((i for i, mean in enumerate(means) if goals.take(i, mean)), None)


@pytest.mark.parametrize(("target", "end"), [(0.0, None), (0.5, 1), (0.7, 3), (0.8, 3), (0.81, None)])
def test_the_first_round_that_reaches_the_target_is_the_last(target, end):
    assert ends_at(Goals(target), [0.4, 0.6, None, 0.8, 0.1]) == end


@pytest.mark.parametrize(
    ("patience", "means", "end"),
    [
        (0, [0.5, 0.4, 0.4, 0.4], None),
        (1, [0.5, 0.6, 0.6], 2),  # an equal one is no better one
        (2, [0.5, 0.4, 0.45, 0.9], 2),
        (2, [0.5, 0.4, 0.51, 0.4, 0.4], 4),  # a new best begins anew
        (2, [0.5, None, 0.4, None, None, 0.4], 5),  # rounds without evaluation don't count
        (3, [0.5, 0.4, 0.4], None),
    ],
)
def test_patience_counts_evaluations_without_a_new_best(patience, means, end):
    assert ends_at(Goals(patience=patience), means) == end


def test_the_reason_says_what_happened():
    goals = Goals(0.75, 2)
    assert not goals.take(1, 0.7)
    assert goals.reason == ""
    goals.take(2, 0.8)
    assert goals.reason == "mean accuracy 0.800 reached the target 0.75"
    tired = Goals(patience=1)
    tired.take(1, 0.7)
    tired.take(2, 0.6)
    assert tired.reason == "no better mean accuracy than 0.700 in 1 evaluations"


def test_a_report_is_taken_by_its_mean_over_clients():
    report = RoundReport(round=1, num_rounds=9, seconds=1.0, aggregated=True)
    goals = Goals(0.6)
    assert not goals(report)
    # accuracies 1/4 and 1: mean 0.625, although 2 of 5 are right
    assert goals(replace(report, fairness=fairness({"0": (1, 1.0, 4), "1": (1, 1.0, 1)})))


def test_a_round_counts_once():
    """What a resumed run's next round tells about the last one was read from the history before."""
    report = RoundReport(round=6, num_rounds=9, seconds=1.0, aggregated=True)
    told = replace(report, received=fairness({"0": (1, 1.0, 2)}))
    goals = Goals(patience=1)
    assert not goals.take(4, 0.6)
    assert goals.take(5, 0.5)
    goals = Goals(patience=2)
    goals.take(4, 0.6)
    goals.take(5, 0.5)
    assert not goals(told)  # round 5 again
    assert goals(replace(told, round=7))
