"""The built-in models by name."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from fedstrat.errors import ConfigError, nearest
from fedstrat.models.cnn import CNN, PlainCNN
from fedstrat.models.custom import build_custom
from fedstrat.models.mlp import MLP
from fedstrat.models.resnet import ResNet
from fedstrat.models.resnet18 import ResNet18
from fedstrat.models.textcnn import TextCNN
from fedstrat.models.wideresnet import WideResNet

# No built-in model has buffers or BatchNorm: everything that it learns is in its parameters.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "cnn": CNN,
    "cnn-fashion": partial(
        PlainCNN, name="cnn-fashion", maps=(10, 20), kernel=5, padding=0, hidden=(256, 50), active=(True, False)
    ),
    "cnn-emnist": partial(
        PlainCNN, name="cnn-emnist", maps=(32, 64), kernel=3, padding=1, hidden=(1024, 512), active=(False, False)
    ),
    "cnn-cifar": partial(
        PlainCNN, name="cnn-cifar", maps=(16, 32, 64), kernel=3, padding=1, hidden=(500,), active=(True,)
    ),
    "resnet20": partial(ResNet, depth=20),
    "resnet32": partial(ResNet, depth=32),
    "resnet44": partial(ResNet, depth=44),
    "resnet56": partial(ResNet, depth=56),
    "resnet110": partial(ResNet, depth=110),
    "resnet18": ResNet18,
    "wrn28-4": partial(WideResNet, depth=28, widen=4),
    "textcnn": TextCNN,
}
FOR_TEXT = ("textcnn",)
"""The built-in models that read word ids; the others read numbers."""


def build(
    name: str, *, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = (), vocab_size: int = 0
) -> nn.Module:
    """Make a model with fresh weights from PyTorch's global random generator; seed it before.

    Args:
        name: A name of ``MODELS``, or ``my_pkg.module:Factory`` for one's own class or function, called
            with the keywords ``input_shape``, ``num_classes`` and, for texts, ``vocab_size`` where its signature
            accepts them.
        input_shape: Shape of one example without the batch axis: (features,), (channels, height, width), or
            (words,) for texts.
        num_classes: Number of classes, at least 1.
        hidden: Widths of the hidden layers of ``mlp``; the other models have fixed widths and don't read it.
        vocab_size: Number of word ids if the examples are texts, else 0.

    Raises:
        ConfigError: The name is unknown, the model can't take such inputs, or one's own can't be made.
    """
    shape = tuple(input_shape)
    if num_classes < 1 or any(size < 1 for size in shape):
        raise ConfigError(
            f"model '{name}': expected at least 1 class and positive input sizes, "
            f"but got {num_classes} classes and the input shape {shape}"
        )
    if ":" in name:
        words = {"vocab_size": vocab_size} if vocab_size else {}
        return build_custom(name, input_shape=shape, num_classes=num_classes, **words)
    if name not in MODELS:
        raise ConfigError(
            f"unknown model '{name}'{nearest(name, MODELS)} There are {', '.join(MODELS)}, "
            "and one's own as 'my_pkg.module:Factory'"
        )
    if vocab_size and name not in FOR_TEXT:
        raise ConfigError(
            f"model '{name}': expected numbers, but the examples are texts; of the built-in models"
            f" {', '.join(FOR_TEXT)} reads them"
        )
    sizes: dict[str, object] = {"hidden": hidden} if name == "mlp" else {}
    if name in FOR_TEXT:
        sizes["vocab_size"] = vocab_size
    return MODELS[name](input_shape=shape, num_classes=num_classes, **sizes)
