"""FedSPU: every client trains a random part of each hidden layer of its own full model.

Niu, Dong, Qin, "FedSPU: Personalized Federated Learning for Resource-constrained Devices with Stochastic
Parameter Update", AAAI 2025, https://arxiv.org/abs/2403.11464.

    server     for client i draws max(1, floor(r_i width)) units of every hidden layer and sends the sub-model S_i
               between them: the rows of the chosen units, the columns of the chosen units of the layer before
    client i   P_i[S_i] = what came, then K_i steps by the gradient of the full model P_i, of which P_i[S_i] alone
               moves; sends P_i[S_i]
    server     x <- x + sum_i n_i (P_i - x) / sum_i n_i     number by number, over the clients that sent it; the
               others stay

A sub-model has about r_i^2 of the model's numbers. Units and columns are found in ``fedstrat.aggregation.units``.

Differs from the paper and its code:
* The mean is weighted by examples, as FedAvg's, instead of by numbers of batches. So r = 1 is FedAvg.
* At its first contact a client is sent the whole model, from which P_i starts; after it sub-models alone.
* Gradients aren't masked: what a step moves outside of S_i is put back, so momentum and decay can't move it either.
* Running statistics travel whole, as everywhere here (the code sends those of the chosen channels).
* The columns of a layer behind a flattened convolution are those of its channels' pixels (the code compares them with
  the channels' numbers). Clients don't stop early by their validation loss.
"""

import dataclasses
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from fedstrat.aggregation.groups import group_names
from fedstrat.aggregation.units import Plan, choose, clip_scale, merge, plan, region, shape
from fedstrat.errors import ConfigError, PayloadError
from fedstrat.local.rule import LocalRule, Tensors
from fedstrat.payloads import Broadcast, Params, Payload, Update, check_like
from fedstrat.seeding import rng
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState


@dataclass(frozen=True)
class SubModel(Payload):
    """``units``: layer -> chosen units, int32, ascending; ``sub_model``: each parameter's part between them."""

    units: Mapping[str, torch.Tensor]
    sub_model: Mapping[str, torch.Tensor]
    per_parameter = False

    @override
    def check(self, params: Params) -> None:
        axes = self.check_units(params).axes
        like = {n: torch.empty(shape(p, axes[n], self.units), dtype=p.dtype, device="meta") for n, p in params.items()}
        check_like(self.sub_model, like, "sub-model", owner="the chosen part of the model", finite=True)

    def check_units(self, params: Params) -> Plan:
        """Check the units alone, and return how the model is cut.

        Raises:
            PayloadError: Other layers than the model's, or units that it doesn't have.
        """
        cut = plan(params)
        if set(self.units) != set(cut.widths):
            raise PayloadError(
                f"units: expected the layers {sorted(cut.widths)}, but got {sorted(self.units)}; pass trainable=… to"
                " the strategy, or freeze the same layers on both sides"
            )
        for layer, chosen in self.units.items():
            width = cut.widths[layer]
            fits = chosen.dtype == torch.int32 and chosen.ndim == 1 and (len(chosen) > 0 or width == 0)
            if fits and len(chosen):
                ascending = bool((chosen[1:] > chosen[:-1]).all())  # a difference of int32 could wrap around
                fits = ascending and int(chosen[0]) >= 0 and int(chosen[-1]) < width
            if not fits:
                raise PayloadError(f"units/{layer}: expected ascending int32 units of 0 to {width - 1}")
        return cut


@dataclass(frozen=True)
class SubModelDown(SubModel):
    """As :class:`SubModel`, with an empty ``sub_model`` where the whole model travels."""

    @override
    def check(self, params: Params) -> None:
        if self.sub_model:
            super().check(params)
        else:
            self.check_units(params)


@dataclass(frozen=True, kw_only=True)
class SpuState(ServerState):
    """The model, how often it has changed (from 0), and which clients hold a model of their own."""

    generation: int
    holders: tuple[str, ...]


