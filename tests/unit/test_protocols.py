"""Published partition protocols: against a second derivation of their rules, and their invariants."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrat.data.partition import PARTITIONS, partition, split
from fedstrat.data.protocols import FIXED, PROTOCOLS, SCHEMES, share_out
from fedstrat.errors import DataError
from fedstrat.seeding import derive, rng

LABELS = np.random.default_rng(5).integers(0, 10, 6000)
NUM_TRAIN = 5000


def sizes(shares):
    return np.array([len(share.train) + len(share.test) for share in shares])


def every(shares, part="both"):
    parts = {"train": [s.train for s in shares], "test": [s.test for s in shares]}
    return np.concatenate(parts["train"] + parts["test"] if part == "both" else parts[part])


def writers(count=60, seed=0):
    """Sizes from 1 to 700, ids that aren't consecutive, samples in no order."""
    generator = np.random.default_rng(seed)
    group = np.repeat(generator.permutation(5 * count)[:count], generator.integers(1, 700, count))
    return generator.permutation(group)


@st.composite
def requests(draw):
    scheme = draw(st.sampled_from(SCHEMES))
    num_classes = draw(st.integers(2, 6))
    labels = np.random.default_rng(draw(st.integers(0, 99))).permutation(np.arange(draw(st.integers(400, 900))) % 7)
    labels = labels % num_classes
    chosen = {"alpha": draw(st.sampled_from([0.3, 1.0, 100.0])), "classes_per_client": draw(st.integers(1, 2))}
    if scheme in PARTITIONS or scheme == "fedspu":
        chosen["min_size"] = 0
        chosen["test_fraction"] = draw(st.sampled_from([0.0, 0.2, 0.5]))
    if scheme == "fedcspack":
        chosen["alpha"] = 100.0  # so that some draw leaves nobody with too little
    if scheme == "natural":
        chosen["groups"] = np.arange(len(labels)) % 20
    if draw(st.booleans()):
        chosen["num_train"] = len(labels) - 100
    return labels, draw(st.integers(6, 12)), scheme, chosen


@settings(max_examples=100, deadline=None)
@given(requests(), st.integers(0, 2**40))
def test_shares_are_seeded_ascending_and_train_and_test_apart(request, seed):
    labels, num_clients, scheme, chosen = request
    before = labels.copy()
    shares = share_out(labels, num_clients, scheme, seed=seed, **chosen)
    assert len(shares) == num_clients
    for share in shares:
        assert share.train.dtype == share.test.dtype == np.int64
        assert (np.diff(share.train) >= 0).all()
        assert (np.diff(share.test) > 0).all()
    assert not set(every(shares, "train")) & set(every(shares, "test"))
    again = share_out(labels, num_clients, scheme, seed=seed, **chosen)
    assert all(
        np.array_equal(a, b) for one, two in zip(shares, again, strict=True) for a, b in zip(one, two, strict=True)
    )
    other = share_out(labels, num_clients, scheme, seed=seed + 1, **chosen)
    assert not all(np.array_equal(a.train, b.train) for a, b in zip(shares, other, strict=True))
    np.testing.assert_array_equal(labels, before)
    if scheme == "natural":
        assert len(set(every(shares))) == len(every(shares)) < len(labels)
    elif not scheme.startswith("fedvssam"):
        np.testing.assert_array_equal(np.sort(every(shares)), np.arange(len(labels)))


@pytest.mark.parametrize("scheme", PARTITIONS)
def test_plain_partitions_are_split_client_by_client(scheme):
    parts = partition(LABELS, 30, scheme, alpha=0.5, min_size=3, seed=4)
    shares = share_out(LABELS, 30, scheme, alpha=0.5, min_size=3, test_fraction=0.4, seed=4)
    for index, (part, share) in enumerate(zip(parts, shares, strict=True)):
        train, test = split(part, 0.4, derive(4, "split", index))
        np.testing.assert_array_equal(share.train, train)
        np.testing.assert_array_equal(share.test, test)


# --- CRAFT -----------------------------------------------------------------------------------------------


