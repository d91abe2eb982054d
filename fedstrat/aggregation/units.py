"""Sub-models: random units of every hidden layer, and the part of each parameter that lies between them.

A layer is a parameter of two or more dimensions; its units are its rows (output neurons, channels, filters). A
parameter's part of a sub-model has the rows of the chosen units and the columns that belong to the chosen units of the
layer before. The last layer keeps all its rows: a class is never left out.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

Tensors = Mapping[str, torch.Tensor]
Units = Mapping[str, torch.Tensor]
"""Layer -> its chosen units, ascending."""

_ROUNDING = 1e-9


@dataclass(frozen=True)
class Axes:
    """Which layers' units a parameter's first two dimensions follow; None: everything travels.

    Attributes:
        rows: The layer whose units are the rows.
        columns: The layer whose units are the columns.
        spread: Columns of each of those units: a flattened channel of 4 x 4 pixels has 16 in a row.
    """

    rows: str | None = None
    columns: str | None = None
    spread: int = 1


@dataclass(frozen=True)
class Plan:
    """How a model is cut.

    Attributes:
        widths: Hidden layer (named by its parameter) -> number of units, in the model's order.
        axes: Parameter -> what its dimensions follow.
    """

    widths: Mapping[str, int]
    axes: Mapping[str, Axes]


def plan(params: Tensors) -> Plan:
    """Find layers and their inputs by names and shapes.

    A parameter's columns follow the nearest earlier layer that fits: as many units as columns, or, in a matrix, a
    divisor of their number (the layer before was flattened, channel by channel). Where none fits all columns travel:
    in the first layer, and in grouped convolutions. A vector (bias, normalisation) follows its module's layer, else
    the nearest earlier one of its length; the last layer's bias travels whole.

    Args:
        params: Trainable parameters in the model's order; only names and shapes are read.
    """
    layers = [name for name, p in params.items() if p.ndim > 1]
    last = layers[-1] if layers else None
    widths: dict[str, int] = {}
    axes: dict[str, Axes] = {}
    for name, p in params.items():
        earlier = list(reversed(widths))
        if p.ndim > 1:
            before = next((n for n in earlier if _fits(p, widths[n])), None)
            spread = p.shape[1] // widths[before] if before else 1
            axes[name] = Axes(None if name == last else name, before, spread)
            if name != last:
                widths[name] = p.shape[0]
        elif p.ndim == 1 and not (last and _module(name) == _module(last)):
            own = [n for n in earlier if _module(n) == _module(name)]
            axes[name] = Axes(next((n for n in [*own, *earlier] if widths[n] == len(p)), None))
        else:
            axes[name] = Axes()
    return Plan(widths, axes)


def _fits(p: torch.Tensor, width: int) -> bool:
    return width > 0 and (p.shape[1] == width or (p.ndim == 2 and width > 1 and p.shape[1] % width == 0))


def _module(name: str) -> str:
    return name.rpartition(".")[0]


def choose(widths: Mapping[str, int], ratio: float, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    """Draw ``max(1, floor(ratio * width))`` units of every layer without replacement, int32, ascending."""
    chosen = {}
    for layer, width in widths.items():
        count = min(width, max(1, math.floor(ratio * width + _ROUNDING)))
        chosen[layer] = torch.from_numpy(np.sort(rng.permutation(width)[:count]).astype(np.int32))
    return chosen


def region(p: torch.Tensor, axes: Axes, units: Units) -> tuple[torch.Tensor, ...]:
    """Index of a parameter's part of a sub-model: ``p[region]`` has shape (rows, columns, …)."""
    if p.ndim == 0:
        return ()
    rows = torch.arange(p.shape[0], device=p.device) if axes.rows is None else units[axes.rows].long().to(p.device)
    if p.ndim == 1:
        return (rows,)
    if axes.columns is None:
        columns = torch.arange(p.shape[1], device=p.device)
    else:
        first = units[axes.columns].long().to(p.device) * axes.spread
        columns = (first[:, None] + torch.arange(axes.spread, device=p.device)).flatten()
    return rows[:, None], columns


def shape(p: torch.Tensor, axes: Axes, units: Units) -> tuple[int, ...]:
    """The shape of ``p[region(p, axes, units)]``, without a look at p's numbers."""
    if p.ndim == 0:
        return ()
    rows = p.shape[0] if axes.rows is None else len(units[axes.rows])
    if p.ndim == 1:
        return (rows,)
    columns = p.shape[1] if axes.columns is None else len(units[axes.columns]) * axes.spread
    return (rows, columns, *p.shape[2:])


def merge(
    params: Tensors, sent: Sequence[tuple[float, Units, Tensors]], cut: Plan, max_norm: float | None = None
) -> dict[str, torch.Tensor]:
    """Average sub-models: ``x += sum_i n_i (y_i - x) / sum_i n_i`` over those that returned a number, else x.

    Args:
        params: The global model x.
        sent: Per client (n_i, its units, its part of every parameter).
        cut: The model's plan.
        max_norm: Longest ``y_i - x`` of a client over everything that it sent; longer ones are scaled down.

    Returns:
        The new model in x's dtypes, summed in float64.
    """
    scales = [clip_scale(params, units, part, cut, max_norm) for _, units, part in sent]
    result = {}
    for name, x in params.items():
        base = x.to(torch.float64)
        places = [region(x, cut.axes[name], units) for _, units, _ in sent]
        weight = torch.zeros_like(base)
        for (n, _, _), at in zip(sent, places, strict=True):
            weight[at] += n
        step = torch.zeros_like(base)
        for (n, _, part), at, scale in zip(sent, places, scales, strict=True):
            step[at] += (part[name].to(torch.float64) - base[at]) * (scale * n / weight[at])
        result[name] = (base + step).to(x.dtype)
    return result


def clip_scale(params: Tensors, units: Units, part: Tensors, cut: Plan, max_norm: float | None) -> float:
    """Return what brings ``y_i - x`` over a client's part down to at most ``max_norm``; 1 where it is shorter."""
    if max_norm is None:
        return 1.0
    squares = (
        float((part[n].to(torch.float64) - x[region(x, cut.axes[n], units)].to(torch.float64)).square().sum())
        for n, x in params.items()
    )
    norm = math.sqrt(math.fsum(squares))
    return min(1.0, max_norm / norm) if norm > 0 else 1.0
