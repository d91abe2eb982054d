"""Who takes part: waiting for nodes, learning their client ids, drawing the cohort of a round."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from fedstrat.errors import RunFailedError
from fedstrat.flower import client_order, exchange, in_order
from fedstrat.seeding import rng
from fedstrat.strategies.intake import about_client, check_worker

logger = logging.getLogger("flwr")

_POLL_SECONDS = 0.2
_QUERY_TIMEOUT_SECONDS = 300.0
_NAMING_TIMEOUT_SECONDS = 10.0


def wait_for_nodes(
    grid: Grid, minimum: int, timeout: float | None, *, known: Mapping[int, str] | None = None, ask: bool = False
) -> list[int]:
    """Wait until at least ``minimum`` nodes are connected and return all of them.

    Args:
        grid: Where the nodes are.
        minimum: How many are needed.
        timeout: Seconds to wait; None waits for ever.
        known: node id -> client id, as far as it is known.
        ask: Whether nodes of unknown client may be asked, to say who is connected when there are too few.

    Raises:
        RunFailedError: Fewer are connected after ``timeout`` seconds; names those that are.
    """
    deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
    announced = False
    while True:
        nodes = sorted(grid.get_node_ids())
        if len(nodes) >= minimum:
            return nodes
        if time.monotonic() >= deadline:
            raise RunFailedError(
                f"expected at least {minimum} connected nodes within {timeout:g} s, but {len(nodes)} are connected"
                f" ({_who(grid, nodes, known or {}, ask=ask) or 'none'}); start more nodes, lower min_available_nodes,"
                " min_train_nodes or num-clients, or raise connect_timeout"
            )
        if not announced:
            logger.info("Waiting for nodes to connect: %d connected (minimum required: %d).", len(nodes), minimum)
            announced = True
        time.sleep(_POLL_SECONDS)


def _who(grid: Grid, nodes: list[int], known: Mapping[int, str], *, ask: bool) -> str:
    """The clients on these nodes, in client order; nodes whose client nobody knows are told apart."""
    names = dict(known)
    unknown = [node for node in nodes if node not in names]
    if ask and unknown:
        names |= {
            node: name for node, record in _query(grid, unknown, _NAMING_TIMEOUT_SECONDS).items()
            if isinstance(name := record.get("client-id"), str)
        }  # fmt: skip
    clients = in_order(names[node] for node in nodes if node in names)
    parts = [f"client{'s' * (len(clients) > 1)} {', '.join(clients)}"] if clients else []
    return ", ".join(parts + [f"node {node}" for node in nodes if node not in names])


def _query(grid: Grid, nodes: Iterable[int], timeout: float, *, need_examples: bool = False) -> dict[int, ConfigRecord]:
    """Ask nodes about their clients: node id -> what each that answers in time says, maybe nothing.

    Raises:
        RunFailedError: A simulated node's worker is dead.
    """
    config = ConfigRecord({"fedstrat.need-num-examples": need_examples})
    messages = [Message(RecordDict({"config": config}), node, MessageType.QUERY) for node in nodes]
    replies = exchange(grid, messages, timeout)
    node_of = {m.metadata.message_id: m.metadata.dst_node_id for m in messages}
    answers: dict[int, ConfigRecord] = {}
    for reply in replies:
        if reply.has_error():
            check_worker(reply.error.reason or "")
        record = reply.content.config_records.get("client") if reply.has_content() else None
        answers[node_of[reply.metadata.reply_to_message_id]] = record if record is not None else ConfigRecord()
    return answers


def query_clients(grid: Grid, nodes: Iterable[int], *, need_examples: bool) -> dict[int, tuple[str, float]]:
    """Ask nodes for their client id and, if needed, their number of training examples.

    Returns:
        node id -> (client id, examples). A node whose app has no query handler goes by its node id.

    Raises:
        RunFailedError: ``need_examples``, and a client doesn't tell.
    """
    known: dict[int, tuple[str, float]] = {}
    for node, record in _query(grid, nodes, _QUERY_TIMEOUT_SECONDS, need_examples=need_examples).items():
        name = record.get("client-id")
        if not isinstance(name, str):
            logger.warning(
                "node %d doesn't tell its client id, so it goes by its node id, which may differ in the next run;"
                " add to its ClientApp: @app.query() → return fedstrat.query(msg, context)",
                node,
            )
            known[node] = (str(node), 1.0)
            continue
        examples = record.get("num-examples", None if need_examples else 1)
        if not isinstance(examples, int | float) or not examples >= 0:
            raise RunFailedError(
                f"client {name} doesn't tell its number of training examples (got {examples!r}), which this strategy"
                " weights it by; in its query handler: return fedstrat.query(msg, context, num_examples=…)"
            )
        known[node] = (name, float(examples))
    return known


def draw(clients: Mapping[int, str], size: int, seed: int | None, *path: int | str) -> list[int]:
    """Draw ``size`` nodes uniformly without replacement, over sorted client ids.

    With a seed the draw depends on (seed, path) and the set of client ids alone, so every method sees the same
    cohorts. The result is in client order.
    """
    nodes = sorted(clients, key=lambda node: (client_order(clients[node]), node))
    generator = np.random.default_rng() if seed is None else rng(seed, *path)
    chosen = generator.choice(len(nodes), size=min(size, len(nodes)), replace=False)
    return [nodes[i] for i in sorted(chosen)]


def stragglers(cohort: list[int], share: float, seed: int | None, server_round: int) -> dict[int, float]:
    """Choose who runs fewer epochs this round, and how many: node id -> share in [0, 1) of what is above one epoch.

    ``floor(share * m)`` of the cohort, a uniformly random number of epochs each, depending on (seed, round) and the
    cohort alone, so that every algorithm sees the same stragglers. As in the experiments of FedProx.
    """
    count = int(share * len(cohort))
    if count == 0:
        return {}
    generator = np.random.default_rng() if seed is None else rng(seed, "stragglers", server_round)
    slow = generator.choice(len(cohort), size=count, replace=False)
    return {cohort[i]: float(u) for i, u in zip(sorted(slow), generator.random(count), strict=True)}


class Roster:
    """Which client sits on which node.

    Flower's node ids are random per run, so cohorts and state go by client ids, which new nodes are asked for once.

    Attributes:
        clients: node id -> client id, as far as it was asked for.
    """

    def __init__(self) -> None:
        self.clients: dict[int, str] = {}

    def meet(
        self,
        grid: Grid,
        size_of: Callable[[int], int],
        *,
        minimum: int,
        timeout: float | None,
        ask: bool,
        need_examples: bool,
    ) -> tuple[dict[int, str], int, dict[str, float]]:
        """Wait for enough nodes, and learn the client ids of new ones.

        Args:
            grid: Where the nodes are.
            size_of: Cohort size for a number of connected nodes.
            minimum: Smallest number of connected nodes.
            timeout: Seconds to wait for them; None waits for ever.
            ask: Whether nodes are asked for their client ids at all.
            need_examples: Whether they are also asked for their number of examples.

        Returns:
            (node id -> client id of the nodes that can be chosen, cohort size, new client id -> examples).

        Raises:
            RunFailedError: Too few nodes within ``timeout``.
        """
        nodes = wait_for_nodes(grid, max(minimum, 1), timeout, known=self.clients, ask=ask)
        size = size_of(len(nodes))
        if size > len(nodes):
            nodes = wait_for_nodes(grid, size, timeout, known=self.clients, ask=ask)
        if not ask:
            return {node: self.client_of(node) for node in nodes}, size, {}
        met: dict[str, float] = {}
        new = [node for node in nodes if node not in self.clients]
        node_of = {self.clients[node]: node for node in nodes if node in self.clients}
        # In the order of nodes, not of replies: of two with one client it is always the same that takes part.
        for node, (client, examples) in sorted(query_clients(grid, new, need_examples=need_examples).items()):
            if client in node_of:
                holder = node_of[client]
                logger.warning("node %d is left out: its client id '%s' is that of node %d", node, client, holder)
                continue
            node_of[client], met[client] = node, examples
        # A restarted node comes back under a new node id.
        self.clients = {n: c for n, c in self.clients.items() if c not in met} | {node_of[c]: c for c in met}
        chosen = {node: self.clients[node] for node in nodes if node in self.clients}
        return chosen, size, {client: met[client] for client in in_order(met)}

    def client_of(self, node: int) -> str:
        """The client on a node; the node's own id where nobody asked."""
        return self.clients.get(node, str(node))

    def senders(self, sent: Iterable[Message], replies: Iterable[Message]) -> list[tuple[str, Message]]:
        """Pair replies with client ids, in client order."""
        return sorted(self.senders_in_turn(sent, replies), key=lambda pair: client_order(pair[0]))

    def senders_in_turn(self, sent: Iterable[Message], replies: Iterable[Message]) -> Iterator[tuple[str, Message]]:
        """Pair replies with client ids, in the order in which they come.

        By the message that they answer: an error reply may carry the SuperLink's id instead of the node's.
        """
        node_of = {m.metadata.message_id: m.metadata.dst_node_id for m in sent if m.metadata.message_id}
        for reply in replies:
            node = node_of.get(reply.metadata.reply_to_message_id, reply.metadata.src_node_id)
            client = self.client_of(node)
            if node not in self.clients and reply.has_content():
                said = about_client(reply.content).get("client-id")
                if isinstance(said, str):
                    client = said
                    if said not in self.clients.values():
                        self.clients[node] = said  # known from now on without a query
            yield client, reply