def test_craft_at_the_published_size():
    # 60 000 pooled samples over 1000 clients, Dirichlet(.1) by class, at least 20 each, 80/20. Sizes before the
    # top-up: a client's share of a class is Beta(a, (N - 1) a), so of variance (N - 1) / (N^2 (N a + 1)).
    labels = np.arange(60_000) % 10
    shares = share_out(labels, 1000, "craft", alpha=0.1, seed=77, num_train=50_000)
    np.testing.assert_array_equal(np.sort(every(shares)), np.arange(60_000))
    assert sizes(shares).min() == 20
    for share in shares:
        count = len(share.train) + len(share.test)
        assert len(share.train) == max(1, (8 * count) // 10)
    raw = partition(labels, 1000, "dirichlet", alpha=0.1, min_size=0, seed=77)
    variance = 10 * 6000**2 * 999 / 1000**2 / (1000 * 0.1 + 1)
    assert np.var([len(part) for part in raw]) == pytest.approx(variance, rel=0.2)
    # Nobody is topped up beyond 20, and nobody in between gains or loses but to the largest.
    before = np.array([len(part) for part in raw])
    assert (sizes(shares)[before < 20] == 20).all()
    assert (sizes(shares) <= np.maximum(before, 20)).all()
    in_between = (before >= 20) & (before < sizes(shares).max())
    assert (sizes(shares)[in_between] == before[in_between]).all()


def test_craft_goes_by_writers_of_at_most_500_where_they_are_known():
    group = writers()
    labels = np.arange(len(group)) % 62
    shares = share_out(labels, 20, "craft", seed=3, groups=group, test_fraction=0.5, min_size=400)
    ids, counts = np.unique(group, return_counts=True)
    seen = set()
    for share in shares:
        (writer,) = set(group[share.train]) | set(group[share.test])
        assert len(share.train) + len(share.test) == counts[ids == writer] <= 500
        assert len(share.train) == max(1, (8 * counts[ids == writer][0]) // 10)
        seen.add(writer)
    assert len(seen) == 20
    assert (counts < 20).any()  # a writer of few samples may be drawn: the 20 of the Dirichlet rule don't apply


def test_each_able_writer_is_as_likely_as_another():
    group = np.repeat(np.arange(10), [600, 5, 5, 5, 5, 5, 5, 5, 5, 5])
    drawn = [group[every(share_out(np.zeros_like(group), 3, "craft", seed=seed, groups=group))] for seed in range(300)]
    counts = np.bincount(np.concatenate([np.unique(found) for found in drawn]), minlength=10)
    assert counts[0] == 0
    assert counts[1:].sum() == 900
    # Each is drawn 300 / 3 = 100 times, with a deviation of sqrt(300 * 1/3 * 2/3) = 8.2.
    assert (np.abs(counts[1:] - 100) < 33).all()


def test_natural_takes_the_groups_as_they_are():
    group = writers(30, seed=2)
    shares = share_out(np.zeros_like(group), 10, "natural", groups=group, min_size=100, test_fraction=0.25)
    for share in shares:
        (owner,) = set(group[np.concatenate(share)])
        np.testing.assert_array_equal(np.sort(np.concatenate(share)), np.flatnonzero(group == owner))
        assert len(share.train) + len(share.test) >= 100


# --- FedVSSAM --------------------------------------------------------------------------------------------


def literal_fedvssam(labels, num_train, num_clients, scheme, alpha, per_client, seed):
    """The simulators' loop: somebody's turn, a class from that client's prior, the next sample of the class.

    Random numbers are taken in the order in which the implementation takes them.
    """
    generator = rng(seed, "partition", scheme)
    classes = sorted(set(labels[:num_train].tolist()))
    if scheme == "fedvssam-dirichlet":
        priors = generator.dirichlet([alpha] * len(classes), size=num_clients).tolist()
    else:
        masks = generator.permuted([[j < per_client for j in range(len(classes))]] * num_clients, axis=1)
        priors = [[float(held) / per_client for held in row] for row in masks]
    size = num_train // num_clients
    turns = generator.permutation([client for client in range(num_clients) for _ in range(size)])
    chances = generator.random(len(turns))
    pools, places = {}, dict.fromkeys(classes, 0)
    for label in classes:
        pools[label] = generator.permutation([i for i in range(num_train) if labels[i] == label])
    held = [[] for _ in range(num_clients)]
    for client, chance in zip(turns, chances, strict=True):
        below, total = 0.0, sum(priors[client])
        for name, share in zip(classes, priors[client], strict=True):
            label, below = name, below + share
            if chance * total < below:
                break
        if places[label] == len(pools[label]):
            places[label] = 0
        held[client].append(pools[label][places[label]])
        places[label] += 1
    test = generator.permutation(range(num_train, len(labels)))
    return [sorted(h) for h in held], [sorted(test[i::num_clients]) for i in range(num_clients)]


@pytest.mark.parametrize("num_clients", [100, 200])
@pytest.mark.parametrize(
    ("scheme", "setting"),
    [
        ("fedvssam-dirichlet", 0.5),
        ("fedvssam-dirichlet", 0.1),
        ("fedvssam-pathological", 6),
        ("fedvssam-pathological", 3),
    ],
)
def test_fedvssam_is_the_simulators_loop(num_clients, scheme, setting):
    alpha, per_client = (setting, 2) if scheme == "fedvssam-dirichlet" else (0.1, setting)
    shares = share_out(
        LABELS, num_clients, scheme, alpha=alpha, classes_per_client=per_client, num_train=NUM_TRAIN, seed=9
    )
    train, test = literal_fedvssam(LABELS, NUM_TRAIN, num_clients, scheme, alpha, per_client, 9)
    assert [share.train.tolist() for share in shares] == train
    assert [share.test.tolist() for share in shares] == test
    # Every client has exactly n/N samples; a class that is taken d times gives each of its samples
    # floor(d / n_k) or one more time; the test parts are the official one.
    assert {len(share.train) for share in shares} == {NUM_TRAIN // num_clients}
    counts = np.bincount(every(shares, "train"), minlength=NUM_TRAIN)
    assert len(counts) == NUM_TRAIN
    for label in range(10):
        of_class = counts[LABELS[:NUM_TRAIN] == label]
        assert of_class.max() - of_class.min() <= 1
    np.testing.assert_array_equal(np.sort(every(shares, "test")), np.arange(NUM_TRAIN, len(LABELS)))
    assert {len(share.test) for share in shares} <= {1000 // num_clients, -(-1000 // num_clients)}
    if scheme == "fedvssam-pathological":
        # With 25 or 50 draws of c classes one is sometimes missed, none is ever added.
        held = [len(np.unique(LABELS[share.train])) for share in shares]
        assert max(held) == per_client
        assert np.mean(held) > per_client - 0.2


def test_fedvssam_priors_have_the_variance_of_the_distribution():
    # Var of a component of Dirichlet(a over K) is (K - 1) / (K^2 (K a + 1)); sampling 500 adds p (1 - p) / 500.
    labels = np.arange(50_000) % 10
    shares = share_out(labels, 100, "fedvssam-dirichlet", alpha=0.5, seed=2, num_train=50_000)
    rows = np.array([np.bincount(labels[share.train], minlength=10) for share in shares]) / len(shares[0].train)
    assert rows.var(axis=1).mean() == pytest.approx(9 / 100 / 6, rel=0.15)


def test_fedvssam_without_an_official_test_part_holds_one_back():
    shares = share_out(LABELS, 7, "fedvssam-dirichlet", test_fraction=0.1, seed=1)
    assert len(every(shares, "test")) == 600
    assert {len(share.train) for share in shares} == {5400 // 7}
    assert not set(every(shares, "train")) & set(every(shares, "test"))
    assert np.mean(every(shares, "test")) == pytest.approx(3000, rel=0.1)  # a random one


# --- FedCSPACK -------------------------------------------------------------------------------------------


def literal_fedcspack(labels, num_clients, alpha, seed):
    """The authors' generator, in plain loops."""
    generator = rng(seed, "partition", "fedcspack")
    least = int(min(16 / (1 - 0.75), len(labels) / num_clients / 2))
    smallest = -1
    while smallest < least:
        batches = [[] for _ in range(num_clients)]
        for label in range(10):
            weights = generator.dirichlet([alpha] * num_clients)
            free = [
                w if len(batch) < len(labels) / num_clients else 0.0 for w, batch in zip(weights, batches, strict=True)
            ]
            samples = generator.permutation([i for i in range(len(labels)) if labels[i] == label])
            cuts = [int(c * len(samples)) for c in np.cumsum(np.array(free) / np.sum(free))[:-1]]
            for batch, low, high in zip(batches, [0, *cuts], [*cuts, len(samples)], strict=True):
                batch.extend(samples[low:high].tolist())
        smallest = min(len(batch) for batch in batches)
    return [sorted(batch) for batch in batches]


@pytest.mark.parametrize(("alpha", "seed"), [(0.3, 1), (0.6, 1), (1.0, 1), (0.3, 2)])
def test_fedcspack_is_the_authors_generator(alpha, seed):
    shares = share_out(LABELS, 20, "fedcspack", alpha=alpha, seed=seed, test_fraction=0.5, min_size=290)
    expected = literal_fedcspack(LABELS, 20, alpha, seed)
    assert [sorted(np.concatenate(share).tolist()) for share in shares] == expected
    assert sizes(shares).min() >= 64
    for share in shares:
        assert len(share.train) == (3 * (len(share.train) + len(share.test))) // 4


def test_fedcspack_asks_for_less_where_there_is_little():
    shares = share_out(LABELS[:400], 20, "fedcspack", alpha=1.0)
    assert sizes(shares).min() >= 10  # n / N / 2


def test_fedcspack_leaves_nobody_empty():
    labels = np.array([0, 0, 1, 1, 2])
    for seed in range(20):
        assert sizes(share_out(labels, 3, "fedcspack", alpha=1.0, seed=seed)).min() >= 1  # n / N / 2 = 0.83
    labels = np.arange(60) % 2
    with pytest.raises(DataError, match="no draw of 1000 that leaves everybody at least 1 sample; use fewer clients"):
        share_out(labels, 40, "fedcspack", alpha=0.1)


def test_fedspu_keeps_three_tenths_for_testing():
    shares = share_out(LABELS, 100, "fedspu", alpha=0.1, min_size=5, test_fraction=0.1, seed=6)
    parts = partition(LABELS, 100, "dirichlet", alpha=0.1, min_size=5, seed=6)
    assert [sorted(np.concatenate(share)) for share in shares] == [part.tolist() for part in parts]
    assert all(len(share.train) == max(1, (7 * len(part)) // 10) for share, part in zip(shares, parts, strict=True))


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scheme", "request_", "words"),
    [
        ("crafty", {}, "unknown partition 'crafty'; did you mean 'craft'.* There are: iid, .*fedspu"),
        ("natural", {}, "needs data that say who .* 'femnist', an npz folder whose files hold 'group'"),
        ("natural", {"groups": np.arange(6000) % 3}, "10 clients .* of the 3 groups .* 3 are such"),
        ("craft", {"groups": np.arange(6000) % 2}, "groups of 1 to 500 samples, but of the 2 groups .* 0 are such"),
        ("craft", {"num_clients": 500}, "at least 20 samples each .* need 10000"),
        ("fedvssam-dirichlet", {"alpha": 0.0}, "dataset.alpha"),
        ("fedvssam-pathological", {"classes_per_client": 11}, "from 1 to 10, the number of classes, but got 11"),
        ("fedvssam-dirichlet", {"num_clients": 5001, "num_train": 5000}, "the train part has 5000"),
        ("fedcspack", {"alpha": 1e-4, "num_clients": 20}, "no draw of 1000 that leaves everybody at least 64"),
        ("fedcspack", {"alpha": float("inf")}, "dataset.alpha"),
        ("fedspu", {"num_clients": 0}, "at least 1 client"),
        ("iid", {"test_fraction": 1.0}, "dataset.test-fraction"),
    ],
)
def test_an_impossible_request_is_a_data_error(scheme, request_, words):
    with pytest.raises(DataError, match=words):
        share_out(LABELS, **{"num_clients": 10, "scheme": scheme, **request_})


def test_fixed_settings_are_those_of_protocols():
    assert set(FIXED) < set(PROTOCOLS)
    assert {name for fixed in FIXED.values() for name in fixed} == {"min_size", "test_fraction"}
