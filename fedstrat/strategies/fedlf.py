"""FedLF: layer-wise fair federated learning.

Pan, Li, Yu, Wang, Tang, Zhao, "FedLF: Layer-Wise Fair Federated Learning", AAAI 2024,
https://github.com/zibinpan/FedLF.

    client i   F_i = loss at the received x, before training; then as FedAvg; sends y_i, F_i
    server     delta_i = y_i - x,  per layer l:  mu_l = mean_i |delta_i,l|
    rows Q_l   mu_l delta_i,l / |delta_i,l|                    every client of the round
               mu_l f_l / |f_l|,  f = sum_i h_i delta_i        the fair direction: h = grad_F P of P = -cos(F, 1),
                                                               h = (<F, 1^> F / |F| - |F| 1^) / |F|^2,  1^ = 1 / sqrt(m)
               mu_l delta_j,l / |delta_j,l|                    clients absent now, last seen at most tau rounds ago,
                                                               tau = floor(number of clients seen before / m)
    direction  d_l = lambda Q_l,  lambda = argmin |lambda Q_l|^2 over the simplex
               d_l = 0: layer l is joined with the next one (else the one before), and solved again
    length     x <- x + eta_g |mean_i delta_i| d / |d|         eta_g = server_lr

So <delta_i,l, d_l> >= 0 for every client, and P doesn't grow, in every layer (or joined layers).

Differs from the paper:
* Displacements stand for the gradients (x - y_i) / eta; with one eta for all the step is the same.
* A layer is one parameter tensor, as in the released code; ``grouping`` chooses another. The released code forms f from
  the scaled rows; here it is the gradient of P, as in the paper.
* It leaves out what has no direction: clients that didn't move in a layer (0, or less than float32's rounding of x, 4
  eps32 |x_l|), and f where all losses are equal (h = 0) or the sum cancels. Nobody moved: d_l = 0, nothing is joined.
* d_l counts as 0 where |d_l| <= 1e-5 mu_l, or where it is shorter than the rounding of x_l in its own dtype. The
  products are in float64, so the released code's search for a length that keeps <delta_i, d> above -1e-6 isn't needed.
* What was too old to be used once isn't kept; with cohorts of one size it would never be used again.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from typing_extensions import override

from fedstrat.aggregation.gram import Displacements, has_direction, last_digit_of, rounding_of
from fedstrat.aggregation.groups import group_names
from fedstrat.aggregation.mean import moved
from fedstrat.aggregation.simplex import min_norm_weights
from fedstrat.local.rule import LocalRule
from fedstrat.payloads import Params, Payload, Update
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.craft import Grouping, check_grouping
from fedstrat.strategies.history import HistoryState
from fedstrat.strategies.settings import hyper

_EQUAL = 1e-6
"""Sine of the angle between the losses and 1 below which they are equal up to float32's rounding."""
_STATIONARY = 1e-5
"""|d_l| / mu_l up to which a layer has no common direction."""


@dataclass(frozen=True)
class Layer:
    """One layer, or several that were joined.

    Attributes:
        names: Its parameters.
        gram: Inner products of the rows in it.
        direction: d_l as coefficients of the rows, shape (rows,).
        stationary: Whether clients moved in it, but d_l = 0.
    """

    names: tuple[str, ...]
    gram: torch.Tensor
    direction: torch.Tensor
    stationary: bool


class FedLF(FedStrategy[HistoryState, Payload]):
    """A direction per layer that no client loses by, nor fairness. Clients also send their loss at x."""

    needs = ("loss-before",)

    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="scales the step")
    grouping: Grouping = hyper(default="tensor", doc="which parameters are one layer")

    @override
    def init_state(self, params: Params) -> HistoryState:
        check_grouping(self.grouping, params)
        return HistoryState.empty(params)

    @override
    def aggregate(self, state: HistoryState, updates: Sequence[Update[Any]]) -> HistoryState:
        x, m = state.params, len(updates)
        tau = len(state.last_seen) // m
        ages = state.absent(updates, tau)
        rows = Displacements(x, [u.params for u in updates], [state.displacement(c) for c in ages])
        fair = fair_weights([u.metrics["loss-before"] for u in updates])

        def layer(names: tuple[str, ...], gram: torch.Tensor) -> Layer:
            return Layer(names, gram, *layer_direction(gram, fair, rounding_of(x, names), last_digit_of(x, names)))

        groups = group_names(x, self.grouping)
        layers = [layer(names, rows.gram(names)) for names in groups.values()]
        at = 0
        while at < len(layers):
            if layers[at].stationary and len(layers) > 1:
                at = min(at, len(layers) - 2)
                first, second = layers[at : at + 2]
                layers[at : at + 2] = [layer(first.names + second.names, first.gram + second.gram)]
            else:
                at += 1

        square = sum(float(part.direction @ part.gram @ part.direction) for part in layers)
        mean_square = sum(float(part.gram[:m, :m].sum()) for part in layers) / m**2
        scale = math.sqrt(max(mean_square, 0.0) / square) if square > 0.0 else 0.0
        d = {n: v for part in layers for n, v in rows.combined(part.direction, part.names).items()}
        self.note(layers=len(layers), joined=len(groups) - len(layers), remembered_clients=len(ages))
        seen = {*state.last_seen, *(u.client for u in updates)}
        return state.after(updates, moved(x, d, self.server_lr * scale), len(seen) // m)


def fair_weights(losses: Sequence[float]) -> torch.Tensor:
    """Return h, the gradient of ``-cos(F, 1)`` in F, shape (m,), float64; 0 where all losses are equal."""
    F = torch.tensor(losses, dtype=torch.float64)
    even = torch.full_like(F, 1.0 / math.sqrt(len(F)))
    norm = F.norm()
    if not norm > 0.0:
        return torch.zeros_like(F)
    h = (even @ F) * F / norm**3 - even / norm
    return h if h.norm() * norm > _EQUAL else torch.zeros_like(F)


def layer_direction(
    gram: torch.Tensor, fair: torch.Tensor, rounding: float, last_digit: float
) -> tuple[torch.Tensor, bool]:
    """Solve one layer.

    Args:
        gram: Inner products of this round's m clients and of the remembered ones, in this layer, shape (rows, rows).
        fair: h, shape (m,).
        rounding: Length below which a row has no direction.
        last_digit: Length up to which d_l is nothing but rounding.

    Returns:
        (d_l as coefficients of the rows, whether it is 0 although clients moved).
    """
    m, count = len(fair), len(gram)
    lengths = gram.diagonal().clamp(min=0.0).sqrt()
    usable = has_direction(lengths, rounding)
    nothing = torch.zeros(count, dtype=torch.float64)
    if not bool(usable[:m].any()):
        return nothing, False
    mu = float(lengths[:m].mean())
    scaled = torch.diag(mu / lengths.where(usable, torch.ones_like(lengths)))[usable]
    f = torch.cat([fair, nothing[m:]])
    length = math.sqrt(max(float(f @ gram @ f), 0.0))
    if length > _EQUAL * float(f.abs() @ lengths):
        scaled = torch.cat([scaled, (f * (mu / length))[None]])
    products = scaled @ gram @ scaled.T
    weights = min_norm_weights(products)
    square = float(weights @ products @ weights)
    if square <= max(_STATIONARY * mu, last_digit) ** 2:
        return nothing, True
    return weights @ scaled, False


class FedLFRule(LocalRule[None, None]):
    """Plain local training, after the loss at the received model."""

    needs_calls = ("loss_before",)
