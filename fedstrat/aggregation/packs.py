"""Packs of FedCSPACK: cutting parameters into packs, choosing and weighting them, putting them together.

All parameters, flattened in order and padded with zeros, form P = ceil(d / B) packs of B numbers. With w_j a client's
and x_j the global values of pack j:

    theta_j = cos(w_j, x_j),   theta_a = cos(w, x)        candidates  C = { j : theta_j < theta_a }
    kappa_j = KL( softmax(x_j / T) || softmax(w_j / T) )  >= 0
    M_j     = |kappa_j + theta_j| ("dual"), |theta_j| ("cosine"), |kappa_j| ("kl"), at least 1e-12
    x_j    += sum_i M_ij (w_ij - x_j) / sum_i M_ij        where somebody sent pack j; all other packs keep x_j

Inner products are summed in float64: in float32 a model of 11 million weights gets a tenth of its packs wrong.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fedstrat.aggregation.conflict import block_columns
from fedstrat.aggregation.device import lent, zeros

Tensors = Mapping[str, torch.Tensor]
Weights = Literal["dual", "cosine", "kl", "full"]

_TINY_NORM = 1e-8
_TINY_WEIGHT = 1e-12
_CHUNK_NUMBERS = 1 << 14
"""Numbers that are in float64 at one time: few enough for the cache, and for memory to be taken again."""


def num_packs(size: int, pack_size: int) -> int:
    """Return P = ceil(d / B)."""
    return -(-size // pack_size)


def to_packs(params: Tensors, pack_size: int) -> torch.Tensor:
    """Flatten parameters in order, pad with zeros and cut; a copy, shape (P, B)."""
    flat = [p.detach().reshape(-1) for p in params.values()]
    padding = -sum(len(part) for part in flat) % pack_size
    return torch.cat([*flat, flat[0].new_zeros(padding)]).reshape(-1, pack_size)


def from_packs(packs: torch.Tensor, like: Tensors) -> dict[str, torch.Tensor]:
    """Undo :func:`to_packs`: views of the packs with the shapes of ``like``, in its dtypes."""
    flat, start = packs.reshape(-1), 0
    params = {}
    for name, p in like.items():
        params[name] = flat[start : start + p.numel()].reshape(p.shape).to(p.dtype)
        start += p.numel()
    return params


@dataclass(frozen=True)
class Selection:
    """The packs a client sends.

    Attributes:
        index: Ascending pack numbers, int32, shape (K,).
        weight: M_j > 0, float32, shape (K,).
    """

    index: torch.Tensor
    weight: torch.Tensor


def select(
    w: torch.Tensor,
    x: torch.Tensor,
    *,
    top_k: int | None = None,
    keep_ratio: float | None = None,
    weights: Weights = "dual",
    kl_temperature: float = 1.0,
) -> Selection:
    """Choose and weight the packs to send.

    Args:
        w: The client's packs, shape (P, B).
        x: The global packs as the client knows them, shape (P, B).
        top_k: Send at most the K candidates with the smallest theta (ties: the lower number); None: all.
        keep_ratio: The same with K = ceil(ratio P); in (0, 1]. Not both.
        weights: What M_j is; "full" sends all packs with weight 1.
        kl_temperature: T > 0; a smaller one lets kappa count more.

    Returns:
        The selection; it may be empty, for example when w = x, or with a single pack.
    """
    count = len(x)
    if weights == "full":
        everything = torch.arange(count, dtype=torch.int32, device=x.device)
        return Selection(everything, torch.ones(count, dtype=torch.float32, device=x.device))
    theta, theta_all = cosines(w, x)
    candidates = torch.nonzero(theta < theta_all).flatten()
    if keep_ratio is not None:
        top_k = math.ceil(keep_ratio * count)
    if top_k is not None and len(candidates) > top_k:
        order = torch.sort(theta[candidates], stable=True).indices[:top_k]
        candidates = candidates[order].sort().values
    m = torch.zeros(len(candidates), dtype=torch.float64, device=x.device)
    if weights in ("dual", "kl"):
        m += divergences(w, x, candidates, kl_temperature)
    if weights in ("dual", "cosine"):
        m += theta[candidates]
    return Selection(candidates.to(torch.int32), m.abs().clamp(min=_TINY_WEIGHT).to(torch.float32))


def cosines(w: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (theta of every pack, shape (P,); theta_a of the whole vector), float64.

    ``cos(a, b) = <a, b> / (max(|a|, 1e-8) max(|b|, 1e-8))``; a pack that is zero in both has cosine 1: there is nothing
    to say about it.
    """
    dot, ww, xx = (torch.empty(len(x), dtype=torch.float64, device=x.device) for _ in range(3))
    for some_w, some_x, *sums in zip(*(_chunks(t, x.shape[1]) for t in (w, x, dot, ww, xx)), strict=True):
        a, b = some_w.to(torch.float64), some_x.to(torch.float64)
        for result, (left, right) in zip(sums, ((a, b), (a, a), (b, b)), strict=True):
            torch.linalg.vecdot(left, right, out=result)
    theta = torch.where((ww == 0) & (xx == 0), torch.ones_like(dot), _cosine(dot, ww, xx))
    return theta, _cosine(dot.sum(), ww.sum(), xx.sum())


