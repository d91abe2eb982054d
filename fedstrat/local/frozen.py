"""Models that stay as they are, which an objective compares the trained one with."""

import copy
from collections.abc import Mapping

import torch
from torch import nn

from fedstrat.errors import RuleError


def frozen_copy(model: nn.Module, tensors: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
    """Copy a model into one in evaluation mode and without gradients.

    Args:
        model: The model; itself left alone.
        tensors: Entries of its ``state_dict`` to be loaded into the copy; those that aren't named stay the model's.
    """
    frozen = copy.deepcopy(model).requires_grad_(requires_grad=False).eval()
    entries = frozen.state_dict()
    for name, tensor in (tensors or {}).items():
        entries[name].copy_(tensor)
    return frozen


def own_objective_is_due(rule: str, num_steps: int) -> RuleError:
    """The error of a rule whose objective wasn't asked for before the first of ``num_steps`` steps."""
    return RuleError(
        f"{rule} trains on an objective of its own, but {num_steps} steps were taken without it; in your own loop call"
        " optimizer.step(lambda: session.loss(x, y, loss_fn)) for every batch, or use fedstrat.train(…)"
    )
