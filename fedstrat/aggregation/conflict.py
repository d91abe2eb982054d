"""Conflict-free directions: the closed form shared by CRAFT and ConFIG.

With unit rows ``U = [delta_i / |delta_i|]`` of the active clients, weights ``rho`` (sum 1) and a unit reference ``r``:

    g = r + U^+ (rho - U r)                       the point nearest to r with  <u_i, g> = rho_i  for every client

It is solved on the small Gram matrix ``A = U U^T`` (m x m, float64): ``g = r + U^T A^+ (rho - U r)``, at the cost of
two passes over the deltas (products, then combination) and no matrix of size m x d in float64.

Source: CRAFT (closed form with reference direction); ConFIG (r = 0).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from fedstrat.aggregation.device import lent, zeros

SingleClient = Literal["formula", "raw"]

_BLOCK_NUMBERS = 1 << 20
"""Numbers of the deltas that are copied at one time; they should stay in the cache."""
BLOCK_COLUMNS = 1 << 16
"""Most columns of the deltas that are copied at one time."""


@dataclass(frozen=True)
class Products:
    """Inner products of one group's deltas, all that the closed form needs to know of them.

    Attributes:
        deltas: ``D D^T``, shape (m, m), float64.
        reference: ``D g_prev``, shape (m,), float64.
        reference_norm: ``|g_prev|``; 0 when there is no reference.
    """

    deltas: torch.Tensor
    reference: torch.Tensor
    reference_norm: float


@dataclass(frozen=True)
class Solution:
    """The direction of one group as coefficients: ``g = reference * g_prev + sum_i deltas[i] * delta_i``.

    Attributes:
        deltas: Coefficients of the deltas, shape (m,), float64.
        reference: Coefficient of the previous direction (``1 / |g_prev|``, or 0).
        active: Which clients took part, shape (m,).
        inner: ``<u_i, g>`` of the active clients; equals rho where U has full row rank.
        rank: Rank that was used.
        norm: ``|g|``.
        cut: Positions of clients (of all m) whose directions ``max_norm`` cut off; empty when it didn't act.
        sensitivity: Bound of the relative change of g per relative change of A's entries where nothing was cut;
            infinite elsewhere.
    """

    deltas: torch.Tensor
    reference: float
    active: torch.Tensor
    inner: torch.Tensor
    rank: int
    norm: float
    cut: tuple[int, ...] = ()
    sensitivity: float = math.inf

    @property
    def min_inner(self) -> float:
        """The smallest ``<u_i, g>``: negative where a client's conflict was not resolved (rank-deficient U)."""
        return float(self.inner.min()) if len(self.inner) else 0.0


def products(blocks: Iterable[tuple[torch.Tensor, torch.Tensor | None]], num_clients: int) -> Products:
    """Accumulate inner products over column blocks.

    Args:
        blocks: Pairs (deltas of shape (m, c), previous direction of shape (c,) or None), float32 or float64;
            multiplied in their own dtype, added up in float64; see :mod:`fedstrat.aggregation.device`.
        num_clients: m.
    """
    deltas, with_reference, squared = zeros(num_clients, num_clients), zeros(num_clients), zeros()
    for block, reference in blocks:
        rows = lent(block)
        deltas += rows @ rows.T
        if reference is not None:
            r = lent(reference)
            with_reference += rows @ r.to(rows.dtype)
            squared += r.double() @ r.double()
    return Products(deltas.cpu(), with_reference.cpu(), float(squared) ** 0.5)