def _chunks(packs: torch.Tensor, pack_size: int) -> tuple[torch.Tensor, ...]:
    """Views of so many packs, or of numbers one a pack, as are computed at one time."""
    return torch.split(packs, max(_CHUNK_NUMBERS // pack_size, 1))


def _cosine(dot: torch.Tensor, ww: torch.Tensor, xx: torch.Tensor) -> torch.Tensor:
    # One root of the product, not two: sqrt(s s) = s exactly, so equal vectors have cosine 1 and none is below it.
    return dot / (ww.clamp(min=_TINY_NORM**2) * xx.clamp(min=_TINY_NORM**2)).sqrt()


def divergences(w: torch.Tensor, x: torch.Tensor, index: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return ``KL(softmax(x_j / T) || softmax(w_j / T))`` of packs ``index``, shape (K,), float64, padding included."""
    kappa = torch.empty(len(index), dtype=torch.float64, device=x.device)
    for rows, result in zip(*(_chunks(t, x.shape[1]) for t in (index, kappa)), strict=True):
        a, b = (packs.index_select(0, rows).to(torch.float64) for packs in (x, w))
        if temperature != 1.0:
            a, b = a / temperature, b / temperature
        difference = a.log_softmax(1).sub_(b.log_softmax(1))
        torch.sum(a.softmax(1).mul_(difference), 1, out=result)
    return kappa.clamp(min=0.0)


def clip(
    x: torch.Tensor,
    index: torch.Tensor,
    weight: torch.Tensor,
    value: torch.Tensor,
    *,
    max_norm: float,
    content: Literal["delta", "weights"],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Scale what a client's packs move down to at most ``max_norm``; arguments and result as of :func:`merge`."""
    at = x[index.long()].to(torch.float64) if content == "weights" else torch.zeros(())
    moved = value.to(torch.float64) - at
    norm = float(moved.norm())
    return (index, weight, value) if norm <= max_norm else (index, weight, at + moved * (max_norm / norm))


def merge(
    x: torch.Tensor,
    sent: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    content: Literal["delta", "weights"],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Put the clients' packs together.

    Args:
        x: Global packs, shape (P, B).
        sent: Per client (index (K,), weight (K,), value (K, B)).
        content: Whether values are ``w_j - x_j`` or ``w_j``.

    Returns:
        (new global packs in x's dtype, which packs changed, shape (P,), bool).
    """
    total = torch.zeros(len(x), dtype=torch.float64)
    for index, weight, _ in sent:
        total.index_add_(0, index.long(), weight.to(torch.float64))
    changed = total > 0
    rows = torch.nonzero(changed).flatten()
    row_of = torch.zeros(len(x), dtype=torch.int64)
    row_of[rows] = torch.arange(len(rows))
    accumulated = torch.zeros(len(rows), x.shape[1], dtype=torch.float64)
    for index, weight, value in sent:
        share = weight.to(torch.float64) / total[index.long()]
        accumulated.index_add_(0, row_of[index.long()], value.to(torch.float64) * share[:, None])
    moved = x.clone()
    base = x[rows].to(torch.float64) if content == "delta" else 0.0
    moved[rows] = (accumulated + base).to(x.dtype)
    return moved, changed


def gram(
    x: torch.Tensor,
    sent: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    *,
    content: Literal["delta", "weights"],
) -> torch.Tensor:
    """Return the inner products of what the clients' packs move, zero where a pack wasn't sent, (m, m), float64.

    Args:
        x: Global packs, shape (P, B).
        sent: Per client (index (K,), weight (K,), value (K, B)); weights play no part.
        content: Whether values are ``w_j - x_j`` or ``w_j``.
    """
    products = zeros(len(sent), len(sent))
    chunk = max(1, block_columns(len(sent)) // x.shape[1])
    for start in range(0, len(x), chunk):
        at = x[start : start + chunk].to(torch.float64)
        block = torch.zeros(len(sent), *at.shape, dtype=torch.float64)
        for row, (index, _, value) in zip(block, sent, strict=True):
            here = (index >= start) & (index < start + len(at))
            places = index[here].long() - start
            row[places] = value[here].to(torch.float64) - (at[places] if content == "weights" else 0.0)
        rows = lent(block.flatten(1))
        products.addmm_(rows, rows.T)
    return products.cpu()
