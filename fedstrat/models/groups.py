"""Which parameters of a model are trained, and which of them form one layer."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

CONVOLUTIONS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
NORMS = (nn.GroupNorm, nn.LayerNorm, _BatchNorm)


def trainable_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters with ``requires_grad``, in the order of ``named_parameters()``.

    A tied parameter appears once, under its first name; buffers never do.
    """
    return tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def layer_groups(model: nn.Module) -> dict[str, str]:
    """Layer of every trainable parameter, as the authors of CRAFT group them.

    ``M.weight`` and ``M.bias`` have the group ``M``. A group, layer or batch normalisation that comes after a
    convolution among the children of the same module, with nothing but parameter-free modules or other norms
    in between, has the group of the convolution. Any other parameter is a group of its own name. So a
    ResNet-20 has 20 groups, the smallest of 464 scalars.

    Returns:
        Parameter name -> group, for ``trainable_names(model)`` in that order. The weight and bias of
        ``model`` itself have the group ``""``.
    """
    convolution = _convolutions_before_norms(model)
    groups = {}
    for name in trainable_names(model):
        module, _, leaf = name.rpartition(".")
        groups[name] = convolution.get(module, module) if leaf in {"weight", "bias"} else name
    return groups


def _convolutions_before_norms(model: nn.Module) -> dict[str, str]:
    """Name of a norm -> name of the convolution that it follows."""
    pairs = {}
    for parent_name, parent in model.named_modules():
        latest = None
        for child_name, child in parent.named_children():
            name = f"{parent_name}.{child_name}" if parent_name else child_name
            if isinstance(child, CONVOLUTIONS):
                latest = name
            elif isinstance(child, NORMS):
                if latest is not None:
                    pairs[name] = latest
            elif next(child.parameters(), None) is not None:
                latest = None
    return pairs
