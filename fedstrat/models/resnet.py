"""Residual networks for small images, ResNet-20 to ResNet-110, with group normalisation.

He, Zhang, Ren, Sun: "Deep Residual Learning for Image Recognition", CVPR 2016, https://arxiv.org/abs/1512.03385,
section 4.2. Differs from the paper: every batch normalisation is a GroupNorm with one group, so that a model
has no running statistics that clients would have to share, and no output depends on the rest of the batch.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedstrat.errors import ConfigError

WIDTHS = (16, 32, 64)


def check_images(model: str, input_shape: Sequence[int]) -> None:
    """Refuse inputs that aren't images.

    Raises:
        ConfigError: The shape isn't (channels, height, width).
    """
    if len(input_shape) != 3:
        raise ConfigError(
            f"model '{model}': expected images (channels, height, width), "
            f"but the data have the shape {tuple(input_shape)}; 'mlp' takes any shape"
        )


class Block(nn.Module):
    """Two 3 x 3 convolutions, each with its norm, and an identity shortcut without parameters (option A).

    Where the block halves the image, the shortcut takes every second pixel and adds zero channels, half of
    the new ones on either side.
    """

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.side_channels = (fan_out - fan_in) // 2
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(1, fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(1, fan_out)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, fan_in, H, W) to (B, fan_out, ceil(H / stride), ceil(W / stride))."""
        out = torch.relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.stride > 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.side_channels:
            x = functional.pad(x, (0, 0, 0, 0, self.side_channels, self.side_channels))
        return torch.relu(out + x)


class ResNet(nn.Module):
    """ResNet-(6n+2): a convolution, three stages of n blocks, mean over the pixels, a linear layer.

    The stages have 16, 32 and 64 channels. Convolutions and the linear layer start Kaiming-normal (fan-in).
    With 3 input channels and 10 classes there are 269 722 parameters (ResNet-20), 853 018 (56) or
    1 727 962 (110).

    Args:
        depth: 6n + 2 for some n >= 1.
        input_shape: (channels, height, width) of one image.
        num_classes: Number of outputs, at least 1.

    Raises:
        ConfigError: The depth isn't 6n + 2, or the shape isn't that of an image.
    """

    def __init__(self, *, depth: int, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ConfigError(f"ResNet: expected a depth of 6n + 2 (8, 14, 20, …), but got {depth}")
        check_images(f"resnet{depth}", input_shape)
        self.conv1 = nn.Conv2d(input_shape[0], WIDTHS[0], 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(1, WIDTHS[0])
        repeats = (depth - 2) // 6
        self.stage1 = _stage(WIDTHS[0], WIDTHS[0], repeats, stride=1)
        self.stage2 = _stage(WIDTHS[0], WIDTHS[1], repeats, stride=2)
        self.stage3 = _stage(WIDTHS[1], WIDTHS[2], repeats, stride=2)
        self.linear = nn.Linear(WIDTHS[2], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch (B, channels, height, width) to logits (B, num_classes)."""
        return self.classify(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Map a batch (B, channels, height, width) to the mean over the pixels that the last layer sees, (B, 64)."""
        x = torch.relu(self.norm1(self.conv1(x)))
        x = self.stage3(self.stage2(self.stage1(x)))
        return x.mean(dim=(2, 3))

    def classify(self, z: Tensor) -> Tensor:
        """Map features (B, 64) to logits (B, num_classes)."""
        logits: Tensor = self.linear(z)
        return logits


def _stage(fan_in: int, fan_out: int, repeats: int, *, stride: int) -> nn.Sequential:
    first = Block(fan_in, fan_out, stride)
    return nn.Sequential(first, *(Block(fan_out, fan_out, 1) for _ in range(repeats - 1)))
