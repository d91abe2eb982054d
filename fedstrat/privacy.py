"""Flower's differential-privacy wrappers and mods: what runs under them, and why everything else is refused.

They clip every ArrayRecord of a reply as if it were the model's weights, and calibrate their noise to the mean of the
clipped updates with equal weights. Neither tells the strategy or the client that it is there, so it is looked for
among the callers: a refusal in round 1 is better than noise that protects nobody.
"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType

import torch

from fedstrat.errors import ConfigError

NO_MEAN = (
    "its server step isn't the plain mean of the clients' clipped updates, so nothing bounds what one client changes,"
    " and the noise would protect nobody; use FedAvg"
)
NO_DELTAS = "update_dtype sends rounded displacements, which it doesn't clip; use update_dtype='model'"
_MODS = ("fixedclipping_mod", "adaptiveclipping_mod", "LocalDpMod")


def wrapper_around() -> str | None:
    """Name of Flower's differential-privacy wrapper that calls this strategy, or None."""
    for frame in _callers():
        kind = type(frame.f_locals.get("self"))
        if any(c.__module__.startswith("flwr.") and c.__name__.startswith("DifferentialPrivacy") for c in kind.__mro__):
            return kind.__name__
    return None


def mod_around() -> str | None:
    """Name of Flower's clipping or noise mod that calls this client, or None."""
    for frame in _callers():
        if ".mod." in str(frame.f_globals.get("__name__", "")):
            for name in (frame.f_code.co_name, type(frame.f_locals.get("self")).__name__):
                if name in _MODS:
                    return name
    return None


def _callers() -> Iterator[FrameType]:
    frame = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def check_private(who: str, algorithm: str, why_not: str | None, model: Mapping[str, torch.Tensor]) -> None:
    """Refuse what a wrapper or mod would make silently wrong.

    Args:
        who: The wrapper or mod.
        algorithm: The algorithm's name.
        why_not: Why the algorithm can't run under it; None where it can.
        model: The arrays that it would clip.

    Raises:
        ConfigError: The algorithm's step, or an array of the model, doesn't stand it.
    """
    if why_not is not None:
        raise ConfigError(f"{algorithm} can't run under {who}: {why_not}")
    for name, tensor in model.items():
        if not tensor.is_floating_point() or tensor.dim() == 0:
            what = "a scalar" if tensor.is_floating_point() else str(tensor.dtype).removeprefix("torch.")
            raise ConfigError(
                f"{who} can't clip '{name}', which is {what}: Flower's clipping is for floating arrays with at least"
                " one dimension; use a model without it (for a counter of BatchNorm: track_running_stats=False, or"
                " GroupNorm)"
            )


def check_equal_weights(who: str, weights: Iterable[float], key: str) -> None:
    """Refuse unequal weights: the noise is calibrated to a mean over equal ones.

    Raises:
        ConfigError: Two clients differ.
    """
    low, *_, high = (*(ordered := sorted(weights)), *ordered[-1:])
    if not math.isclose(low, high):
        raise ConfigError(
            f"{who} calibrates its noise to equal weights, but the clients' '{key}' are {low:g} to {high:g}; let every"
            " client report the same number under another metric, and name it with weighted_by_key=…"
        )
