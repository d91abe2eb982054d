"""LeNet-like convolutional network.

LeCun, Bottou, Bengio, Haffner: "Gradient-Based Learning Applied to Document Recognition", Proceedings of
the IEEE, 1998 (LeNet-5). Differs from the paper: ReLU for tanh, max pooling for trained subsampling, every
map of the second convolution sees every map of the first, plain linear outputs.
"""

from collections.abc import Sequence

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