class FedSPU(FedStrategy[SpuState, SubModel]):
    """About r^2 of FedAvg's bytes for nodes of unequal means, and a personal model per client."""

    payload = SubModel
    sends_model = False
    stateful_clients = True
    evaluate_personal = True
    evaluate_in_train = False  # parts of the model travel, not the model

    ratios: str = hyper(
        default="0.2,0.4,0.6,0.8,1.0", symbol="r", doc="shares of units, in turn to client 0, 1, …; each in (0, 1]"
    )
    ratio_of: Callable[[str], float] | None = hyper(
        default=None, run_config=False, doc="client id -> its share of units, in place of ratios"
    )

    @override
    def check_settings(self) -> None:
        try:
            self._ratios = [float(part) for part in self.ratios.split(",")]
        except ValueError:
            self._ratios = []
        if not self._ratios or not all(0 < r <= 1 for r in self._ratios):
            raise ConfigError(f"FedSPU: expected ratios in (0, 1] with commas between, but got {self.ratios!r}")

    def ratio(self, client: str) -> float:
        """The share of units of one client, r_i."""
        if self.ratio_of is not None:
            ratio = self.ratio_of(client)
            if not 0 < ratio <= 1:
                raise ConfigError(f"FedSPU: expected ratio_of({client!r}) in (0, 1], but got {ratio!r}")
            return ratio
        turn = int(client) if client.isdecimal() else zlib.crc32(client.encode())
        return self._ratios[turn % len(self._ratios)]

    @override
    def init_state(self, params: Params) -> SpuState:
        return SpuState(params=params, generation=0, holders=())

    @override
    def forget(self, state: SpuState, client: str) -> SpuState:
        return dataclasses.replace(state, holders=tuple(c for c in state.holders if c != client))

    def _draw(self, client: str, generation: int) -> np.random.Generator:
        if self.seed is None:
            return rng(0, self.experiment_id, "units", client, generation)
        return rng(self.seed, "units", client, generation)

    @override
    def broadcast(self, state: SpuState, client: str) -> Broadcast[SubModelDown]:
        cut = plan(state.params)
        units = choose(cut.widths, self.ratio(client), self._draw(client, state.generation))
        if client not in state.holders:
            return Broadcast(state.params, SubModelDown(units, {}))
        parts = {n: x[region(x, cut.axes[n], units)] for n, x in state.params.items()}
        return Broadcast(None, SubModelDown(units, parts))

    @override
    def grams(self, state: SpuState, updates: Sequence[Update[SubModel]]) -> dict[str, torch.Tensor]:
        cut = plan(state.params)
        sent = [(u.extra.units, u.extra.sub_model) for u in updates]
        scales = [clip_scale(state.params, *own, cut, self.max_update_norm) for own in sent]

        def products(name: str) -> torch.Tensor:
            x = state.params[name]
            moved = torch.zeros(len(updates), *x.shape, dtype=torch.float64)  # zero outside a client's units
            for row, (units, part), scale in zip(moved, sent, scales, strict=True):
                at = region(x, cut.axes[name], units)
                row[at] = scale * (part[name].to(torch.float64) - x[at].to(torch.float64))
            flat = moved.reshape(len(updates), -1)
            return flat @ flat.T

        groups = group_names(state.params, "layer")
        return {layer: torch.stack([products(n) for n in names]).sum(0) for layer, names in groups.items()}

    @override
    def aggregate(self, state: SpuState, updates: Sequence[Update[SubModel]]) -> SpuState:
        sent = [(u.num_examples, u.extra.units, u.extra.sub_model) for u in updates]
        return SpuState(
            params=merge(state.params, sent, plan(state.params), self.max_update_norm),
            generation=state.generation + 1,
            holders=tuple(dict.fromkeys([*state.holders, *(u.client for u in updates)])),
        )


@dataclass
class FedSPURule(LocalRule[SubModelDown, SubModel]):
    """Trains the chosen part of the personal model; everything else of it stands still."""

    receives = SubModelDown
    keeps_state = True
    sends_model = False

    @override
    def start(self, received: SubModelDown, state: Tensors | None) -> None:
        axes = plan(self.params).axes
        self.units = received.units
        self.regions = {n: region(p, axes[n], received.units) for n, p in self.params.items()}
        with torch.no_grad():
            for name, part in received.sub_model.items():
                self.params[name][self.regions[name]] = part
        self.begun = {n: p.detach().clone() for n, p in self.params.items()}
        self.chosen = {n: torch.zeros_like(p, dtype=torch.bool) for n, p in self.params.items()}
        for name, at in self.regions.items():
            self.chosen[name][at] = True

    @override
    def after_step(self) -> None:
        with torch.no_grad():
            for name, p in self.params.items():
                p.copy_(torch.where(self.chosen[name], p, self.begun[name]))

    @override
    def finish(self) -> tuple[SubModel, Tensors]:
        parts = {n: p.detach()[self.regions[n]] for n, p in self.params.items()}
        return SubModel(self.units, parts), self.personal_model()
