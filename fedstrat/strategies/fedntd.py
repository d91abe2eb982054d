"""FedNTD: federated not-true distillation.

Lee, Jeong, Shin, Bae, Yun, "Preservation of the Global Knowledge by Not-True Distillation in Federated Learning",
NeurIPS 2022, https://arxiv.org/abs/2106.03097 (Algorithm 1).

    client i   per example of class c:  q = the C - 1 logits of the other classes, of y;  q_g = the same of x
               l_ntd = KL( softmax(q_g / tau) | softmax(q / tau) )
               y <- y - eta_l grad [ f_i(y) + beta tau^2 mean l_ntd ]   K_i steps from y = x;  x frozen, evaluation mode
    server     as FedAvg

The true class's logit gets no gradient from the term. With C = 2 the term is 0. A batch costs one forward pass more
than FedAvg's.

Differs from the paper: nothing. (tau^2 keeps the size of the gradient, as in the authors' code.)
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from typing_extensions import override

from fedstrat.errors import RuleError
from fedstrat.local.frozen import frozen_copy, own_objective_is_due
from fedstrat.local.rule import LocalRule, LossFunction, Tensors
from fedstrat.strategies.fedavg import FedAvg
from fedstrat.strategies.settings import hyper


class FedNTD(FedAvg):
    """Keeps what the global model knows about the classes that a client doesn't see."""

    beta: float = hyper(default=1.0, ge=0.0, symbol="beta", doc="weight of the distillation term")
    temperature: float = hyper(default=1.0, gt=0.0, symbol="tau", doc="temperature of the distillation term")
    server_lr = 1.0  # not a setting of FedNTD
    drop_stragglers = False  # nor this


@dataclass
class FedNTDRule(LocalRule[None, None]):
    """Adds the distillation term to the loss."""

    beta: float
    temperature: float

    @override
    def start(self, received: None, state: Tensors | None) -> None:
        self.received: torch.nn.Module | None = None

    @override
    def loss(self, model: torch.nn.Module, x: Any, y: Any, loss_fn: LossFunction) -> torch.Tensor:
        if self.received is None:
            if self.num_steps:
                raise own_objective_is_due("FedNTD", self.num_steps)
            self.received = frozen_copy(model) if self.beta else model
        logits = model(x)
        task = loss_fn(logits, y)
        if self.beta == 0.0:
            return task
        with torch.no_grad():
            before = self.received(x)
        return task + self.beta * not_true_divergence(logits, before, y, self.temperature)

    @override
    def finish(self) -> tuple[None, None]:
        if self.num_steps and self.received is None:
            raise own_objective_is_due("FedNTD", self.num_steps)
        return None, None


def not_true_divergence(
    logits: torch.Tensor, before: torch.Tensor, labels: torch.Tensor, temperature: float
) -> torch.Tensor:
    """Return ``tau^2 mean KL(softmax(q_g / tau) | softmax(q / tau))`` over the classes that aren't true.

    Args:
        logits: Of the trained model, shape (B, C).
        before: Of the received model, shape (B, C).
        labels: The true classes, integers, shape (B,).
        temperature: tau > 0.

    Raises:
        RuleError: The outputs aren't (B, C), or the labels aren't the classes of B examples.
    """
    if logits.ndim != 2 or labels.shape != logits.shape[:1] or labels.is_floating_point():
        raise RuleError(
            "FedNTD needs outputs of shape (batch, classes) and integer labels of shape (batch,), but got outputs of"
            f" shape {list(logits.shape)} and {labels.dtype} labels of shape {list(labels.shape)}"
        )
    others = torch.ones_like(logits, dtype=torch.bool).scatter_(1, labels[:, None], value=False)
    rest = (len(logits), logits.shape[1] - 1)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    q, q_g = (t[others].reshape(rest).to(dtype) / temperature for t in (logits, before))
    divergence = functional.kl_div(q.log_softmax(1), q_g.log_softmax(1), reduction="batchmean", log_target=True)
    return temperature**2 * divergence
