"""Normalised FedAvgM: a control for methods whose steps have a fixed length.

No paper. CRAFT moves every layer group by about server_lr in a round, however long the clients' updates are, and its
reference direction acts as a momentum. This has both and no conflict resolution, so what CRAFT gains over it isn't owed
to the length of its steps.

    client     as FedAvg
    server     per layer group q, D = sum_i p_i (y_i - x):              p_i = n_i / sum_{j in S} n_j
               u = D / |D|
               m <- beta m + u                                          beta = momentum, m = 0 before round 1
               x <- x + eta_g m / |m|                                   length = "unit";  eta_g = server_lr
               x <- x + eta_g m                                         length = "momentum": up to eta_g / (1 - beta)

A group with |D| < tau = max(min_norm, 4 eps32 |x^q|) has no direction: D is applied as it is and m stays, as in CRAFT.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from typing_extensions import override

from fedstrat.aggregation.groups import activity_threshold, group_names
from fedstrat.aggregation.mean import mean_deltas, moved, normalised
from fedstrat.local.rule import global_norm
from fedstrat.payloads import Params, Payload, Update, state_dtype, zeros_like
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.craft import Grouping, check_grouping
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState


@dataclass(frozen=True, kw_only=True)
class NormalisedFedAvgMState(ServerState):
    """The model and its momentum.

    Attributes:
        momentum: m, one tensor per parameter, a sum of unit vectors per group.
    """

    momentum: Params


class NormalisedFedAvgM(FedStrategy[NormalisedFedAvgMState, Payload]):
    """FedAvgM whose update has unit length in every layer group. Works with unmodified Flower clients."""

    steps_by_mean = True

    momentum: float = hyper(default=0.9, ge=0.0, lt=1.0, symbol="beta", doc="server momentum")
    server_lr: float = hyper(default=0.1, gt=0.0, symbol="eta_g", doc="length of the step per group")
    length: Literal["unit", "momentum"] = hyper(default="unit", doc="whether the step or only the update has length 1")
    grouping: Grouping = hyper(default="layer", doc="which parameters share one length")
    min_norm: float = hyper(default=1e-6, ge=0.0, symbol="tau", doc="|D| below which a group has no direction")

    @override
    def init_state(self, params: Params) -> NormalisedFedAvgMState:
        check_grouping(self.grouping, params)
        return NormalisedFedAvgMState(params=params, momentum=zeros_like(params))

    @override
    def aggregate(self, state: NormalisedFedAvgMState, updates: Sequence[Update[Any]]) -> NormalisedFedAvgMState:
        x, p = state.params, normalised([u.num_examples for u in updates])
        step = mean_deltas(x, [u.params for u in updates], p)
        momentum, lengths = dict(state.momentum), []
        for names in group_names(x, self.grouping).values():
            length = float(global_norm([step[n] for n in names]))
            if length == 0.0 or length < activity_threshold(x, names, self.min_norm):
                continue
            lengths.append(length)
            m = {n: state.momentum[n].double().mul(self.momentum).add(step[n], alpha=1.0 / length) for n in names}
            norm = float(global_norm(list(m.values())))
            scale = 1.0 / norm if self.length == "unit" and norm > 0.0 else 1.0
            step.update({n: v * scale for n, v in m.items()})
            momentum.update({n: v.to(state_dtype(x[n])) for n, v in m.items()})
        self.note(active_groups=len(lengths), max_update_norm=max(lengths, default=0.0))
        return dataclasses.replace(state, params=moved(x, step, self.server_lr), momentum=momentum)
