"""CRAFT: conflict-resolved aggregation for federated training.

arXiv 2605.21317, https://arxiv.org/abs/2605.21317.

    client     as FedAvg
    server     per layer group q, over the active clients A^q = { i : |delta_i| >= tau_q }, delta_i = y_i - x:
               u_i = delta_i / |delta_i|,   rho_i = n_i / sum_A n_j,   r = g_prev / |g_prev|  (0 in the first round)
               g   = r + U^+ (rho - U r)              the point nearest to r with <u_i, g> = rho_i > 0 for all i
               x <- x + eta_g g,   g_prev <- g        eta_g = server_lr

Every group moves by about eta_g |g| in a round, however long the clients' own updates are.

An extension, off by default: with reference = "ema", r = e / |e|, e <- d e + (1 - d) g, d = reference_decay. d = 0 is
the paper's r.

A layer is a module's weight and bias; grouping = "merged" joins a normalisation to the convolution before it, as the
authors' code does for ResNets.

Differs from the paper (delta = y - x and the server adds; the paper negates both):
* tau_q = max(min_norm, 4 eps32 |x^q|): 1e-6 alone is float32 noise in a wide layer.
* U^+ comes from the Gram matrix in float64 and cuts singular values below rtol sigma_max (near-duplicate clients). The
  reference code's cut-off max(m, d) eps32 grows with the layer and drops directions that matter.
* The smallest eigenvalues are dropped until |g| <= max_norm; rtol alone doesn't bound |g|.
* With U of lower rank (duplicates, exact opposites, fewer weights than clients) no g satisfies all clients; the rank
  and min <u_i, g> are reported every round.
* One active client: the formula, r + u (1 - <u, r>); single_client = "raw" applies its raw delta, as the reference.
* Nobody active in a group: the weighted mean of the deltas is applied and the group keeps its g_prev.
* Buffers take no part.
"""

import dataclasses
import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from typing_extensions import override

from fedstrat.aggregation.conflict import Solution, solve
from fedstrat.aggregation.groups import activity_threshold, group_direction, group_names
from fedstrat.aggregation.mean import moved
from fedstrat.payloads import Params, Payload, Update, zeros_like
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState

logger = logging.getLogger("flwr")

Grouping = Literal["layer", "merged", "tensor", "model"] | dict[str, str]


@dataclass(frozen=True, kw_only=True)
class CraftState(ServerState):
    """The model and the previous direction.

    Attributes:
        direction: g_prev (or the running mean e), one tensor per parameter; zero before a group's first step.
    """

    direction: Params


class CRAFT(FedStrategy[CraftState, Payload]):
    """Resolves conflicts between client updates layer by layer. Works with unmodified Flower clients."""

    server_lr: float = hyper(default=0.1, gt=0.0, symbol="eta_g", doc="length of the step per group, times |g|")
    grouping: Grouping = hyper(default="layer", doc="which parameters share one direction")
    min_norm: float = hyper(default=1e-6, ge=0.0, symbol="tau", doc="|delta_i| below which a client is inactive")
    rtol: float = hyper(default=1e-3, ge=0.0, lt=1.0, doc="relative cut-off of singular values of U")
    max_norm: float = hyper(default=10.0, ge=1.0, doc="bound of |g| per group")
    single_client: Literal["formula", "raw"] = hyper(default="formula", doc="what one active client gives")
    reference: Literal["previous", "ema"] = hyper(
        default="previous", doc="what r points along: g_prev or its running mean"
    )
    reference_decay: float = hyper(default=0.9, ge=0.0, lt=1.0, symbol="d", doc="share of the past in the running mean")

    @override
    def init_state(self, params: Params) -> CraftState:
        check_grouping(self.grouping, params)
        return CraftState(params=params, direction=zeros_like(params))

    @override
    def aggregate(self, state: CraftState, updates: Sequence[Update[Any]]) -> CraftState:
        x, weights = state.params, [u.num_examples for u in updates]
        step: dict[str, torch.Tensor] = {}
        remembered = dict(state.direction)
        solutions: dict[str, Solution] = {}
        for group, names in group_names(x, self.grouping).items():
            closed_form = functools.partial(
                solve,
                weights=weights,
                min_norm=activity_threshold(x, names, self.min_norm),
                rtol=self.rtol,
                max_norm=self.max_norm,
                single_client=self.single_client,
            )
            solution, g = group_direction(x, [u.params for u in updates], names, state.direction, closed_form)
            solutions[group] = solution
            step.update(g)
            if bool(solution.active.any()):
                remembered.update({n: self._reference(state.direction[n], g[n]) for n in names})
            if solution.cut:
                clients = ", ".join(updates[i].client for i in solution.cut)
                logger.warning("CRAFT: group '%s': |g| capped at max_norm; near-duplicate clients: %s", group, clients)
        self.note(**conflict_numbers(solutions))
        return dataclasses.replace(state, params=moved(x, step, self.server_lr), direction=remembered)

    def _reference(self, before: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        if self.reference == "ema":
            g = before.double().mul(self.reference_decay).add(g, alpha=1.0 - self.reference_decay)
        return g.to(before.dtype)


def check_grouping(grouping: Grouping, params: Params) -> None:
    """Refuse a mapping that leaves a parameter out, before round 1.

    Raises:
        ConfigError: With the first such name.
    """
    from fedstrat.errors import ConfigError  # noqa: PLC0415

    if isinstance(grouping, Mapping):
        for name in params:
            if name not in grouping:
                raise ConfigError(f"grouping: the mapping has no group for the trainable parameter '{name}'; add it")


def conflict_numbers(solutions: Mapping[str, Solution]) -> dict[str, float]:
    """Rank, smallest inner product and length over groups, for the history."""
    acting = [s for s in solutions.values() if bool(s.active.any())]
    if not acting:
        return {"active_groups": 0}
    return {
        "active_groups": len(acting),
        "min_rank_share": min(s.rank / int(s.active.sum()) for s in acting),
        "min_inner": min(s.min_inner for s in acting),
        "max_direction_norm": max(s.norm for s in acting),
        "capped_groups": sum(bool(s.cut) for s in acting),
    }
