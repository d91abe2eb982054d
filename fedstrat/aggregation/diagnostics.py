"""Do the clients pull together? Numbers about a round's updates, all from their inner products.

With displacements ``delta_i = y_i - x`` of m clients and the Gram matrix ``G = (<delta_i, delta_j>)``:

    conflict rate   share of client pairs with <delta_i, delta_j> < 0
    cosines         <delta_i, delta_j> / (|delta_i| |delta_j|), the smallest and the mean over pairs
    rank            rank of the unit rows, singular values up to 1e-3 of the largest left out
    drift           |delta_i|, mean and largest
"""

from collections.abc import Mapping

import torch

_RTOL = 1e-3


def agreement(gram: torch.Tensor, smallest: float = 0.0) -> dict[str, float]:
    """Tell how far updates point the same way.

    Args:
        gram: Inner products, shape (m, m), float64.
        smallest: Length from which an update has a direction; see ``gram.rounding_of``. Shorter ones are left out.

    Returns:
        ``conflict_rate``, ``min_cosine``, ``mean_cosine`` and ``rank``; empty with fewer than two updates that have
        a direction, and where products overflowed.
    """
    lengths = gram.diagonal().clamp(min=0.0).sqrt()
    active = (lengths > 0.0) & (lengths >= smallest)
    count = int(active.sum())
    if count < 2 or not bool(torch.isfinite(gram).all()):
        return {}
    unit = gram[active][:, active] / torch.outer(lengths[active], lengths[active])
    above = torch.triu_indices(count, count, offset=1)
    cosines = unit[above[0], above[1]].clamp(-1.0, 1.0)
    values = torch.linalg.eigvalsh(unit)
    return {
        "conflict_rate": float((cosines < 0.0).double().mean()),
        "min_cosine": float(cosines.min()),
        "mean_cosine": float(cosines.mean()),
        "rank": int((values > max(_RTOL**2, count * torch.finfo(torch.float64).eps) * values[-1]).sum()),
    }


def drift(gram: torch.Tensor) -> dict[str, float]:
    """Return ``drift_mean`` and ``drift_max``, the mean and the largest ``|delta_i|``."""
    lengths = gram.diagonal().clamp(min=0.0).sqrt()
    return {"drift_mean": float(lengths.mean()), "drift_max": float(lengths.max())}


def whole(grams: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the inner products over all layers: those of the layers, added."""
    return torch.stack(list(grams.values())).sum(0)
