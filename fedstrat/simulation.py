"""InProcessGrid: a Flower Grid that calls a ClientApp in this process. For tests, notebooks and small studies."""

import copy
import logging
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from fedstrat.errors import ConfigError
from fedstrat.flower import Scalar, borrow_identity, copied, return_identity

logger = logging.getLogger("flwr")

_CLIENT_APP_RAISED = 2  # flwr's ErrorCode.CLIENT_APP_RAISED_EXCEPTION, the same in all versions
_FIRST_NODE_ID = 1000  # apart from the server's and from client ids, so that a mix-up shows


_LIVE: "weakref.WeakSet[InProcessGrid]" = weakref.WeakSet()


class InProcessGrid(Grid):
    """Run unmodified Strategies and ClientApps in this process, without Ray.

    Args:
        client_app: The ClientApp that every node runs.
        num_nodes: How many nodes there are, >= 1.
        node_configs: One node config per node; by default ``{"partition-id": i, "num-partitions": num_nodes}``.
        run_config: The run config that every client's Context holds.

    A client that raises becomes an error reply, as under Flower; what it raised is kept in ``errors``. Each node
    keeps its ``Context.state`` between rounds; a call that raises leaves the state as it was.
    """

    def __init__(
        self,
        client_app: ClientApp,
        num_nodes: int,
        node_configs: Sequence[Mapping[str, Scalar]] | None = None,
        run_config: Mapping[str, Scalar] | None = None,
    ) -> None:
        if node_configs is None:
            node_configs = [{"partition-id": i, "num-partitions": num_nodes} for i in range(num_nodes)]
        if num_nodes < 1 or len(node_configs) != num_nodes:
            raise ConfigError(
                f"expected one node config for each of {num_nodes} >= 1 nodes, but got {len(node_configs)}"
            )
        self.client_app = client_app
        self.errors: list[BaseException] = []
        self.contexts = {
            _FIRST_NODE_ID + i: Context(
                run_id=1,
                node_id=_FIRST_NODE_ID + i,
                node_config=dict(config),
                state=RecordDict(),
                run_config=dict(run_config or {}),
            )
            for i, config in enumerate(node_configs)
        }
        self._waiting: dict[str, Message] = {}
        self._pushed = 0
        # In this order: when this grid dies, it leaves _LIVE before the identity is returned.
        weakref.finalize(self, _return_identity)
        _LIVE.add(self)

    def set_run(self, run: Any) -> None:
        """Nothing to set: there is one run."""

    @property
    def run(self) -> Any:
        """There is no Run object outside of Flower's runtime."""
        raise NotImplementedError("InProcessGrid runs outside of Flower's runtime and has no Run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """Create a Message, as ``Message(…)`` does."""
        borrow_identity()
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        """Ids of all nodes; a test may take a node away by deleting its context."""
        # Every strategy asks for the nodes before it creates Messages.
        borrow_identity()
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Keep the messages until their replies are asked for."""
        ids = []
        for message in list(messages):
            self._pushed += 1
            message_id = f"message-{self._pushed}"
            message.metadata.__dict__["_message_id"] = message_id  # as Flower's own grids do
            ids.append(message_id)
            self._waiting[message_id] = message
        return ids

    def _call(self, message: Message) -> Message | None:
        context = self.contexts.get(message.metadata.dst_node_id)
        if context is None:
            return None  # the node left between sampling and sending
        # The client gets its own records (arrays are immutable bytes and shared), and a state that only a
        # call that returns may replace.
        sent = copy.copy(message)
        sent.content = copied(message.content)
        working = Context(
            run_id=context.run_id,
            node_id=context.node_id,
            node_config=dict(context.node_config),
            state=copied(context.state),
            run_config=dict(context.run_config),
        )
        try:
            reply = self.client_app(sent, working)
        except Exception as error:
            self.errors.append(error)
            logger.debug("client %s raised", context.node_id, exc_info=error)
            return Message(Error(_CLIENT_APP_RAISED, f"{type(error)}:<{error}>"), reply_to=sent)
        self.contexts[context.node_id].state = working.state
        return reply

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Call the ClientApp for these messages, in the order in which they were pushed, each once."""
        wanted = set(message_ids)
        for message_id in [i for i in self._waiting if i in wanted]:
            reply = self._call(self._waiting.pop(message_id))
            if reply is not None:
                reply.metadata.__dict__["_message_id"] = message_id.replace("message", "reply")
                yield reply

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        """Push, then pull; every reply is there at once."""
        del timeout
        return list(self.pull_messages(self.push_messages(messages)))


def _return_identity() -> None:
    if not _LIVE:  # another grid may be in the middle of a run
        return_identity()
