"""ResNet-18 for small images, with group normalisation.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016, https://arxiv.org/abs/1512.03385,
table 1. Differs from the paper: the first convolution is 3 x 3 with stride 1 and there is no max pooling behind it,
the usual change for images of 32 x 32; every batch normalisation is a GroupNorm with two groups, as in the public
simulators whose protocol FedVSSAM's experiments follow, so that a model has no running statistics.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedstrat.models.resnet import check_images

WIDTHS = (64, 128, 256, 512)
NORM_GROUPS = 2


class Block(nn.Module):
    """Two 3 x 3 convolutions, each with its norm; a 1 x 1 one with a norm where the shape changes (option B)."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(NORM_GROUPS, fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(NORM_GROUPS, fan_out)
        self.shortcut = nn.Sequential()
        if stride > 1 or fan_in != fan_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False), nn.GroupNorm(NORM_GROUPS, fan_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, fan_in, H, W) to (B, fan_out, ceil(H / stride), ceil(W / stride))."""
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        return torch.relu(out + self.shortcut(x))


class ResNet18(nn.Module):
    """A convolution, four stages of two blocks, mean over the pixels, a linear layer.

    11 173 962 parameters with 3 input channels and 10 classes. Convolutions start Kaiming-normal (fan-out), the
    linear layer as PyTorch's does.

    Args:
        input_shape: (channels, height, width) of one image.
        num_classes: Number of outputs, at least 1.

    Raises:
        ConfigError: The shape isn't that of an image.
    """

    def __init__(self, *, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        check_images("resnet18", input_shape)
        self.conv1 = nn.Conv2d(input_shape[0], WIDTHS[0], 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(NORM_GROUPS, WIDTHS[0])
        fans_in = (WIDTHS[0], *WIDTHS[:-1])
        self.stages = nn.Sequential(
            *(
                nn.Sequential(Block(fan_in, width, 1 if index == 0 else 2), Block(width, width, 1))
                for index, (fan_in, width) in enumerate(zip(fans_in, WIDTHS, strict=True))
            )
        )
        self.linear = nn.Linear(WIDTHS[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch (B, channels, height, width) to logits (B, num_classes)."""
        return self.classify(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Map a batch (B, channels, height, width) to the mean over the pixels that the last layer sees, (B, 512)."""
        x = torch.relu(self.norm1(self.conv1(x)))
        pixels: Tensor = self.stages(x)
        return pixels.mean(dim=(2, 3))

    def classify(self, z: Tensor) -> Tensor:
        """Map features (B, 512) to logits (B, num_classes)."""
        logits: Tensor = self.linear(z)
        return logits
