"""One training message of a strategy and the context of the node that gets it, without a run around them."""

from collections.abc import Mapping
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from torch import nn

import fedstrat
from fedstrat.simulation import InProcessGrid

ROUND = 1


class Asked:
    """A node that a strategy asks round after round; ``state`` survives as under Flower.

    Args:
        strategy: The server half.
        model: The global model, as an example.
        run_config: The run config of the node's context.
        node_config: Its node config; partition 0 by default.
    """

    def __init__(
        self,
        strategy: Any,
        model: nn.Module,
        run_config: Mapping[str, Any] | None = None,
        node_config: Mapping[str, Any] | None = None,
    ) -> None:
        strategy.min_train_nodes = strategy.min_available_nodes = 1
        self.strategy = strategy
        self.arrays = fedstrat.to_arrays(model)
        app = ClientApp()

        @app.query()
        def query(msg: Message, context: Context) -> Message:
            return fedstrat.query(msg, context, num_examples=10)

        # Kept, since it lends the process the identity without which no Message can be made.
        self.grid = InProcessGrid(app, 1, [node_config or {"partition-id": 0}], run_config)

    @property
    def context(self) -> Context:
        return next(iter(self.grid.contexts.values()))

    def message(self, server_round: int = ROUND, config: Mapping[str, Any] | None = None) -> Message:
        """The message of a round; ``config`` is the user's train_config."""
        sent = list(
            self.strategy.configure_train(server_round, self.arrays, ConfigRecord(dict(config or {})), self.grid)
        )
        (message,) = sent
        message.metadata.__dict__["_message_id"] = f"round-{server_round}"  # as a grid does
        return message

    def accept(self, server_round: int, reply: Message) -> None:
        """Let the strategy aggregate the reply; it must be good."""
        arrays, _ = self.strategy.aggregate_train(server_round, [reply])
        assert arrays is not None, self.strategy.failed
        self.arrays = arrays
