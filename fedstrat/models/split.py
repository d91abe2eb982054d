"""Encoder and classifier of a model, for methods that look at its representation."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from fedstrat.errors import ConfigError

Map: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_TOLERANCE = 1e-2
"""Of the comparison with the whole model: loose, so that reduced precision passes."""


class Split(NamedTuple):
    """``model(x) = classify(features(x))``; features have shape (B, …)."""

    features: Map
    classify: Map


def split(model: nn.Module) -> Split:
    """Find the split that a model declares.

    Either by the methods ``features(x)`` and ``classify(z)``, as the built-in models do, or by the submodules
    ``encoder`` and ``classifier``. A projection head belongs to the features.

    Raises:
        ConfigError: It declares neither.
    """
    for names in (("features", "classify"), ("encoder", "classifier")):
        features, classify = (getattr(model, name, None) for name in names)
        if callable(features) and callable(classify):
            return Split(features, classify)
    raise ConfigError(
        f"the model {type(model).__name__} doesn't say where its representation ends; give it methods features(x) and"
        " classify(z) with model(x) = classify(features(x)), or submodules named encoder and classifier"
    )


@torch.no_grad()
def check_split(model: nn.Module, x: torch.Tensor) -> None:
    """Check that the declared split is the model, on one batch and in the model's present mode.

    Raises:
        ConfigError: It isn't, or can't be computed.
    """
    whole = model(x)
    try:
        features, classify = split(model)
        parts = classify(features(x))
        same = parts.shape == whole.shape and torch.allclose(parts, whole, _TOLERANCE, _TOLERANCE, equal_nan=True)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the model {type(model).__name__}: classify(features(x)) can't be computed"
            f" ({type(error).__name__}: {str(error).splitlines()[0]}); it must be what model(x) is"
        ) from error
    if not same:
        raise ConfigError(
            f"the model {type(model).__name__}: expected classify(features(x)) to be model(x), but they differ; correct"
            " the two parts, since methods that look at the representation train through them"
        )
