"""Building a round's training messages."""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedstrat.naming import kebab
from fedstrat.payloads import Params, Payload, raw_record

if TYPE_CHECKING:
    from fedstrat.strategies.base import FedStrategy


class Outbox:
    """The messages of one round; what several clients are sent alike is encoded once.

    Args:
        strategy: Whose round.
        server_round: The round.
        arrays: The global model as it is handed out.
        config: The user's config, which isn't written to.
    """

    def __init__(
        self, strategy: "FedStrategy[Any, Any]", server_round: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> None:
        self.strategy, self.server_round, self.config = strategy, server_round, config
        self._state: Any = strategy.state
        handed_out = strategy.evaluated(self._state)
        # Keyed by identity; each object is kept, so that its id stays its own.
        self._models: dict[int, tuple[Params, ArrayRecord]] = {id(handed_out): (handed_out, arrays)}
        self._extras: dict[tuple[int, ...], tuple[Payload, dict[str, ArrayRecord]]] = {}
        self._rule = {kebab(f.name): getattr(strategy, f.name) for f in dataclasses.fields(strategy.rule)}
        self._algorithm = strategy.algorithm

    @functools.cached_property
    def _buffers(self) -> ArrayRecord:
        buffers, moving = self.strategy.buffers, self.strategy.moving
        return raw_record({n: b for n, b in buffers.items() if n in moving})

    def message(self, node: int, client: str, epochs_share: float | None) -> Message:
        """Build one node's message.

        Args:
            node: The node.
            client: The client on it.
            epochs_share: Share of the epochs above one that a straggler runs; None: all.
        """
        sent = self.strategy.broadcast(self._state, client)
        content: dict[str, Any] = (
            {} if sent.params is None else {self.strategy.arrayrecord_key: self._model(sent.params)}
        )
        config = self._config(client, epochs_share)
        if self.strategy.update_dtype != "model" and sent.params is self._state.params:
            # y_i is restored from x: who is sent another model replies with a whole one.
            config["fedstrat.update-dtype"] = self.strategy.update_dtype
        content[self.strategy.configrecord_key] = config
        content |= self._extra(sent.extra)
        if sent.params is None:
            content["buffers"] = self._buffers
        return Message(RecordDict(content), node, MessageType.TRAIN, group_id=str(self.server_round))

    def _model(self, params: Params) -> ArrayRecord:
        if id(params) not in self._models:
            self._models[id(params)] = (params, self.strategy.encode(params, self.strategy.buffers))
        return self._models[id(params)][1]

    def _extra(self, extra: Payload) -> dict[str, ArrayRecord]:
        key = tuple(id(getattr(extra, name)) for name in extra.names())
        if key not in self._extras:
            self._extras[key] = (extra, extra.encode())
        return self._extras[key][1]

    def _config(self, client: str, epochs_share: float | None) -> ConfigRecord:
        strategy = self.strategy
        own: dict[str, Any] = {
            "algorithm": self._algorithm,
            "experiment-id": strategy.experiment_id,
            "accepted-round": strategy.accepted.get(client, 0),
            "pack-content": strategy.pack_content,
            "seed": strategy.seed,
            "epochs-share": epochs_share,
            "evaluate-personal": strategy.evaluate_personal or None,
            **self._rule,
        }
        prefixed = {f"fedstrat.{name}": value for name, value in own.items() if value is not None}
        flower = strategy.flower_config()
        return ConfigRecord({**self.config, "server-round": self.server_round, **flower, **prefixed})
