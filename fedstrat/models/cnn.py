"""LeNet-like convolutional network, and the networks of FedCSPACK's experiments.

LeCun, Bottou, Bengio, Haffner: "Gradient-Based Learning Applied to Document Recognition", Proceedings of
the IEEE, 1998 (LeNet-5). Differs from the paper: ReLU for tanh, max pooling for trained subsampling, every
map of the second convolution sees every map of the first, plain linear outputs.

The networks of FedCSPACK (https://arxiv.org/abs/2601.01840) are those of its authors' code, without their dropout, so
that two passes over one batch see the same network. Its network for MNIST is the LeNet-like one.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrat.errors import ConfigError

# Two 5 x 5 convolutions without padding, each with a 2 x 2 pooling behind it, leave one pixel of 16 and
# nothing of fewer; with padding 2, 4 pixels are enough.
SMALLEST_UNPADDED, SMALLEST = 16, 4


class CNN(nn.Module):
    """Two 5 x 5 convolutions (6 and 16 maps) with max pooling, then linear layers of 120, 84 and num_classes.

    44 426 parameters for 1 x 28 x 28 and 62 006 for 3 x 32 x 32 with 10 classes. Images with a side below
    16, such as the 1 x 8 x 8 digits, are padded by 2 in both convolutions.

    Args:
        input_shape: (channels, height, width) of one image, at least 4 x 4 pixels.
        num_classes: Number of outputs, at least 1.

    Raises:
        ConfigError: The shape isn't that of such an image.
    """

    def __init__(self, *, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        if len(input_shape) != 3 or min(input_shape[1:]) < SMALLEST:
            raise ConfigError(
                f"model 'cnn': expected images (channels, height, width) of at least {SMALLEST} x {SMALLEST} "
                f"pixels, but the data have the shape {tuple(input_shape)}; 'mlp' takes any shape"
            )
        channels, *sides = input_shape
        padding = 0 if min(sides) >= SMALLEST_UNPADDED else 2
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=padding)
        self.conv2 = nn.Conv2d(6, 16, 5, padding=padding)
        height, width = (_after(_after(side, padding), padding) for side in sides)
        self.fc1 = nn.Linear(16 * height * width, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch (B, *input_shape) to logits (B, num_classes)."""
        return self.classify(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Map a batch (B, *input_shape) to what the last layer sees, (B, 84)."""
        x = functional.max_pool2d(torch.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(torch.relu(self.conv2(x)), 2)
        x = torch.relu(self.fc1(x.flatten(1)))
        return torch.relu(self.fc2(x))

    def classify(self, z: Tensor) -> Tensor:
        """Map features (B, 84) to logits (B, num_classes)."""
        logits: Tensor = self.fc3(z)
        return logits


def _after(side: int, padding: int) -> int:
    """Pixels along one side after a 5 x 5 convolution and a 2 x 2 pooling."""
    return (side + 2 * padding - 4) // 2


class PlainCNN(nn.Module):
    """Convolutions, each with ReLU and 2 x 2 max pooling behind it, then linear layers.

    Parameters of the networks in the catalogue: ``cnn-fashion`` 100 816 for 1 x 28 x 28 and 10 classes, 103 468 for
    62; ``cnn-emnist`` 3 787 710 for 1 x 28 x 28 and 62 classes; ``cnn-cifar`` 541 094 for 3 x 32 x 32 and 10 classes,
    586 184 for 100.

    Args:
        input_shape: (channels, height, width) of one image.
        num_classes: Number of outputs, at least 1.
        name: Its name in errors.
        maps: Maps of each convolution.
        kernel: Side of every convolution, odd.
        padding: Pixels added on each side before every convolution.
        hidden: Widths of the linear layers before the last.
        active: Whether a ReLU follows, for each of them; the authors' code leaves some out.

    Raises:
        ConfigError: The shape isn't that of an image, or no pixel would be left of it.
    """

    def __init__(
        self,
        *,
        input_shape: Sequence[int],
        num_classes: int,
        name: str,
        maps: Sequence[int],
        kernel: int,
        padding: int,
        hidden: Sequence[int],
        active: Sequence[bool],
    ) -> None:
        super().__init__()
        sides = list(input_shape[1:])
        for _ in maps:
            sides = [(side + 2 * padding - kernel + 1) // 2 for side in sides]
        if len(input_shape) != 3 or min(sides) < 1:
            raise ConfigError(
                f"model '{name}': expected images (channels, height, width) large enough for {len(maps)} convolutions"
                f" and poolings, but the data have the shape {tuple(input_shape)}; 'mlp' takes any shape"
            )
        channels = [input_shape[0], *maps]
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, kernel, padding=padding) for a, b in pairwise(channels))
        widths = [maps[-1] * sides[0] * sides[1], *hidden, num_classes]
        self.layers = nn.ModuleList(nn.Linear(fan_in, fan_out) for fan_in, fan_out in pairwise(widths))
        self.active = tuple(active)

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch (B, *input_shape) to logits (B, num_classes)."""
        return self.classify(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Map a batch (B, *input_shape) to what the last layer sees, (B, its width)."""
        for convolution in self.convolutions:
            x = functional.max_pool2d(torch.relu(convolution(x)), 2)
        x = x.flatten(1)
        *inner, _ = self.layers
        for layer, is_active in zip(inner, self.active, strict=True):
            x = torch.relu(layer(x)) if is_active else layer(x)
        return x

    def classify(self, z: Tensor) -> Tensor:
        """Map features (B, width) to logits (B, num_classes)."""
        logits: Tensor = self.layers[-1](z)
        return logits
