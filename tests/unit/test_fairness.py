"""Fairness statistics against NumPy, and their independence of the clients' order."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedstrat.metrics.fairness import Fairness, fairness


@st.composite
def client(draw):
    examples = draw(st.integers(0, 500))
    correct = draw(st.integers(0, examples))
    loss = draw(st.floats(0, 1e6)) if examples else 0.0
    return correct, loss, examples


many_clients = st.lists(client(), max_size=45).map(lambda rows: {f"c{i}": row for i, row in enumerate(rows)})


def test_hand_computed_numbers():
    counts = {"a": (1, 2.0, 2), "b": (8, 3.0, 8), "c": (0, 7.0, 6), "empty": (0, 0.0, 0)}
    got = fairness(counts)
    assert got == Fairness(
        mean=0.5,  # (1/2 + 1 + 0) / 3
        accuracy=9 / 16,
        best10=1.0,
        worst10=0.0,
        std=pytest.approx(math.sqrt(1 / 6), rel=1e-15),  # ((1/2)^2 + (1/2)^2 + 0) / 3
        loss=12 / 16,
        num_clients=3,
        worst=0.0,
    )


@pytest.mark.parametrize(("clients", "tenth"), [(1, 1), (10, 1), (11, 2), (30, 3), (70, 7), (1000, 100)])
def test_a_tenth_of_the_clients_is_rounded_up(clients, tenth):
    counts = {str(i): (i, 0.0, clients) for i in range(clients)}  # accuracies 0, 1/n, 2/n, …
    got = fairness(counts)
    assert got.worst10 == pytest.approx((tenth - 1) / 2 / clients, abs=1e-15)
    assert got.best10 == pytest.approx((clients - 1 - (tenth - 1) / 2) / clients)


@given(many_clients)
def test_equals_numpy(counts):
    rows = np.array([row for row in counts.values() if row[2] > 0], dtype=np.float64).reshape(-1, 3)
    got = fairness(counts)
    if len(rows) == 0:
        assert got is None
        return
    accuracies = rows[:, 0] / rows[:, 2]
    tenth = math.ceil(len(rows) / 10)
    lowest_first = np.sort(accuracies)
    expected = [
        accuracies.mean(),
        rows[:, 0].sum() / rows[:, 2].sum(),
        lowest_first[::-1][:tenth].mean(),
        lowest_first[:tenth].mean(),
        np.std(accuracies, ddof=0),
        rows[:, 1].sum() / rows[:, 2].sum(),
    ]
    assert [got.mean, got.accuracy, got.best10, got.worst10, got.std, got.loss] == pytest.approx(
        expected, rel=1e-12, abs=1e-12
    )
    assert got.num_clients == len(rows)


@given(many_clients, st.randoms())
def test_the_order_of_the_clients_changes_no_bit(counts, random):
    shuffled = list(counts.items())
    random.shuffle(shuffled)
    assert fairness(dict(shuffled)) == fairness(counts)


def test_nobody_with_examples_gives_none():
    assert fairness({}) is None
    assert fairness({"a": (0, 0.0, 0)}) is None


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ((math.inf, 1.0), math.inf),
        ((1e308, 1e308), math.inf),
        ((math.inf, -math.inf), math.nan),
        ((math.nan, 1.0), math.nan),
    ],
)
def test_a_diverged_loss_is_reported_not_raised(losses, expected):
    got = fairness({str(i): (1, loss, 1) for i, loss in enumerate(losses)})
    assert got.loss == pytest.approx(expected, nan_ok=True)
