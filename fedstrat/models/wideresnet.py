"""Wide residual networks for small images, with group normalisation.

Zagoruyko, Komodakis: "Wide Residual Networks", BMVC 2016, https://arxiv.org/abs/1605.07146. Differs from the paper:
every batch normalisation is a GroupNorm with two groups (the published settings for federated runs don't say how
many; two as in ResNet-18 there), and there is no dropout, which the paper leaves out for its plain WRN too.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedstrat.errors import ConfigError
from fedstrat.models.resnet import check_images

STEM = 16
NORM_GROUPS = 2


class Block(nn.Module):
    """Pre-activation block: norm, ReLU, 3 x 3 convolution, twice; a 1 x 1 convolution where the shape changes."""

    def __init__(self, fan_in: int, fan_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(NORM_GROUPS, fan_in)
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(NORM_GROUPS, fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(fan_in, fan_out, 1, stride=stride, bias=False) if fan_in != fan_out else None

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, fan_in, H, W) to (B, fan_out, ceil(H / stride), ceil(W / stride))."""
        active = torch.relu(self.norm1(x))
        out: Tensor = self.conv2(torch.relu(self.norm2(self.conv1(active))))
        return out + (x if self.shortcut is None else self.shortcut(active))


class WideResNet(nn.Module):
    """WRN-(6n+4)-k: a convolution, three stages of n blocks of 16k, 32k and 64k channels, norm, mean, linear layer.

    WRN-28-4 has 5 872 180 parameters with 3 input channels and 100 classes, 5 849 050 with 10. Convolutions start
    Kaiming-normal (fan-out), the linear layer as PyTorch's does.

    Args:
        depth: 6n + 4 for some n >= 1.
        widen: k, the factor on the number of channels, at least 1.
        input_shape: (channels, height, width) of one image.
        num_classes: Number of outputs, at least 1.

    Raises:
        ConfigError: The depth isn't 6n + 4, or the shape isn't that of an image.
    """

    def __init__(self, *, depth: int, widen: int, input_shape: Sequence[int], num_classes: int) -> None:
        super().__init__()
        if depth < 10 or depth % 6 != 4:
            raise ConfigError(f"WideResNet: expected a depth of 6n + 4 (10, 16, 22, …), but got {depth}")
        check_images(f"wrn{depth}-{widen}", input_shape)
        repeats = (depth - 4) // 6
        widths = [STEM * widen * 2**stage for stage in range(3)]
        self.conv1 = nn.Conv2d(input_shape[0], STEM, 3, padding=1, bias=False)
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    Block(fan_in, width, 1 if stage == 0 else 2),
                    *(Block(width, width, 1) for _ in range(repeats - 1)),
                )
                for stage, (fan_in, width) in enumerate(zip([STEM, *widths[:-1]], widths, strict=True))
            )
        )
        self.norm = nn.GroupNorm(NORM_GROUPS, widths[-1])
        self.linear = nn.Linear(widths[-1], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """Map a batch (B, channels, height, width) to logits (B, num_classes)."""
        return self.classify(self.features(x))

    def features(self, x: Tensor) -> Tensor:
        """Map a batch (B, channels, height, width) to the mean over the pixels that the last layer sees, (B, 64k)."""
        x = torch.relu(self.norm(self.stages(self.conv1(x))))
        return x.mean(dim=(2, 3))

    def classify(self, z: Tensor) -> Tensor:
        """Map features (B, 64k) to logits (B, num_classes)."""
        logits: Tensor = self.linear(z)
        return logits
