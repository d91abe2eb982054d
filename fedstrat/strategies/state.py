"""What the server remembers between rounds."""

from collections.abc import Mapping
from dataclasses import dataclass

from fedstrat.payloads import Params


@dataclass(frozen=True, kw_only=True)
class ServerState:
    """Server state of an algorithm; subclasses add what theirs remembers. A checkpoint is this object and a round.

    Attributes:
        params: The global model's trainable parameters, x.
    """

    params: Params


Clients = Mapping[str, float]
"""Client id -> its number of training examples (1.0 where nobody asked)."""
