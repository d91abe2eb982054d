"""MOON: model-contrastive federated learning.

Li, He, Song, "Model-Contrastive Federated Learning", CVPR 2021, https://arxiv.org/abs/2103.16257 (Algorithm 1).

    client i   z = R_y(b), z_g = R_x(b), z_p = R_prev(b)       representations of batch b: encoder with projection head
               s_g = cos(z, z_g),  s_p = cos(z, z_p)
               l_con = -log( exp(s_g / tau) / (exp(s_g / tau) + exp(s_p / tau)) ) = log(1 + exp((s_p - s_g) / tau))
               y <- y - eta_l grad [ f_i(y) + mu mean l_con ]  K_i steps from y = x;  x and prev frozen, evaluation mode
               prev <- y_i, once the server has accepted
    server     as FedAvg

The model says where its representation ends: methods features(x) and classify(z), or submodules encoder and classifier.
A batch costs two forward passes more than FedAvg's.

Differs from the paper: at its first participation a client has no previous model; prev = x then, where l_con is log 2
with gradient 0, so the term is left out. prev is that of the last reply which counted (in the paper every reply does),
with its buffers. A representation of length 0 has cosine 0.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from typing_extensions import override

from fedstrat.local.frozen import frozen_copy, own_objective_is_due
from fedstrat.local.rule import PERSONAL, LocalRule, LossFunction, Tensors
from fedstrat.models.split import check_split, split
from fedstrat.strategies.fedavg import FedAvg
from fedstrat.strategies.settings import hyper

_SMALLEST = 1e-8
"""Length below which a representation is 0."""


class MOON(FedAvg):
    """Holds representations near the global model's and away from the client's previous model's."""

    stateful_clients = True

    mu: float = hyper(default=1.0, ge=0.0, symbol="mu", doc="weight of the contrastive term")
    temperature: float = hyper(default=0.5, gt=0.0, symbol="tau", doc="temperature of the contrastive term")
    server_lr = 1.0  # not a setting of MOON
    drop_stragglers = False  # nor this


@dataclass
class MOONRule(LocalRule[None, None]):
    """Adds the contrastive term to the loss; remembers the model that it trained."""

    mu: float
    temperature: float
    keeps_state = True

    @override
    def start(self, received: None, state: Tensors | None) -> None:
        self.before = {n.removeprefix(PERSONAL): t for n, t in (state or {}).items()}
        self.frozen: tuple[torch.nn.Module, torch.nn.Module] | None = None
        self.asked = False

    @override
    def loss(self, model: torch.nn.Module, x: Any, y: Any, loss_fn: LossFunction) -> torch.Tensor:
        if not self.asked:
            self._first(model, x)
        if self.frozen is None:
            return loss_fn(model(x), y)
        features, classify = split(model)
        z = features(x)
        with torch.no_grad():
            z_g, z_p = (split(frozen).features(x) for frozen in self.frozen)
        apart = cosine(z, z_p) - cosine(z, z_g)
        return loss_fn(classify(z), y) + self.mu * functional.softplus(apart / self.temperature).mean()

    def _first(self, model: torch.nn.Module, x: Any) -> None:
        if self.num_steps:
            raise own_objective_is_due("MOON", self.num_steps)
        self.asked = True
        received = frozen_copy(model)
        check_split(received, x)
        if self.mu and self.before:
            self.frozen = received, frozen_copy(model, self.before)

    @override
    def finish(self) -> tuple[None, Tensors]:
        if self.num_steps and not self.asked:
            raise own_objective_is_due("MOON", self.num_steps)
        return None, self.personal_model()


def cosine(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Cosines between the rows of two batches of representations, (B, …) -> (B,), float32 or float64."""
    dtype = torch.float64 if one.dtype == torch.float64 else torch.float32
    a, b = one.flatten(1).to(dtype), other.flatten(1).to(dtype)
    zero = (a.detach().norm(dim=1) < _SMALLEST) | (b.detach().norm(dim=1) < _SMALLEST)
    # A vector of length 0 has no slope either: eps alone would make it 1 / eps.
    return functional.cosine_similarity(a, b, dim=1, eps=_SMALLEST).masked_fill(zero, 0.0)
