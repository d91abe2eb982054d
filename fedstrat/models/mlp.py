"""Multilayer perceptron."""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn

from fedstrat.errors import ConfigError


class MLP(nn.Module):
    """Fully connected layers with ReLU between them; inputs of any shape are flattened.

    ``input_shape=(784,), hidden=(200, 200), num_classes=62`` has 209 662 parameters; ``hidden=()`` is softmax
    regression.

    Args:
        input_shape: Shape of one example, without the batch axis.
        num_classes: Number of outputs, at least 1.
        hidden: Widths of the hidden layers, each at least 1.

    Raises:
        ConfigError: A width below 1.
    """

    def __init__(self, *, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = ()) -> None:
        super().__init__()
        if any(width < 1 for width in hidden):
            raise ConfigError(
                f"model 'mlp': expected hidden widths of at least 1, but got {tuple(hidden)}; "
                "leave hidden empty for no hidden layer"
            )
        widths = [prod(input_shape), *hidden, num_classes]
        self.layers = nn.ModuleList(nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch (B, *input_shape) to logits (B, num_classes)."""
        return self.classify(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Map a batch (B, *input_shape) to what the last layer sees, (B, its width)."""
        x = x.flatten(1) if x.ndim > 1 else x.unsqueeze(1)
        *inner, _ = self.layers
        for layer in inner:
            x = torch.relu(layer(x))
        return x

    def classify(self, z: Tensor) -> Tensor:
        """Map features (B, width) to logits (B, num_classes)."""
        logits: Tensor = self.layers[-1](z)
        return logits
