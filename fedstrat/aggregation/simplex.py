"""Weights on the probability simplex, with a box: projection, and the shortest convex combination of vectors.

The feasible set is { w : lower <= w <= upper, sum w = 1 }, float64 throughout. The quadratic programme

    minimise  |sum_i w_i q_i|^2 = w^T A w          A = Q Q^T, the Gram matrix of the rows q_i

is solved by a primal active-set method: exact (to rounding) after finitely many steps, with the largest violation of
its optimality conditions, a bound of the duality gap, as the stop. Its size is the number of clients, so its cost is
small beside that of A.

Source: Nocedal, Wright, "Numerical Optimization", section 16.5; MGDA (Desideri 2012) for the problem.
"""

import numpy as np
import torch
from numpy.typing import NDArray

Vector = NDArray[np.float64]

_TOLERANCE = 1e-13
"""Of the optimality conditions, relative to the largest |q_i|^2."""


def project(point: torch.Tensor, lower: torch.Tensor | None = None, upper: torch.Tensor | None = None) -> torch.Tensor:
    """Return the nearest weights, ``argmin_w |w - point|``.

    It is ``clip(point - nu, lower, upper)`` with the one nu that makes the sum 1; the sum is piecewise linear in nu,
    so nu is found exactly between two of its kinks.

    Args:
        point: Any finite vector, shape (m,), m >= 1.
        lower: Lower bounds in [0, 1], shape (m,); 0 by default.
        upper: Upper bounds in [0, 1], shape (m,); 1 by default.

    Returns:
        The weights, shape (m,), float64.

    Raises:
        ValueError: No weights lie within the bounds.
    """
    low, high = _bounds(len(point), lower, upper)
    return torch.from_numpy(_project(point.detach().numpy().astype(np.float64), low, high))


def min_norm_weights(
    gram: torch.Tensor, lower: torch.Tensor | None = None, upper: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weights of the shortest combination of the rows, ``argmin_w w^T A w``.

    Where several weights give the same shortest vector (A of lower rank), one of them. At the minimum d over the whole
    simplex ``<q_i, d> >= |d|^2`` for every row.

    Args:
        gram: A, symmetric positive semidefinite, shape (m, m), m >= 1.
        lower: Lower bounds in [0, 1], shape (m,); 0 by default.
        upper: Upper bounds in [0, 1], shape (m,); 1 by default.

    Returns:
        The weights, shape (m,), float64.

    Raises:
        ValueError: No weights lie within the bounds.
    """
    low, high = _bounds(len(gram), lower, upper)
    start = _project((low + high) / 2, low, high)
    scale = float(gram.diagonal().max())
    if scale <= 0.0 or len(start) == 1:
        return torch.from_numpy(start)
    return torch.from_numpy(_active_set(gram.detach().numpy().astype(np.float64) / scale, low, high, start))


def _bounds(m: int, lower: torch.Tensor | None, upper: torch.Tensor | None) -> tuple[Vector, Vector]:
    low = np.zeros(m) if lower is None else lower.detach().numpy().astype(np.float64)
    high = np.ones(m) if upper is None else upper.detach().numpy().astype(np.float64)
    # Bounds around weights that sum to 1 leave room for them up to rounding.
    if bool((low > high).any()) or low.sum() > 1.0 + 1e-9 or high.sum() < 1.0 - 1e-9:
        raise ValueError(f"expected bounds that weights of sum 1 fit into, but got {low.tolist()} to {high.tolist()}")
    return low, high


def _project(point: Vector, low: Vector, high: Vector) -> Vector:
    kinks = np.sort(np.concatenate([point - low, point - high]))
    first, last = 0, len(kinks) - 1  # the sum falls from sum(high) >= 1 to sum(low) <= 1
    while last - first > 1:
        middle = (first + last) // 2
        if np.clip(point - kinks[middle], low, high).sum() >= 1.0:
            first = middle
        else:
            last = middle
    most, least = (float(np.clip(point - kinks[k], low, high).sum()) for k in (first, last))
    share = (most - 1.0) / (most - least) if most > least else 0.0
    nu = kinks[first] + min(max(share, 0.0), 1.0) * (kinks[last] - kinks[first])
    weights: Vector = np.clip(point - nu, low, high)
    return weights


def _active_set(A: Vector, low: Vector, high: Vector, w: Vector) -> Vector:
    free = (w > low) & (w < high)
    for _ in range(20 * len(w) + 20):
        if free.sum() > 1:
            step = _step(A, w, free)
            room = np.where(step > 0, high - w, w - low)[free] / np.maximum(np.abs(step[free]), 1e-300)
            length = min(1.0, float(room.min()))
            w = w + length * step
            if length < 1.0:
                # All that reach their bound together are held there, so what stays free can always move.
                hit = np.flatnonzero(free)[room <= length * (1.0 + 1e-12)]
                w[hit] = np.where(step[hit] > 0, high[hit], low[hit])
                free[hit] = False
                continue
        slope = A @ w
        rising, falling = w < high, w > low
        up = int(np.where(rising, slope, np.inf).argmin())
        down = int(np.where(falling, slope, -np.inf).argmax())
        if not rising.any() or not falling.any() or slope[down] - slope[up] <= _TOLERANCE:
            break
        if free[up] and free[down]:
            w, free = _exchange(A, w, (up, down), low, high)
        elif free.any():
            level = float(slope[free].mean())
            release = up if level - slope[up] >= slope[down] - level else down
            free[release] = True
        else:
            free[[up, down]] = True
    return w


def _exchange(
    A: Vector, w: Vector, pair: tuple[int, int], low: Vector, high: Vector
) -> tuple[Vector, NDArray[np.bool_]]:
    """Move weight from the second to the first, as far as it pays: what least squares can't tell of near-duplicates."""
    up, down = pair
    rooms = high[up] - w[up], w[down] - low[down]
    curvature = max(float(A[up, up] + A[down, down] - 2.0 * A[up, down]), 1e-300)
    length = min(*rooms, float((A[down] - A[up]) @ w) / curvature)
    w = w.copy()
    w[up] = high[up] if length == rooms[0] else w[up] + length
    w[down] = low[down] if length == rooms[1] else w[down] - length
    return w, (w > low) & (w < high)


def _step(A: Vector, w: Vector, free: NDArray[np.bool_]) -> Vector:
    """From w to the minimiser over the free weights, their sum kept."""
    at = np.flatnonzero(free)
    k = len(at)
    system = np.ones((k + 1, k + 1))
    system[:k, :k] = A[np.ix_(at, at)]
    system[k, k] = 0.0
    # Least squares: duplicate rows make the system singular, and then any of its solutions will do.
    solution = np.linalg.lstsq(system, np.append(-(A @ w)[at], 0.0), rcond=None)[0][:k]
    step = np.zeros_like(w)
    step[at] = solution - solution.mean()
    return step
