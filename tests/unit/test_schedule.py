"""Learning-rate schedules, per round from 1."""

import math

import pytest

from fedstrat.errors import ConfigError
from fedstrat.local.schedule import scheduled_lr


def test_constant():
    assert [scheduled_lr(0.3, "constant", t, decay=0.5, num_rounds=4) for t in (1, 2, 100)] == [0.3] * 3


def test_exponential_begins_with_the_whole_rate():
    rates = [scheduled_lr(0.8, "exponential", t, decay=0.5) for t in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.8, 0.4, 0.2, 0.1])
    assert scheduled_lr(0.8, "exponential", 9) == 0.8  # decay 1


def test_cosine_falls_from_the_whole_rate_towards_0():
    rates = [scheduled_lr(0.8, "cosine", t, num_rounds=4) for t in (1, 2, 3, 4)]
    half = math.sqrt(0.5)  # cos(pi/4)
    assert rates == pytest.approx([0.8, 0.4 * (1 + half), 0.4, 0.4 * (1 - half)])
    # A run that goes on longer than was planned doesn't turn round.
    assert scheduled_lr(0.8, "cosine", 7, num_rounds=4) == pytest.approx(0.0, abs=1e-12)


def test_what_is_missing_or_unknown_is_named():
    with pytest.raises(ConfigError, match="'cosine' needs num-server-rounds"):
        scheduled_lr(0.1, "cosine", 1)
    with pytest.raises(ConfigError, match=r"expected 'constant', 'exponential' or 'cosine', but got 'step'"):
        scheduled_lr(0.1, "step", 1)
