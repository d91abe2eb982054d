"""FedFV: federated fair averaging.

Wang, Fan, Qi, Wen, Wang, Yu, "Federated Learning with Fair Averaging", IJCAI 2021, https://arxiv.org/abs/2104.14937
(Algorithms 1 to 3).

    client i   F_i = loss at the received x, before training; then as FedAvg; sends y_i, F_i
    server     delta_i = y_i - x
    internal   the clients at positions >= (m - 1)(1 - alpha) in ascending F keep d_i = delta_i (the largest losses);
               every other one starts there, and for all j != i in ascending F:
                   if <delta_j, d_i> < 0:   d_i <- d_i - <delta_j, d_i> / |delta_j|^2 delta_j
               g = mean_i d_i
    external   from round tau on, for k = tau - 1, ..., 0:
                   c = sum of the last delta_j of those clients last seen k rounds ago with <g, delta_j> < 0
                   if <g, c> < 0:   g <- g - <g, c> / |c|^2 c
    length     x <- x + eta_g |mean_i delta_i| g / |g|          eta_g = server_lr

k = 0 are this round's own clients, so tau = 1 needs no memory. With tau > 1 the server keeps the last delta_j of the
clients of tau - 1 rounds.

Differs from the paper: alpha = 0 keeps nobody, as in the authors' code. Updates that are 0 or shorter than float32's
rounding of x (4 eps32 |x|) are never projected on; |g| = 0 gives no step; rounds without replies don't count as rounds.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from typing_extensions import override

from fedstrat.aggregation.gram import Displacements, has_direction, rounding_of
from fedstrat.local.rule import LocalRule
from fedstrat.payloads import Params, Payload, Update
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.history import HistoryState
from fedstrat.strategies.settings import hyper

_TINY = 1e-6
"""Relative length below which a sum of updates that cancel is 0 up to their rounding."""


class FedFV(FedStrategy[HistoryState, Payload]):
    """Projects conflicts between clients away, those of lower loss first. Clients also send their loss at x."""

    needs = ("loss-before",)

    alpha: float = hyper(default=0.1, ge=0.0, le=1.0, symbol="alpha", doc="share of clients, of largest loss, kept")
    tau: int = hyper(default=1, ge=1, symbol="tau", doc="rounds whose clients' conflicts are removed; 1: only this one")
    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="scales the step")

    @override
    def init_state(self, params: Params) -> HistoryState:
        return HistoryState.empty(params)

    @override
    def aggregate(self, state: HistoryState, updates: Sequence[Update[Any]]) -> HistoryState:
        ages = state.absent(updates, self.tau - 1)
        rows = Displacements(state.params, [u.params for u in updates], [state.displacement(c) for c in ages])
        gram = rows.gram()
        usable = has_direction(gram.diagonal().sqrt(), rounding_of(state.params))
        ages_of_rows = torch.tensor([0] * len(updates) + list(ages.values()))

        mean = torch.zeros(len(rows), dtype=torch.float64)
        mean[: len(updates)] = 1.0 / len(updates)
        losses = [u.metrics["loss-before"] for u in updates]
        g, conflicts = self._without_internal_conflicts(losses, gram, usable)
        if state.round + 1 >= self.tau:
            for age in range(self.tau - 1, -1, -1):
                g = _without_external_conflicts(g, gram, usable & (ages_of_rows == age))
        length = _length(mean, gram)
        before = _length(g, gram)
        scale = length / before if before > 0.0 else 0.0
        self.note(conflicts=conflicts, external_rows=len(ages), projected_norm_share=before / length if length else 0.0)
        after = rows.moved(self.server_lr * scale * g)
        return state.after(updates, after, self.tau - 1)

    def _without_internal_conflicts(
        self, losses: Sequence[float], gram: torch.Tensor, usable: torch.Tensor
    ) -> tuple[torch.Tensor, int]:
        """Coefficients of ``mean_i d_i``, and the number of projections."""
        m = len(losses)
        order = sorted(range(m), key=losses.__getitem__)
        kept = set(order[math.ceil((m - 1) * (1.0 - self.alpha)) :]) if self.alpha > 0.0 else set()
        total, projections = torch.zeros(len(gram), dtype=torch.float64), 0
        for i in range(m):
            d = torch.zeros_like(total)
            d[i] = 1.0
            for j in () if i in kept else order:
                inner = float(gram[j] @ d)
                if j != i and inner < 0.0 and bool(usable[j]):
                    d[j] -= inner / float(gram[j, j])
                    projections += 1
            total += d
        return total / m, projections


def _without_external_conflicts(g: torch.Tensor, gram: torch.Tensor, asked: torch.Tensor) -> torch.Tensor:
    """Project g off the sum of those of the ``asked`` rows that conflict with it."""
    conflicting = (asked & (gram @ g < 0.0)).to(torch.float64)
    inner, square = float(g @ gram @ conflicting), _length(conflicting, gram) ** 2
    return g - conflicting * (inner / square) if inner < 0.0 < square else g


def _length(coefficients: torch.Tensor, gram: torch.Tensor) -> float:
    """Length of a combination of rows; 0 where they cancel up to rounding."""
    length = math.sqrt(max(float(coefficients @ gram @ coefficients), 0.0))
    return length if length > _TINY * float(coefficients.abs() @ gram.diagonal().sqrt()) else 0.0


class FedFVRule(LocalRule[None, None]):
    """Plain local training, after the loss at the received model."""

    needs_calls = ("loss_before",)
