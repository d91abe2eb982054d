"""The server's mean and its step, against sums client by client in NumPy."""

import itertools

import numpy as np
import pytest
import torch

from fedstrat.aggregation import gram
from fedstrat.aggregation.gram import Displacements
from fedstrat.aggregation.mean import mean_deltas, mean_step, moved
from fedstrat.payloads import is_finite

SHAPES = {"conv": (3, 2, 3, 3), "bias": (3,), "scalar": (), "nothing": (0, 4), "large": (23, 7), "last": (5,)}
DTYPES = {
    "float32": dict.fromkeys(SHAPES, torch.float32),
    "float64": dict.fromkeys(SHAPES, torch.float64),
    "mixed": dict(zip(SHAPES, itertools.cycle([torch.float16, torch.float32, torch.bfloat16]), strict=False)),
    "float8": dict(zip(SHAPES, itertools.cycle([torch.float8_e5m2, torch.float32]), strict=False)),
}


def problem(m: int, dtypes: dict[str, torch.dtype]) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """x, and m clients of which every third didn't move."""
    rng = np.random.default_rng(m)
    x = {n: torch.tensor(rng.normal(size=s)).to(dtypes[n]) for n, s in SHAPES.items()}
    moves = [0.0 if i % 3 == 2 else 0.1 for i in range(m)]
    ys = [
        {n: (p.double() + a * torch.tensor(rng.normal(size=p.shape))).to(p.dtype) for n, p in x.items()} for a in moves
    ]
    return x, ys


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("columns", [1, 5, 64, 4096])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 16, 17, 50])
def test_the_step_is_the_sum_over_clients(
    m: int, dtypes: str, columns: int, single: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``x + eta_g sum_i w_i (y_i - x)``, whatever the blocks are, with unequal weights that don't sum to 1."""
    monkeypatch.setattr("fedstrat.aggregation.conflict.BLOCK_COLUMNS", columns)
    monkeypatch.setattr(gram, "EXACT_NUMBERS", 0 if single else 10**9)
    x, ys = problem(m, DTYPES[dtypes])
    weights = [0.3 + i for i in range(m)]
    tolerance = 3e-6 if single and dtypes != "float64" else 1e-12
    deltas = mean_deltas(x, ys, weights)
    stepped = mean_step(x, ys, weights, server_lr=0.01)
    for name, p in x.items():
        base = p.double().numpy()
        expected = np.zeros(p.shape)
        for y, weight in zip(ys, weights, strict=True):
            expected += weight * (y[name].double().numpy() - base)
        assert deltas[name].dtype == torch.float64
        np.testing.assert_allclose(deltas[name].numpy(), expected, rtol=tolerance, atol=tolerance * sum(weights))
        assert (stepped[name].dtype, stepped[name].shape) == (p.dtype, p.shape)
        rounded = torch.tensor(base + 0.01 * expected).to(p.dtype).double().numpy()
        eps = torch.finfo(p.dtype).eps  # where a number lies between two, the other one may be taken
        np.testing.assert_allclose(stepped[name].double().numpy(), rounded, rtol=eps, atol=tolerance)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("exact", [0, 10**9])
def test_clients_that_did_not_move_leave_every_bit(dtypes: str, exact: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gram, "EXACT_NUMBERS", exact)
    x, _ = problem(1, DTYPES[dtypes])
    after = mean_step(x, [x] * 37, [1.0 / 37] * 37, server_lr=0.7)
    assert all(torch.equal(after[n], p) for n, p in x.items())


@pytest.mark.parametrize("columns", [5, 4096])
def test_in_float64_the_step_is_x_plus_the_combination_bit_by_bit(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedstrat.aggregation.conflict.BLOCK_COLUMNS", columns)
    x, ys = problem(12, DTYPES["float32"])
    weights = torch.tensor(np.random.default_rng(0).dirichlet(np.ones(12)))
    rows = Displacements(x, ys)
    assert all(torch.equal(p, moved(x, rows.combined(weights))[n]) for n, p in rows.moved(weights).items())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("exact", [0, 10**9])
@pytest.mark.parametrize("m", [1, 16, 40])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_no_weight_is_too_small_for_nan_or_infinity_to_show(
    dtypes: str, m: int, exact: int, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one that is 0 in float32, wherever the number is."""
    monkeypatch.setattr(gram, "EXACT_NUMBERS", exact)
    x, ys = problem(m, DTYPES[dtypes])
    for name, place in (("conv", 0), ("scalar", 0), ("large", 160), ("last", 4)):
        broken = [dict(y) for y in ys]
        broken[m // 2][name] = ys[m // 2][name].clone()
        broken[m // 2][name].view(-1)[place] = value
        weights = [1e-300 if i == m // 2 else 1.0 for i in range(m)]
        after = mean_step(x, broken, weights)
        assert {n for n, p in after.items() if not is_finite(p)} == {name}


def test_remembered_rows_are_displacements_already(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrat.aggregation.conflict.BLOCK_COLUMNS", 7)
    x, ys = problem(20, DTYPES["float32"])
    old = {n: torch.randn(p.shape) for n, p in x.items()}
    coefficients = torch.linspace(-1.0, 2.0, 21, dtype=torch.float64)
    after = Displacements(x, ys, [old]).moved(coefficients)
    for name, p in x.items():
        terms = [c * (y[name].double() - p.double()) for c, y in zip(coefficients, ys, strict=False)]
        expected = p.double() + sum(terms) + 2.0 * old[name].double()
        torch.testing.assert_close(after[name], expected.float(), rtol=1e-6, atol=1e-6)
