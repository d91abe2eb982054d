"""Write docs/algorithms/: one page per algorithm, from its module's docstring and its declared settings.

python docs/make_algorithm_pages.py
"""

import dataclasses
import inspect
import sys
from pathlib import Path
from typing import Any

from fedstrat.local.rule import LocalRule
from fedstrat.naming import kebab
from fedstrat.payloads import Payload
from fedstrat.strategies import ALGORITHMS
from fedstrat.strategies.arguments import CommonArguments
from fedstrat.strategies.settings import Hyper, type_name

FOLDER = Path(__file__).parent / "algorithms"
CALLS = {
    "full_gradient": "`session.full_gradient(loader, loss_fn)` before the first step",
    "should_stop": "`session.should_stop(loader, loss_fn)` at the end of every epoch",
    "loss_before": "`session.loss_before(loader, loss_fn)` before the first step",
    "train_personal": "`session.train_personal(loader, loss_fn, lr=…, epochs=…)` before the first step",
}


def main() -> None:
    """Write every page and the index."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text)


def pages() -> dict[str, str]:
    """File name -> text."""
    return {"README.md": index(), **{f"{key}.md": page(key) for key in ALGORITHMS}}


def index() -> str:
    """The list of all algorithms."""
    rows = [f"| [`{key}`]({key}.md) | {_summary(entry.strategy)} |" for key, entry in ALGORITHMS.items()]
    return "\n".join(
        [
            "# The algorithms",
            "",
            "Made by `python docs/make_algorithm_pages.py`. Which one to take: [choosing](../choosing.md).",
            "",
            "| key | what it does |",
            "|---|---|",
            *rows,
            "",
        ]
    )


def page(key: str) -> str:
    """One algorithm's page."""
    strategy, rule = ALGORITHMS[key]
    doc = inspect.cleandoc(str(sys.modules[strategy.__module__].__doc__))
    title, _, equations = doc.partition("\n")
    own = {n: h for n, h in strategy.hypers.items() if n not in CommonArguments.hypers}
    file = f"fedstrat/{strategy.__module__.removeprefix('fedstrat.').replace('.', '/')}.py"
    where = (
        f'`fedstrat.{strategy.__name__}` on the server, `algorithm = "{key}"` in the run config; both halves are in'
        f" [`{file}`](../../{file})."
    )
    return "\n".join(
        [
            f"# {title.rstrip('.')}",
            "",
            _summary(strategy),
            "",
            where,
            "",
            "## Equations, and what differs from the paper",
            "",
            "```text",
            *equations.strip("\n").split("\n"),
            "```",
            "",
            "## Settings",
            "",
            *_settings(key, own),
            "",
            "## What it costs",
            "",
            *_costs(strategy, rule),
            "",
            "## What the client must do",
            "",
            _client(strategy, rule),
            "",
        ]
    )


def _summary(strategy: type[Any]) -> str:
    return inspect.cleandoc(str(strategy.__doc__)).partition("\n\n")[0].replace("\n", " ")


def _settings(key: str, own: dict[str, Hyper]) -> list[str]:
    if not own:
        return ["None of its own; every strategy takes Flower's arguments of `FedAvg` and fedstrat's."]
    return [
        "| argument | run-config key | type | default | range | paper | what it does |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| `{n}` | {f'`{key}.{kebab(n)}`' if h.run_config else '–'} | {_cell(type_name(h.type))} |"
            f" `{h.default!r}` | {h.range or '–'} | {h.symbol or '–'} | {_cell(h.doc)} |"
            for n, h in own.items()
        ),
        "",
        "Beside these, Flower's arguments of `FedAvg` and fedstrat's that every strategy takes.",
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _costs(strategy: type[Any], rule: type[Any]) -> list[str]:
    down = ["the model", *_payload(rule.receives)]
    up = [*(["the model"] if strategy.sends_model else []), *_payload(strategy.payload)]
    return [
        f"* Down: {', '.join(down)}." + ("" if strategy.sends_model else " The model only at the first contact."),
        f"* Up: {', '.join(up)}.",
        f"* Gradient evaluations of a local step: {rule.passes}.",
        f"* Clients keep state between rounds: {'yes' if strategy.stateful_clients else 'no'}.",
    ]


def _payload(payload: type[Payload] | None) -> list[str]:
    if payload is None:
        return []
    size = ", of the model's size" if payload.per_parameter else ""
    return [f"`{kebab(name)}`{size}" for name in payload.names()]


def _client(strategy: type[Any], rule: type[Any]) -> str:
    if rule.is_plain():
        text = "Nothing: it works with unmodified Flower clients."
    elif not strategy().asks:
        text = (
            "Nothing, where the client reads Flower's `proximal-mu` and `gamma` is 0; else its half, as with the others"
            " ([how](../embedding.md))."
        )
    else:
        text = "Its half: `fedstrat.train(…)`, or `LocalSession` around a loop of your own ([how](../embedding.md))."
    more = []
    if rule.passes > 1:
        more.append("take steps by `optimizer.step(closure)`, since each batch is evaluated twice")
    if rule.loss is not LocalRule.loss:
        more.append("let the closure return `session.loss(x, y, loss_fn)`, which holds its objective")
    settings = {f.name: getattr(strategy, f.name, None) for f in dataclasses.fields(rule)}
    more += [f"call {CALLS[call]}" for call in rule(**settings).needs_calls]
    if rule.refuses_momentum:
        more.append(f"use SGD without momentum ({rule.refuses_momentum})")
    if rule.needs_sgd:
        more.append(f"use SGD, with one heavy-ball momentum at most ({rule.needs_sgd})")
    if rule.one_lr:
        more.append("use one learning rate for all parameters")
    return text + ("\n\nIn a loop of your own:\n\n" + ";\n".join(f"* {line}" for line in more) + "." if more else "")


if __name__ == "__main__":
    main()
