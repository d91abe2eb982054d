"""Seeds derived from paths: the same for ever, different for different paths, and good for NumPy and torch."""

import hashlib
import itertools

import numpy as np

from fedstrat.seeding import derive, rng


def test_a_seed_is_the_sha256_of_its_path():
    # Written out, since a run that is resumed with a later version must draw the same.
    digest = hashlib.sha256(b"int:1/str:client/str:7/int:3").digest()
    assert derive(1, "client", "7", 3) == int.from_bytes(digest[:8], "big") // 2


def test_every_part_of_the_path_counts_and_so_do_order_and_type():
    paths: list[tuple[int | str, ...]] = [
        *itertools.product([0, 1, -1, 2**70], ["batches", "cohort"], [0, 1, 12]),
        (0,),
        (0, "batches"),
        (0, 0, "batches"),
        (0, "batches", "1"),
        (0, "batches", 1, 2),
        (0, "batches", 12, ""),
        (0, "batches1", 2),
        (0, "batches/1"),
        (0, "ü"),
    ]
    seeds = [derive(*path) for path in paths]  # type: ignore[arg-type]
    assert len(set(seeds)) == len(paths)
    assert seeds == [derive(*path) for path in paths]  # type: ignore[arg-type]


def test_seeds_fill_63_bits():
    seeds = [derive(5, i) for i in range(2000)]
    assert all(0 <= seed < 2**63 for seed in seeds)
    for bit in range(63):
        # 2000 fair coins: 1000 heads with a standard deviation of 22
        assert 880 < sum(seed >> bit & 1 for seed in seeds) < 1120


def test_the_generator_is_numpy_s_own_with_that_seed():
    expected = np.random.default_rng(derive(3, "cohort", 2)).random(5)
    assert np.array_equal(rng(3, "cohort", 2).random(5), expected)
    assert not np.array_equal(rng(3, "cohort", 1).random(5), expected)


def test_the_order_of_asking_is_irrelevant_and_the_global_generator_untouched():
    np.random.seed(0)  # noqa: NPY002 - the global generator, which must not be used
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first = [rng(1, i).integers(2**40) for i in range(5)]
    second = [rng(1, i).integers(2**40) for i in reversed(range(5))]
    assert first == second[::-1]
    assert np.array_equal(np.random.get_state()[1], before)  # noqa: NPY002
