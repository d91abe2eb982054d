"""The last displacements of clients that are absent now, which FedFV and FedLF keep on the server."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedstrat.flower import in_order
from fedstrat.payloads import Params, Update, state_dtype
from fedstrat.strategies.state import ServerState


@dataclass(frozen=True, kw_only=True)
class HistoryState(ServerState):
    """The model and what clients last contributed.

    Attributes:
        history: ``<client>/<parameter>`` -> the client's last displacement y_i - x, where it is still of use.
        last_seen: Client id -> number of the round in which it last contributed, of every client ever seen.
        round: Number of rounds with a step so far; rounds without replies don't age what is remembered.
    """

    history: Params
    last_seen: Mapping[str, int]
    round: int

    @classmethod
    def empty(cls, params: Params) -> "HistoryState":
        """The state before round 1."""
        return cls(params=params, history={}, last_seen={}, round=0)

    def displacement(self, client: str) -> dict[str, torch.Tensor]:
        """What a client last contributed."""
        return {name: self.history[f"{client}/{name}"] for name in self.params}

    def absent(self, updates: Sequence[Update[Any]], max_age: int) -> dict[str, int]:
        """The clients that contribute nothing now, but did at most ``max_age`` rounds ago -> their age, in order."""
        present = {u.client for u in updates}
        ages = {c: self.round + 1 - seen for c, seen in self.last_seen.items() if c not in present}
        return {c: ages[c] for c in in_order(ages) if ages[c] <= max_age and self._holds(c)}

    def after(self, updates: Sequence[Update[Any]], params: Params, max_age: int) -> "HistoryState":
        """The state after a round: with the new model, and what is at most ``max_age`` rounds old in the next one."""
        now = self.round + 1
        last_seen = {**self.last_seen, **{u.client: now for u in updates}}
        history: dict[str, torch.Tensor] = {}
        fresh = {u.client: u for u in updates}
        for client, seen in last_seen.items():
            if now + 1 - seen > max_age:
                continue
            for name, x in self.params.items():
                key = f"{client}/{name}"
                if client in fresh:
                    difference = fresh[client].params[name].to(torch.float64) - x.to(torch.float64)
                    history[key] = difference.to(state_dtype(x))
                elif key in self.history:
                    history[key] = self.history[key]
        return dataclasses.replace(self, params=params, history=history, last_seen=last_seen, round=now)

    def _holds(self, client: str) -> bool:
        return all(f"{client}/{name}" in self.history for name in self.params)
