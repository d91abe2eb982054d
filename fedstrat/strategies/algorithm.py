"""ServerHalf: an algorithm's server side as pure functions of explicit, frozen state. No Message in sight.

init_state(params) -> state          what the server remembers before round 1
broadcast(state, client) -> payload  what one client is sent
aggregate(state, updates) -> state   the server's step
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar, cast

import torch

from fedstrat.aggregation.gram import Displacements
from fedstrat.aggregation.groups import group_names
from fedstrat.errors import ConfigError
from fedstrat.local.rule import LocalRule
from fedstrat.naming import kebab
from fedstrat.payloads import NOTHING, Broadcast, Params, Payload, Update
from fedstrat.privacy import NO_MEAN
from fedstrat.strategies.arguments import CommonArguments
from fedstrat.strategies.state import Clients, ServerState

State = TypeVar("State", bound=ServerState)
Up = TypeVar("Up", bound=Payload)


class ServerHalf(CommonArguments, Generic[State, Up]):
    """What an algorithm file says about the server; ``FedStrategy`` adds the plumbing."""

    sends_model: ClassVar[bool] = True
    """Whether replies hold the trained model; otherwise ``payload`` stands for it."""
    drop_stragglers = False
    """Whether stragglers are left out instead of contributing their partial work."""
    payload: ClassVar[type[Payload]] = Payload
    """What the client half's replies add to the model."""
    needs: ClassVar[tuple[str, ...]] = ()
    """Metrics without which a reply can't be used."""
    stateful_clients: ClassVar[bool] = False
    """Whether clients keep state that depends on what the server accepted."""
    refuses_privacy: ClassVar[str | None] = NO_MEAN
    """Why Flower's differential-privacy wrappers and mods can't go around it; None where they can."""

    shows_non_finite: ClassVar[bool] = False
    """Whether NaN or infinity in any client's parameters makes new ones NaN or infinite, as in every sum over all of
    them. Then replies' parameters are searched for the culprit only where that happened."""

    steps_by_mean: ClassVar[bool] = False
    """Whether the step reads nothing of the updates but the example-weighted mean of their parameters, so that one
    update of it has the same step. Needed for ``streaming``."""

    diagnostics: dict[str, float]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A new step, also one from a mixin, has to say for itself what it stands and shows.
        inherited = [getattr(base, "aggregate", None) for base in cls.__bases__ if issubclass(base, ServerHalf)]
        if cls.aggregate not in inherited:
            cls.refuses_privacy = vars(cls).get("refuses_privacy", NO_MEAN)
            cls.shows_non_finite = vars(cls).get("shows_non_finite", False)
            cls.steps_by_mean = vars(cls).get("steps_by_mean", False)

    def check_settings(self) -> None:
        """Refuse settings that contradict one another, with a ConfigError."""

    def check_update(self, extra: Up) -> None:
        """Refuse a reply whose payload doesn't fit these settings, with a PayloadError."""

    # --- the algorithm: pure functions ------------------------------------------------------------------

    def init_state(self, params: Params) -> State:
        """Return the server's state before round 1."""
        return cast("State", ServerState(params=params))

    def admit(self, state: State, clients: Clients) -> State:
        """Return the state after clients were seen for the first time (id -> examples)."""
        del clients
        return state

    def forget(self, state: State, client: str) -> State:
        """Return the state after a client said that it lost its own."""
        del client
        return state

    def broadcast(self, state: State, client: str) -> Broadcast[Any]:
        """Return what one client is sent."""
        del client
        return Broadcast(state.params, NOTHING)

    def grams(self, state: State, updates: Sequence[Update[Up]]) -> dict[str, torch.Tensor]:
        """Return ``<y_i - x, y_j - x>`` layer by layer, each (m, m), float64, for the diagnostics alone.

        Empty where replies hold something else than the model; an algorithm of that kind may say what it moved.
        """
        if not self.sends_model:
            return {}
        rows = Displacements(state.params, [u.params for u in updates])
        return {layer: rows.gram(names, single=True) for layer, names in group_names(state.params, "layer").items()}

    def evaluated(self, state: State) -> Params:
        """Return the model that is evaluated and handed out; x itself, unless a method averages or looks ahead."""
        return state.params

    @abstractmethod
    def aggregate(self, state: State, updates: Sequence[Update[Up]]) -> State:
        """Return the state after a round; ``updates`` are sorted by client id and never empty."""

    # --- what it is called, what it needs -----------------------------------------------------------------

    @property
    def algorithm(self) -> str:
        """The name on the wire and in the run config: that of the nearest class in ALGORITHMS."""
        from fedstrat.strategies import ALGORITHMS  # noqa: PLC0415 - the table imports every algorithm

        names = {entry.strategy: name for name, entry in ALGORITHMS.items()}
        for cls in type(self).__mro__:
            if cls in names:
                return names[cls]
        raise ConfigError(
            f"{type(self).__name__} is not in fedstrat.strategies.ALGORITHMS; add ALGORITHMS['…'] ="
            f" Algorithm({type(self).__name__}, its LocalRule) in a module that both apps import"
        )

    @property
    def rule(self) -> type[LocalRule[Any, Any]]:
        """The client half."""
        from fedstrat.strategies import ALGORITHMS  # noqa: PLC0415

        return ALGORITHMS[self.algorithm].rule

    def flower_config(self) -> dict[str, float]:
        """Settings under Flower's own keys, for unmodified Flower clients."""
        return {}

    def note(self, **numbers: float) -> None:
        """Record numbers about this round for the log and the history; the mathematics doesn't read them."""
        self.diagnostics.update({kebab(name): float(value) for name, value in numbers.items()})

    @property
    def asks(self) -> tuple[str, ...]:
        """Metrics without which a reply can't be used: ``needs``, or else a sign of the client half, if there is one.

        Flower's own clients stand in for it where ``flower_config`` tells them all.
        """
        return self.needs or (() if self.rule.is_plain() or self.flower_config() else ("num-steps",))

    @property
    def pack_content(self) -> str:
        """What packs hold: "none" where no packs travel."""
        return "none"

    @property
    def need_examples(self) -> bool:
        """Whether the numbers of examples of all clients must be known, also of those that never trained."""
        return False
