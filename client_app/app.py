"""The ClientApp: one handler each for every algorithm. A query is answered without importing torch."""

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import fedstrat
from fedstrat.flower import client_id
from fedstrat.seeding import derive

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Train the received model on this client's training data."""
    from fedstrat.data.loaders import client_data  # noqa: PLC0415
    from fedstrat.runs.model import client_model  # noqa: PLC0415

    data = client_data(context.run_config, context.node_config, seed=_seed(msg, context))
    model = client_model(context.run_config, context.node_config, overwritten="arrays" in msg.content)
    return fedstrat.train(msg, context, model, data.train, test_data=lambda: data.test)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluate the received model on this client's test data, or on the part that the message names."""
    from fedstrat.data.loaders import client_data, elsewhere  # noqa: PLC0415
    from fedstrat.runs.model import client_model  # noqa: PLC0415

    data = client_data(context.run_config, context.node_config, seed=0)
    model = client_model(context.run_config, context.node_config, overwritten=True)
    part = data.validation if msg.content["config"].get("part") == "validation" else data.test
    return fedstrat.evaluate(
        msg, context, model, part, elsewhere=lambda: elsewhere(context.run_config, context.node_config)
    )


@app.query()
def query(msg: Message, context: Context) -> Message:
    """Tell this client's id and, when asked, how many examples it trains on."""
    from fedstrat.data.clients import num_examples  # noqa: PLC0415

    return fedstrat.query(msg, context, num_examples=lambda: num_examples(context.run_config, context.node_config))


def _seed(msg: Message, context: Context) -> int:
    """This client's batch order of this round, from (seed, client, round)."""
    server_round = int(msg.content["config"]["server-round"])  # type: ignore[arg-type]
    return derive(int(context.run_config["seed"]), "client", client_id(context), server_round)
