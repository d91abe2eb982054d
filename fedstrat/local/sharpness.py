"""How sharp a loss is around a model: ``F(w + rho g/|g|) - F(w)`` with ``g = grad F(w)``.

The rise of the loss one step of length rho up the steepest slope: what sharpness-aware minimisation keeps small.

Foret, Kleiner, Mobahi, Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving Generalization", ICLR 2021,
https://arxiv.org/abs/2010.01412.
"""

from collections.abc import Iterable
from typing import Any

import torch

from fedstrat.local import loop
from fedstrat.local.rule import LossFunction
from fedstrat.local.sam import perturbed_gradient

RHO = 0.05
"""Radius of the step, that of the paper's experiments."""


def sharpness(model: torch.nn.Module, loader: Iterable[Any], loss_fn: LossFunction, rho: float = RHO) -> float:
    """Return ``F(w + rho g/|g|) - F(w)``, F the mean loss over a loader, in evaluation mode.

    Weights, gradients and the random state are as before afterwards. Costs one gradient and two evaluations. 0 for a
    loader without examples or a model without trainable parameters.

    Args:
        model: The model, at w.
        loader: Yields batches (x, y).
        loss_fn: Mean loss of a batch.
        rho: Radius, >= 0.
    """
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not params:
        return 0.0

    def loss() -> float:
        with loop.same_randomness(loader):
            _, loss_sum, seen = loop.evaluate(model, loop.plain(loader), loss_fn=loss_fn)
        return loss_sum / max(seen, 1)

    losses = [loss()]
    gradient = loop.full_gradient(model, params, loader, loss_fn)
    perturbed_gradient(params, gradient, rho, lambda: losses.append(loss()))
    return losses[-1] - losses[0]
