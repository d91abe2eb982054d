"""The two passes of sharpness-aware minimisation, shared by FedSAM, MoFedSAM, FedVSSAM and their relatives."""

from collections.abc import Callable, Mapping

import torch

from fedstrat.local.rule import global_norm

_TINY = 1e-12


def ascent_scale(direction: list[torch.Tensor], rho: float) -> torch.Tensor:
    """Return ``rho / |d|``, which makes d a perturbation; 0 where ``|d| = 0``."""
    norm = global_norm(direction)
    return torch.where(norm > 0, rho / (norm + _TINY), torch.zeros_like(norm))


def perturbed_gradient(
    params: Mapping[str, torch.nn.Parameter],
    direction: Mapping[str, torch.Tensor],
    rho: float,
    again: Callable[[], None],
) -> None:
    """Replace ``p.grad`` by the gradient at ``y + rho d/|d|``.

    One global norm over all parameters; ``|d| = 0`` gives no perturbation. The weights come back from a saved copy,
    since subtracting the perturbation would leave rounding behind.

    Args:
        params: The parameters, at y.
        direction: d, one tensor per parameter.
        rho: Radius of the perturbation, >= 0.
        again: Evaluates the gradients of the same batch anew.
    """
    if rho == 0.0:
        return
    directions = [direction[n] for n in params]
    weights: list[torch.Tensor] = list(params.values())
    scale = ascent_scale(directions, rho)
    with torch.no_grad():
        saved = [w.detach().clone() for w in weights]
        torch._foreach_add_(weights, torch._foreach_mul(directions, scale))  # noqa: SLF001
    try:
        again()
    finally:
        with torch.no_grad():
            torch._foreach_copy_(weights, saved)
