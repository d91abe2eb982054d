"""The model that a run config asks for, the same on the server and on every client."""

from collections.abc import Mapping

import torch

from fedstrat.data.clients import describe, setting, vocab_size
from fedstrat.errors import DataError
from fedstrat.models import build
from fedstrat.models.custom import build_custom
from fedstrat.seeding import derive


def initial_model(run_config: Mapping[str, object], node_config: Mapping[str, object] | None = None) -> torch.nn.Module:
    """Build the model with the run's initial weights x_0, which follow from ``seed`` alone.

    Arguments and errors as of :func:`build_model`. Torch's global generator stays as it was.
    """
    generator = torch.default_generator
    before = generator.get_state()
    generator.manual_seed(derive(setting(run_config, "seed", int), "model"))
    try:
        return build_model(run_config, node_config)
    finally:
        generator.set_state(before)


def build_model(run_config: Mapping[str, object], node_config: Mapping[str, object] | None = None) -> torch.nn.Module:
    """Build ``model.name`` for the data set's shapes; weights come from torch's global generator.

    Args:
        run_config: Flat; reads ``model.*`` and ``dataset.*``.
        node_config: A client's; its private folder tells the shapes of ``npz``, ``csv`` and ``images`` data.

    Raises:
        ConfigError: There is no such model, or it can't be built for these shapes.
        DataError: The shapes aren't known here, and the model isn't a factory that can do without them.
    """
    name = setting(run_config, "model.name", str)
    hidden = [int(width) for width in str(run_config.get("model.hidden", "")).split(",") if width.strip()]
    try:
        input_shape, num_classes = describe(run_config, node_config)
    except DataError:
        if ":" not in name:
            raise
        return build_custom(name)  # a server without data: the factory may know the shapes by itself
    return build(
        name, input_shape=input_shape, num_classes=num_classes, hidden=hidden, vocab_size=vocab_size(run_config)
    )
