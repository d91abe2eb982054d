"""ConFIG: conflict-free gradients, as a federated aggregator.

Liu, Chu, Thuerey, "ConFIG: Towards Conflict-free Training of Physics Informed Neural Networks", ICLR 2025,
https://arxiv.org/abs/2408.11104.

    client     as FedAvg
    server     per group, u_i = delta_i / |delta_i|,  w_i = p_i ("examples") or 1/m ("equal"):
               b = U^+ w,   b^ = b / |b|
               g = (sum_i w_i <delta_i, b^>) b^               length = "projection"
               g = b                                          length = "raw"
               g = (sum_i w_i |delta_i|) b^                   length = "mean_norm"
               x <- x + eta_g g                               eta_g = server_lr

This is CRAFT's closed form with a zero reference, and its guards (min_norm 1e-6, rtol 1e-3, max_norm 10 before the
length rule).

Differs from the paper: updates of clients instead of gradients of loss terms, per layer group instead of the whole
model (grouping = "model" for that). The paper's projection length sums <delta_i, b^> over the terms with weight 1,
which grows with the number of clients; here the weights sum to 1.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal

import torch
from typing_extensions import override

from fedstrat.aggregation.conflict import Products, Solution, solve
from fedstrat.aggregation.groups import activity_threshold, group_direction, group_names
from fedstrat.aggregation.mean import moved, normalised
from fedstrat.payloads import Params, Payload, Update
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.craft import Grouping, check_grouping, conflict_numbers
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState

_MIN_NORM = 1e-6


class ConFIG(FedStrategy[ServerState, Payload]):
    """Conflict-free direction without a memory. Works with unmodified Flower clients."""

    server_lr: float = hyper(default=1.0, gt=0.0, symbol="eta_g", doc="scales the server's step")
    length: Literal["projection", "raw", "mean_norm"] = hyper(default="projection", doc="rule for the step's length")
    weights: Literal["examples", "equal"] = hyper(default="examples", symbol="w", doc="weight of a client")
    grouping: Grouping = hyper(default="layer", doc="which parameters share one direction")

    @override
    def init_state(self, params: Params) -> ServerState:
        check_grouping(self.grouping, params)
        return ServerState(params=params)

    @override
    def aggregate(self, state: ServerState, updates: Sequence[Update[Any]]) -> ServerState:
        x = state.params
        w = normalised([u.num_examples if self.weights == "examples" else 1.0 for u in updates])
        step: dict[str, torch.Tensor] = {}
        solutions: dict[str, Solution] = {}
        for group, names in group_names(x, self.grouping).items():
            threshold = activity_threshold(x, names, _MIN_NORM)
            closed_form = functools.partial(self._solve, w=torch.tensor(w, dtype=torch.float64), min_norm=threshold)
            solutions[group], g = group_direction(x, [u.params for u in updates], names, None, closed_form)
            step.update(g)
        self.note(**conflict_numbers(solutions))
        return dataclasses.replace(state, params=moved(x, step, self.server_lr))

    def _solve(self, inner: Products, w: torch.Tensor, min_norm: float) -> Solution:
        b = solve(inner, w, min_norm=min_norm)
        if self.length == "raw" or not bool(b.active.any()) or b.norm == 0.0:
            return b
        norms = inner.deltas.diagonal().clamp(min=0.0).sqrt()
        if self.length == "projection":
            length = (
                float(w[b.active] @ (norms[b.active] * b.inner)) / b.norm
            )  # <delta_i, b^> = |delta_i| <u_i, b> / |b|
        else:
            length = float(w[b.active] @ norms[b.active])
        scale = length / b.norm
        return dataclasses.replace(b, deltas=b.deltas * scale, inner=b.inner * scale, norm=abs(length))
