"""What differs between Flower versions, and the few of its internals that can't be avoided."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid

try:
    from flwr.supercore.task_identity import TaskIdentity
except ImportError:  # older releases need no identity to create a Message
    TaskIdentity = None  # type: ignore[assignment, misc]

Scalar: TypeAlias = bool | int | float | str
Record = TypeVar("Record", ArrayRecord, ConfigRecord, MetricRecord)

SERVER_NODE_ID = 1
_BORROWED = 1  # the run id outside of a run

_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 0.5


def exchange(grid: Grid, messages: list[Message], timeout: float) -> list[Message]:
    """Push messages and pull the replies until all are in or ``timeout`` seconds have passed.

    Does what ``Grid.send_and_receive`` does with public methods, but waits 0.05 s, growing to 0.5 s, between
    two looks; Flower's own waits 3 s on real nodes.
    """
    if not messages:
        return []
    waiting = {message_id for message_id in grid.push_messages(messages) if message_id}
    replies: list[Message] = []
    deadline = time.monotonic() + timeout
    wait = _FIRST_WAIT_SECONDS
    while waiting:
        arrived = list(grid.pull_messages(waiting))
        replies += arrived
        waiting -= {reply.metadata.reply_to_message_id for reply in arrived}
        left = deadline - time.monotonic()
        if not waiting or left <= 0:
            break
        wait = _FIRST_WAIT_SECONDS if arrived else min(wait * 1.5, _LONGEST_WAIT_SECONDS)
        time.sleep(min(wait, left))
    return replies


def exchange_in_turn(grid: Grid, messages: list[Message], timeout: float) -> Iterator[Message]:
    """Push messages and yield the replies in the messages' order, each pulled when it is its turn.

    Those whose turn hasn't come wait at the SuperLink, so that they need no memory here. After ``timeout`` seconds
    those that are there are still pulled.
    """
    ids = list(grid.push_messages(messages)) if messages else []
    deadline = time.monotonic() + timeout
    for message_id in filter(None, ids):
        wait = _FIRST_WAIT_SECONDS
        while not (arrived := list(grid.pull_messages([message_id]))) and time.monotonic() < deadline:
            time.sleep(min(wait, max(deadline - time.monotonic(), 0.0)))
            wait = min(wait * 1.5, _LONGEST_WAIT_SECONDS)
        yield from arrived


def borrow_identity() -> None:
    """Let this process create Messages outside of a Flower run, as the server. Inside of one nothing is changed."""
    if TaskIdentity is not None and TaskIdentity._run_id in (None, _BORROWED):  # noqa: SLF001
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 0, _BORROWED, SERVER_NODE_ID


def return_identity() -> None:
    """Undo :func:`borrow_identity`."""
    if TaskIdentity is not None and TaskIdentity._run_id == _BORROWED:  # noqa: SLF001
        for name in ("_task_id", "_run_id", "_node_id"):
            setattr(TaskIdentity, name, None)


def client_id(context: Context) -> str:
    """Name this client: ``client-id`` of the node config, else ``partition-id``, else the node id."""
    for key in ("client-id", "partition-id"):
        if key in context.node_config:
            return str(context.node_config[key])
    return str(context.node_id)


def client_order(client: str) -> tuple[int, int, str]:
    """Sort key of client ids: integers as numbers and first, then names."""
    return (0, int(client), client) if client.isdecimal() else (1, 0, client)


def in_order(clients: Iterable[str]) -> list[str]:
    """Sort client ids."""
    return sorted(clients, key=client_order)


def scalars(config: Mapping[str, object] | ConfigRecord) -> dict[str, Scalar]:
    """The scalar entries of a config."""
    return {key: value for key, value in config.items() if isinstance(value, bool | int | float | str)}


def records(content: RecordDict, kind: type[Record]) -> dict[str, Record]:
    """The records of one kind, as Flower's ``array_records`` and the like, whose checked copies cost more to make."""
    return {name: record for name, record in content.items() if isinstance(record, kind)}


def copied(content: RecordDict) -> RecordDict:
    """Copy records: whoever sets or removes an entry of the copy leaves the original. Arrays, as values, are shared."""
    return RecordDict({name: _copied(record) for name, record in content.items()})


def _copied(record: Any) -> Any:
    return record.copy() if hasattr(record, "copy") else type(record)(dict(record))  # older releases lack it
