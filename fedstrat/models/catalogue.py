"""The built-in models by name."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import nn

from fedstrat.errors import ConfigError, nearest
from fedstrat.models.cnn import CNN
from fedstrat.models.custom import build_custom
from fedstrat.models.mlp import MLP
from fedstrat.models.resnet import ResNet

# No built-in model has buffers or BatchNorm: everything that it learns is in its parameters.
MODELS: dict[str, Callable[..., nn.Module]] = {
    "mlp": MLP,
    "cnn": CNN,
    "resnet20": partial(ResNet, depth=20),
    "resnet32": partial(ResNet, depth=32),
    "resnet44": partial(ResNet, depth=44),
    "resnet56": partial(ResNet, depth=56),
    "resnet110": partial(ResNet, depth=110),
}


def build(name: str, *, input_shape: Sequence[int], num_classes: int, hidden: Sequence[int] = ()) -> nn.Module:
    """Make a model with fresh weights from PyTorch's global random generator; seed it before.

    Args:
        name: A name of ``MODELS``, or ``my_pkg.module:Factory`` for one's own class or function, called
            with the keywords ``input_shape`` and ``num_classes`` where its signature accepts them.
        input_shape: Shape of one example without the batch axis: (features,) or (channels, height, width).
        num_classes: Number of classes, at least 1.
        hidden: Widths of the hidden layers of ``mlp``; the other models have fixed widths and don't read it.

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
        return build_custom(name, input_shape=shape, num_classes=num_classes)
    if name not in MODELS:
        raise ConfigError(
            f"unknown model '{name}'{nearest(name, MODELS)} There are {', '.join(MODELS)}, "
            "and one's own as 'my_pkg.module:Factory'"
        )
    sizes = {"hidden": hidden} if name == "mlp" else {}
    return MODELS[name](input_shape=shape, num_classes=num_classes, **sizes)
