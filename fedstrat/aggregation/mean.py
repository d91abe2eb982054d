"""Weighted means of client displacements, accumulated in float64.

Of large models float32 numbers are subtracted and summed over a few clients in float32, the rest in float64.
"""

from collections.abc import Mapping, Sequence

import torch

from fedstrat.aggregation.gram import Displacements, widened

Tensors = Mapping[str, torch.Tensor]


def normalised(weights: Sequence[float]) -> list[float]:
    """Scale non-negative weights to sum 1; uniform when all are zero."""
    total = sum(weights)
    return [w / total for w in weights] if total > 0 else [1.0 / len(weights)] * len(weights)


def mean_delta(x: torch.Tensor, ys: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return ``sum_i w_i (y_i - x)`` in float64, of x's shape.

    The difference is taken before the sum, so clients that didn't move contribute exactly zero.
    """
    total = torch.zeros(x.shape, dtype=torch.float64)
    base = x.to(torch.float64)
    for y, weight in zip(ys, weights, strict=True):
        total.add_(y.to(torch.float64) - base, alpha=weight)
    return total


def mean_deltas(params: Tensors, clients: Sequence[Tensors], weights: Sequence[float]) -> dict[str, torch.Tensor]:
    """Return ``sum_i w_i (y_i - x)`` for every named tensor, in float64; clients that didn't move contribute zero."""
    return Displacements(params, clients).combined(torch.tensor(weights, dtype=torch.float64), single=True)


def mean_step(
    params: Tensors, clients: Sequence[Tensors], weights: Sequence[float], server_lr: float = 1.0
) -> dict[str, torch.Tensor]:
    """Return ``x + server_lr * sum_i w_i (y_i - x)`` in x's dtypes, without a model in float64 on the way.

    The difference is taken before the sum, so clients that didn't move contribute exactly zero.
    """
    coefficients = server_lr * torch.tensor(weights, dtype=torch.float64)
    return Displacements(params, clients).moved(coefficients, single=True)


def weighted_sum(terms: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return ``sum_i w_i t_i`` in float64."""
    total = torch.zeros(terms[0].shape, dtype=torch.float64)
    for term, weight in zip(terms, weights, strict=True):
        total.add_(term.to(torch.float64), alpha=weight)
    return total


def moved(params: Tensors, direction: Tensors, server_lr: float = 1.0) -> dict[str, torch.Tensor]:
    """Return ``x + server_lr * direction`` in x's dtype, summed in float64."""
    return {
        name: x.to(torch.float64).add(direction[name].to(torch.float64), alpha=server_lr).to(x.dtype)
        for name, x in params.items()
    }


class RunningMean:
    """The weighted mean of models that are added one by one and then let go: two models in float64, however many.

    Args:
        origin: A model that all are near to, whose names they have.
    """

    def __init__(self, origin: Tensors) -> None:
        self._origin, self._weight = origin, 0.0
        self._sums = {n: torch.zeros_like(t, dtype=_summed_in(t)) for n, t in origin.items() if _has_mean(t)}
        self._largest: dict[str, torch.Tensor] = {}

    def add(self, model: Tensors, weight: float) -> None:
        """Add one model; ``weight > 0``."""
        self._weight += weight
        for name, total in self._sums.items():
            total.add_(model[name].to(total.dtype) - widened(self._origin[name]), alpha=weight)
        for name in self._origin.keys() - self._sums.keys():
            seen = [t for t in (self._largest.get(name), model[name]) if t is not None]
            self._largest[name] = torch.stack(seen).amax(0) if seen[0].numel() else seen[0]

    def model(self) -> dict[str, torch.Tensor]:
        """Return the mean in float64, and the maximum of what is an integer; once, as it takes the sums' memory."""
        means = {n: s.div_(self._weight).add_(widened(self._origin[n])) for n, s in self._sums.items()}
        return {n: means[n] if n in means else self._largest[n] for n in self._origin}


def _has_mean(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _summed_in(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def aggregate_buffers(
    buffers: Tensors, clients: Sequence[Tensors], weights: Sequence[float]
) -> dict[str, torch.Tensor]:
    """Aggregate everything that isn't trained, by one rule for all methods.

    Floating (and complex) buffers become the example-weighted mean, integers and booleans the maximum, so counters
    such as ``num_batches_tracked`` keep their dtype. Buffers are never projected, extrapolated or given momentum.
    """
    result = {}
    for name, old in buffers.items():
        values = [client[name] for client in clients]
        if old.is_complex():
            result[name] = sum((w * (v - old) for v, w in zip(values, weights, strict=True)), start=old).to(old.dtype)
        elif old.is_floating_point():
            result[name] = (old.to(torch.float64) + mean_delta(old, values, weights)).to(old.dtype)
        else:
            result[name] = torch.stack([v.contiguous() for v in values]).amax(0) if old.numel() else old
    return result
