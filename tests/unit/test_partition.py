"""Partitions: disjoint, complete, seeded, of the sizes and classes asked for, or refused."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrat.data.partition import PARTITIONS, partition, split
from fedstrat.errors import DataError

LABELS = np.random.default_rng(5).integers(0, 10, 1797)


def sizes(parts):
    return np.array([len(part) for part in parts])


@st.composite
def requests(draw):
    """A possible request: labels, clients, scheme and settings that fit each other."""
    num_classes = draw(st.integers(1, 6))
    per_class = draw(st.lists(st.integers(5, 40), min_size=num_classes, max_size=num_classes))
    labels = np.repeat(np.arange(num_classes) * 3, per_class)  # labels needn't be consecutive
    scheme = draw(st.sampled_from(PARTITIONS))
    num_clients = draw(st.integers(1, 30))
    chosen = {"alpha": draw(st.sampled_from([1e-3, 0.1, 0.5, 100.0]))}
    if scheme == "pathological":
        most = min(num_classes, 5 * num_classes // num_clients)
        if most * num_clients < num_classes or most < 1:
            num_clients, most = num_classes, 1
        chosen["classes_per_client"] = draw(st.integers(-(-num_classes // num_clients), most))
    else:
        chosen["min_size"] = draw(st.integers(0, len(labels) // num_clients))
    order = np.random.default_rng(draw(st.integers(0, 99))).permutation(len(labels))
    return labels[order], num_clients, scheme, chosen


@settings(max_examples=150, deadline=None)
@given(requests(), st.integers(0, 2**40))
def test_every_sample_goes_to_one_client_the_same_way_each_time(request, seed):
    labels, num_clients, scheme, chosen = request
    before = labels.copy()
    parts = partition(labels, num_clients, scheme, seed=seed, **chosen)
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and (np.diff(part) > 0).all() for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert sizes(parts).min() >= chosen.get("min_size", 0)
    if "classes_per_client" in chosen:
        assert {len(np.unique(labels[part])) for part in parts} == {chosen["classes_per_client"]}
    again = partition(labels, num_clients, scheme, seed=seed, **chosen)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    np.testing.assert_array_equal(labels, before)


@pytest.mark.parametrize("scheme", PARTITIONS)
def test_another_seed_gives_another_partition(scheme):
    first, second = (partition(LABELS, 20, scheme, seed=seed) for seed in (1, 2))
    assert not all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("num_samples", "min_size"), [(60_000, 20), (60_000, 0), (1797, 1), (1797, 0)])
@pytest.mark.parametrize("scheme", PARTITIONS)
def test_thousand_clients_at_alpha_a_tenth(scheme, num_samples, min_size):
    labels = np.arange(num_samples) % 10
    parts = partition(labels, 1000, scheme, alpha=0.1, classes_per_client=1, min_size=min_size, seed=3)
    assert sizes(parts).sum() == num_samples
    assert sizes(parts).min() >= min_size


def test_iid_sizes_differ_by_at_most_one():
    assert set(sizes(partition(LABELS, 1000, "iid"))) == {1, 2}


def test_dirichlet_shares_have_the_variance_of_the_distribution():
    # Var of one share of a symmetric Dirichlet over N: (N - 1) / (N^2 (N alpha + 1)); a class is a draw.
    num_clients, alpha, per_class = 5, 0.5, 1000
    labels = np.repeat(np.arange(400), per_class)
    parts = partition(labels, num_clients, "dirichlet", alpha=alpha)
    shares = np.array([np.bincount(labels[part], minlength=400) for part in parts]) / per_class
    expected = (num_clients - 1) / num_clients**2 / (num_clients * alpha + 1)
    assert shares.var(axis=1).mean() == pytest.approx(expected, rel=0.1)
    assert shares.mean(axis=1) == pytest.approx(np.full(num_clients, 0.2), abs=0.05)


def test_quantity_has_uneven_sizes_and_even_labels():
    labels = np.arange(50_000) % 10
    parts = partition(labels, 10, "quantity", alpha=0.3)
    assert sizes(parts).std() > 3000
    for part in parts:
        if len(part) > 1000:
            shares = np.bincount(labels[part], minlength=10) / len(part)
            assert shares == pytest.approx(np.full(10, 0.1), abs=0.05)


def test_top_up_takes_from_the_largest_and_never_below_it():
    # The sizes before are those of min_size = 0, since the draws come first. Topping up s samples levels the
    # largest clients to one height: everybody in between keeps exactly what they had.
    before = sizes(partition(LABELS, 50, "dirichlet", seed=4))
    after = sizes(partition(LABELS, 50, "dirichlet", min_size=5, seed=4))
    assert (before < 5).any()
    ceiling = after.max()
    donors, receivers = before > ceiling, before < 5
    assert (after[receivers] == 5).all()
    assert (after[donors] >= ceiling - 1).all()
    others = ~donors & ~receivers
    assert (before[others] - after[others] <= (before[others] == ceiling)).all()


def test_top_up_moves_random_samples():
    # One client has everything: what the other gets must not be the first or last samples of a sorted list.
    labels = np.zeros(1000, dtype=int)
    for seed in range(20):
        before = partition(labels, 2, "quantity", alpha=0.01, seed=seed)
        poor = int(sizes(before).argmin())
        if len(before[poor]) == 0:
            break
    moved = partition(labels, 2, "quantity", alpha=0.01, min_size=50, seed=seed)[poor]
    assert len(moved) == 50
    assert moved.min() < 200
    assert moved.max() > 800


def test_pathological_owners_are_even_and_share_equally():
    labels = np.arange(6000) % 10
    parts = partition(labels, 50, "pathological", classes_per_client=3)
    held = np.array([np.bincount(labels[part], minlength=10) for part in parts])
    assert ((held > 0).sum(axis=0) == 15).all()  # 50 * 3 / 10 owners a class
    assert set(held[held > 0]) == {40}  # 600 / 15 samples each
    assert len({tuple(row > 0) for row in held}) > 10  # not the same few combinations over and over


def test_pathological_with_rare_classes_still_gives_everybody_c_classes():
    # 3 + 4 + 200 samples: 10 clients with 1 class: the rare ones can't have more owners than samples.
    labels = np.repeat([0, 1, 2], [3, 4, 200])
    parts = partition(labels, 13, "pathological", classes_per_client=1)
    assert all(len(np.unique(labels[part])) == 1 for part in parts)


@pytest.mark.parametrize(
    ("num_clients", "scheme", "chosen", "words"),
    [
        (1000, "dirichlet", {"min_size": 2}, "need 2000 samples, but the data set has 1797; use at most 898"),
        (10, "dirichlet", {"alpha": 0.0}, "dataset.alpha.*but got 0.0"),
        (10, "dirichlet", {"alpha": float("nan")}, "dataset.alpha.*but got nan"),
        (10, "quantity", {"alpha": -1.0}, "dataset.alpha.*but got -1.0"),
        (10, "pathological", {"classes_per_client": 11}, "only 10 classes.*at most 10"),
        (10, "pathological", {"classes_per_client": 0}, "classes-per-client to be at least 1"),
        (
            3,
            "pathological",
            {"classes_per_client": 2},
            "6 places for the 10 classes.*at least 5 clients.*least 4",
        ),
        (1000, "pathological", {"classes_per_client": 2}, "2000 pairs.*the 1797 samples"),
        (50, "pathological", {"min_size": 35}, "leaves client .* but dataset.min-size asks for 35"),
        (0, "iid", {}, "at least 1 client"),
        (5, "iid", {"min_size": -1}, "dataset.min-size to be at least 0"),
        (5, "dirichle", {}, "did you mean 'dirichlet'"),
    ],
)
def test_impossible_request_says_what_to_change(num_clients, scheme, chosen, words):
    with pytest.raises(DataError, match=re.compile(words, re.DOTALL)):
        partition(LABELS, num_clients, scheme, **chosen)


@pytest.mark.parametrize("labels", [np.zeros((4, 2), dtype=int), np.zeros(4)])
def test_labels_must_be_one_integer_each(labels):
    with pytest.raises(DataError, match="one integer label per sample"):
        partition(labels, 2, "iid")


@pytest.mark.parametrize(
    ("num_samples", "fraction", "num_train"),
    [
        (0, 0.2, 0),
        (1, 0.2, 1),
        (2, 0.2, 1),
        (3, 0.2, 2),
        (5, 0.2, 4),
        (20, 0.9, 2),
        (10, 0.0, 10),
        (1, 0.99, 1),
    ],
)
def test_split_sizes(num_samples, fraction, num_train):
    indices = np.arange(num_samples) * 7 + 1
    indices.setflags(write=False)  # as cached partitions are
    train, test = split(indices, fraction, seed=2)
    assert (len(train), len(test)) == (num_train, num_samples - num_train)
    np.testing.assert_array_equal(np.sort(np.concatenate([train, test])), indices)
    assert train.dtype == test.dtype == np.int64


def test_split_is_random_and_seeded():
    first, again, other = (split(np.arange(100), 0.2, seed)[1] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert (np.diff(first) > 0).all()
    assert first.max() - first.min() > 30


@pytest.mark.parametrize("fraction", [-0.1, 1.0, float("nan")])
def test_split_refuses_a_fraction_that_leaves_no_train_part(fraction):
    with pytest.raises(DataError, match=r"dataset\.test-fraction"):
        split(np.arange(10), fraction, seed=0)