def solve(
    inner: Products,
    weights: Sequence[float] | torch.Tensor,
    *,
    min_norm: float = 1e-6,
    rtol: float = 1e-3,
    max_norm: float = 10.0,
    single_client: SingleClient = "formula",
) -> Solution:
    """Solve the closed form for one group.

    Args:
        inner: The group's inner products.
        weights: Client weights, >= 0, shape (m,); renormalised over the active clients, uniform if all are zero.
        min_norm: A client with ``|delta_i| < min_norm`` (or = 0) is inactive in this group. With no active
            client the direction is the weighted mean of the deltas.
        rtol: Eigenvalues of A up to ``(rtol * sigma_max)**2`` are cut: near-duplicate clients.
        max_norm: The smallest eigenvalues are dropped until ``|g| <= max_norm``; >= 1.
        single_client: With one active client, the "formula" ``r + u (1 - <u, r>)`` or its "raw" delta.

    Raises:
        ValueError: A weight is negative or not finite.
    """
    rho_all = torch.as_tensor(weights, dtype=torch.float64)
    if rho_all.shape != inner.reference.shape or not bool((torch.isfinite(rho_all) & (rho_all >= 0)).all()):
        raise ValueError(f"expected {len(inner.reference)} finite weights >= 0, but got {rho_all.tolist()}")
    norms = inner.deltas.diagonal().clamp(min=0.0).sqrt()
    active = (norms >= min_norm) & (norms > 0)
    coefficients = torch.zeros_like(norms)
    m = int(active.sum())
    if m == 0:
        coefficients = _rho(rho_all)
        norm = float((coefficients @ inner.deltas @ coefficients).clamp(min=0.0).sqrt())
        return Solution(coefficients, 0.0, active, torch.zeros(0, dtype=torch.float64), 0, norm)
    if m == 1 and single_client == "raw":
        coefficients[active] = 1.0
        return Solution(coefficients, 0.0, active, norms[active], 1, float(norms[active]))

    n = norms[active]
    gram = inner.deltas[active][:, active] / (n[:, None] * n[None, :])
    has_reference = inner.reference_norm > 0.0
    along = inner.reference[active] / (n * inner.reference_norm) if has_reference else torch.zeros_like(n)  # U r
    target = _rho(rho_all[active]) - along

    # Below m eps an eigenvalue is the rounding of the Gram matrix, however small rtol is.
    floor = max(rtol**2, m * torch.finfo(torch.float64).eps)

    def length(a: torch.Tensor) -> float:
        # |g|^2 = |r|^2 + 2 a.(U r) + a.A a
        return float((float(has_reference) + 2.0 * (a @ along) + a @ gram @ a).clamp(min=0.0).sqrt())

    def solution(a: torch.Tensor, rank: int, norm: float, **more: Any) -> Solution:
        coefficients[active] = a / n
        scale = 1.0 / inner.reference_norm if has_reference else 0.0
        return Solution(coefficients, scale, active, along + gram @ a, rank, norm, **more)

    longest = max_norm * (1.0 + 1e-9)  # a single unit vector has length 1 give or take a rounding
    factor, broken = torch.linalg.cholesky_ex(gram)
    if not int(broken):
        inverse = torch.cholesky_inverse(factor)
        size = float(inverse.norm())
        # 1 / |A^-1|_F bounds the smallest eigenvalue from below, |A|_F the largest from above: nothing is to be cut.
        if size * floor * float(gram.norm()) < 1.0:
            a = torch.cholesky_solve(target[:, None], factor)[:, 0]
            norm = length(a)
            if norm <= longest:
                return solution(a, m, norm, sensitivity=size * math.sqrt(m))

    values, vectors = torch.linalg.eigh(gram)
    first = int((values <= floor * values[-1]).sum())
    projected = vectors.T @ target
    # Drop the eigenvectors of the smallest until it fits.
    cut: tuple[int, ...] = ()
    for kept in range(first, m + 1):
        a = vectors[:, kept:] @ (projected[kept:] / values[kept:])
        norm = length(a)
        if norm <= longest:
            if kept > first:
                # The clients that dominate the dropped directions are the near-duplicates to name.
                share = vectors[:, first:kept].abs().amax(dim=1)
                positions = torch.nonzero(active).flatten()
                cut = tuple(positions[share > 0.5 * share.max()].tolist())
            break
    return solution(a, m - kept, norm, cut=cut)


def _rho(weights: torch.Tensor) -> torch.Tensor:
    total = weights.sum()
    return weights / total if total > 0 else torch.full_like(weights, 1.0 / len(weights))


def craft_direction(
    deltas: torch.Tensor,
    weights: torch.Tensor | Sequence[float],
    reference: torch.Tensor | None = None,
    *,
    min_norm: float = 1e-6,
    rtol: float = 1e-3,
    max_norm: float = 10.0,
    single_client: SingleClient = "formula",
) -> torch.Tensor:
    """Combine the client updates of one group into CRAFT's conflict-free direction.

    ``g = r + U^+ (rho - U r)``, r the unit reference or 0; see the module's head.

    Args:
        deltas: Client displacements ``y_i - x``, shape (m, d), float32 or float64, m >= 1.
        weights: Data weights, >= 0, shape (m,).
        reference: The previous direction, shape (d,), of any length; None or zero for none.
        min_norm: Threshold of ``|delta_i|`` below which a client is inactive.
        rtol: Relative cut-off of singular values.
        max_norm: Bound of ``|g|``, >= 1.
        single_client: What one active client gives: "formula" or "raw".

    Returns:
        g, shape (d,), in the dtype of ``deltas``. The server adds ``server_lr * g``.

    Raises:
        ValueError: Shapes don't match, or a weight is negative or not finite.

    Source: CRAFT, eq. for the reference-anchored pseudo-inverse; solved on the Gram matrix.
    """
    if deltas.ndim != 2 or len(deltas) == 0:
        raise ValueError(f"expected deltas of shape (m, d) with m >= 1, but got {list(deltas.shape)}")
    if reference is not None and reference.shape != deltas.shape[1:]:
        raise ValueError(f"expected a reference of shape {list(deltas.shape[1:])}, but got {list(reference.shape)}")

    def blocks() -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        for columns in column_blocks(deltas.shape[1], len(deltas)):
            yield deltas[:, columns].to(torch.float64), None if reference is None else reference[columns]

    solution = solve(
        products(blocks(), len(deltas)),
        weights,
        min_norm=min_norm,
        rtol=rtol,
        max_norm=max_norm,
        single_client=single_client,
    )
    direction = torch.empty(deltas.shape[1], dtype=torch.float64)
    for columns, (block, previous) in zip(column_blocks(deltas.shape[1], len(deltas)), blocks(), strict=True):
        direction[columns] = combine(solution, solution.deltas @ block, previous)
    return direction.to(deltas.dtype)


def combine(solution: Solution, moved: torch.Tensor, reference: torch.Tensor | None) -> torch.Tensor:
    """Return the direction's columns of one block, shape (c,), float64, from the deltas' combination there."""
    if reference is not None and solution.reference:
        moved += solution.reference * reference.to(torch.float64)
    return moved


def block_columns(rows: int) -> int:
    """How many columns of so many rows are worked on at a time."""
    return min(max(_BLOCK_NUMBERS // max(rows, 1), 1024), BLOCK_COLUMNS)


def column_blocks(width: int, rows: int) -> list[slice]:
    """Cut ``width`` columns into blocks of at most :func:`block_columns`."""
    size = block_columns(rows)
    return [slice(start, min(start + size, width)) for start in range(0, width, size)]
