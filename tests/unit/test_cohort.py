"""Which client sits on which node: every client on one node, and a node that comes back under a new id."""

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import fedstrat
from fedstrat.simulation import InProcessGrid
from fedstrat.strategies.cohort import Roster


def grid_of(*clients: str) -> InProcessGrid:
    """Nodes 1000, 1001, … that call themselves so."""
    app = ClientApp()

    @app.query()
    def query(msg: Message, context: Context) -> Message:
        return fedstrat.query(msg, context, num_examples=len(str(context.node_config["client-id"])))

    return InProcessGrid(app, len(clients), [{"client-id": client} for client in clients])


def meet(roster: Roster, grid: InProcessGrid) -> tuple[dict[int, str], dict[str, float]]:
    chosen, _, met = roster.meet(grid, lambda n: n, minimum=1, timeout=1.0, ask=True, need_examples=True)
    return chosen, met


def test_of_two_nodes_with_one_client_the_first_takes_part(caplog: pytest.LogCaptureFixture) -> None:
    roster = Roster()
    assert meet(roster, grid_of("a", "bb", "a")) == ({1000: "a", 1001: "bb"}, {"a": 1.0, "bb": 2.0})
    assert "node 1002 is left out: its client id 'a' is that of node 1000" in caplog.text


def test_a_known_client_keeps_its_node_while_that_is_there(caplog: pytest.LogCaptureFixture) -> None:
    roster, grid = Roster(), grid_of("a", "bb", "a")
    late = grid.contexts.pop(1002)
    assert meet(roster, grid) == ({1000: "a", 1001: "bb"}, {"a": 1.0, "bb": 2.0})
    grid.contexts[1002] = late
    assert meet(roster, grid) == ({1000: "a", 1001: "bb"}, {})
    assert "node 1002 is left out" in caplog.text
    del grid.contexts[1000]
    assert meet(roster, grid) == ({1001: "bb", 1002: "a"}, {"a": 1.0})
    assert roster.clients == {1001: "bb", 1002: "a"}
