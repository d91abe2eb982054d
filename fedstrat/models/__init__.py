"""Models by name or import path, their trainable parameters and their layer groups."""

from fedstrat.models.catalogue import MODELS, build
from fedstrat.models.groups import layer_groups, trainable_names

__all__ = ["MODELS", "build", "layer_groups", "trainable_names"]
