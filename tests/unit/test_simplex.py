"""Projection onto weights within bounds, and the shortest combination, against their optimality conditions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrat.aggregation.gram import Displacements
from fedstrat.aggregation.simplex import min_norm_weights, project

sizes, seeds, freedoms = st.integers(1, 12), st.integers(0, 2**32 - 1), st.sampled_from([0.0, 0.02, 0.3, 1.0])


def bounds(rng: np.random.Generator, m: int, freedom: float) -> tuple[np.ndarray, np.ndarray]:
    p = rng.dirichlet(np.ones(m))
    return np.maximum(p - freedom, 0.0), np.minimum(p + freedom, 1.0)


def worst_weights(slope: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """The feasible weights of least <slope, w>: everything at the lower bound, the rest to the smallest slopes."""
    w, left = low.copy(), 1.0 - low.sum()
    for i in np.argsort(slope):
        share = min(high[i] - low[i], left)
        w[i], left = w[i] + share, left - share
    return w


def check_feasible(w: np.ndarray, low: np.ndarray, high: np.ndarray) -> None:
    assert abs(w.sum() - 1.0) < 1e-12
    assert (w >= low - 1e-15).all()
    assert (w <= high + 1e-15).all()


@settings(deadline=None, max_examples=60)
@given(sizes, seeds, freedoms, st.sampled_from([0.01, 1.0, 100.0]))
def test_projection_is_the_nearest_point(m: int, seed: int, freedom: float, spread: float) -> None:
    rng = np.random.default_rng(seed)
    low, high = bounds(rng, m, freedom)
    point = spread * rng.normal(size=m).round(int(rng.integers(0, 4)))  # with ties
    w = project(torch.tensor(point), torch.tensor(low), torch.tensor(high)).numpy()
    check_feasible(w, low, high)
    # Nearest: no feasible v has <w - point, v - w> < 0.
    slope = w - point
    assert slope @ (worst_weights(slope, low, high) - w) >= -1e-12 * max(spread, 1.0)


def test_projection_onto_the_simplex_by_hand() -> None:
    assert project(torch.tensor([0.5, 0.9, -3.0])).tolist() == pytest.approx([0.3, 0.7, 0.0])
    assert project(torch.tensor([9.0])).tolist() == [1.0]
    assert project(torch.tensor([0.2, 0.3, 0.5])).tolist() == pytest.approx([0.2, 0.3, 0.5])


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(1, 15), seeds, freedoms, st.sampled_from(["apart", "alike", "copies", "with zeros"]))
def test_the_shortest_combination_has_no_duality_gap(m: int, d: int, seed: int, freedom: float, kind: str) -> None:
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(m, d)) + (2.0 * rng.normal(size=d) if kind == "alike" else 0.0)
    if kind == "copies":
        rows[m // 2 :] = rows[: m - m // 2] * (1.0 + rng.choice([0.0, 1e-9, 1e-6]))
    if kind == "with zeros":
        rows[::3] = 0.0
    low, high = bounds(rng, m, freedom)
    A = rows @ rows.T
    w = min_norm_weights(torch.tensor(A), torch.tensor(low), torch.tensor(high)).numpy()
    check_feasible(w, low, high)
    # w'Aw is at most the gap above the least value: <Aw, w - v> over feasible v.
    assert A @ w @ (w - worst_weights(A @ w, low, high)) <= 1e-9 * A.diagonal().max()


def test_the_shortest_combination_by_hand() -> None:
    assert min_norm_weights(torch.eye(2).double() * torch.tensor([1.0, 3.0])).tolist() == pytest.approx([0.75, 0.25])
    # (1, 0) and (3, 4): nearest to 0 is the first itself.
    assert min_norm_weights(torch.tensor([[1.0, 3.0], [3.0, 25.0]])).tolist() == [1.0, 0.0]


def test_bounds_without_room_are_refused() -> None:
    half = torch.tensor([0.2, 0.2])
    with pytest.raises(ValueError, match=r"bounds that weights of sum 1 fit into.*\[0\.2"):
        project(torch.zeros(2), upper=half)
    with pytest.raises(ValueError, match="fit into"):
        min_norm_weights(torch.eye(2), lower=torch.tensor([0.7, 0.7]))


def test_products_and_combinations_of_displacements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrat.aggregation.conflict.BLOCK_COLUMNS", 5)
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 4), "b": (), "c": (0, 2), "d": (7,)}
    x, y, z, old = ({n: torch.tensor(rng.normal(size=s)) for n, s in shapes.items()} for _ in range(4))
    rows = Displacements(x, [y, z], [old])

    def flat(tensors: dict[str, torch.Tensor], names: tuple[str, ...]) -> np.ndarray:
        return np.concatenate([tensors[n].numpy().ravel() for n in names])

    for names in (tuple(shapes), ("a", "d"), ("c",)):
        D = np.stack([flat(y, names) - flat(x, names), flat(z, names) - flat(x, names), flat(old, names)])
        np.testing.assert_allclose(rows.gram(names).numpy(), D @ D.T, atol=1e-12)
        c = torch.tensor([0.5, -2.0, 3.0], dtype=torch.float64)
        combined = rows.combined(c, names)
        assert {n: tuple(t.shape) for n, t in combined.items()} == {n: shapes[n] for n in names}
        np.testing.assert_allclose(flat(combined, names), c.numpy() @ D, atol=1e-12)
    assert torch.equal(rows.gram(), rows.gram(tuple(shapes)))


def test_large_rows_may_be_rounded_to_float32_and_only_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrat.aggregation.gram.EXACT_NUMBERS", 10)
    monkeypatch.setattr("fedstrat.aggregation.conflict.BLOCK_COLUMNS", 7)
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 4), "b": (2,), "c": (9,)}
    x = {n: torch.tensor(rng.normal(size=s), dtype=torch.float32) for n, s in shapes.items()}
    ys = [{n: p + 0.1 * torch.tensor(rng.normal(size=p.shape), dtype=torch.float32) for n, p in x.items()}] * 40
    rows = Displacements(x, ys)
    c = torch.tensor(rng.normal(size=40))
    exact = {n: float(c.sum()) * (ys[0][n].double() - p.double()) for n, p in x.items()}
    for single, tolerance in ((False, 1e-13), (True, 1e-5)):
        combined = rows.combined(c, single=single)
        for n, t in combined.items():
            assert t.dtype == torch.float64
            np.testing.assert_allclose(t.numpy(), exact[n].numpy(), rtol=tolerance, atol=tolerance)
    assert {block.dtype for _, block in rows.blocks(single=True)} == {torch.float32}
    # Numbers that came in float64 are never rounded.
    double = Displacements({n: p.double() for n, p in x.items()}, [{n: p.double() for n, p in y.items()} for y in ys])
    assert {block.dtype for _, block in double.blocks(single=True)} == {torch.float64}
