"""The few named exceptions of fedstrat.

Each message says what was expected, what came, from whom, in which round where there is one,
and what to do about it.
"""

import difflib
from collections.abc import Iterable
from typing import Any


class FedstratError(Exception):
    """Base of every error that fedstrat raises on purpose."""


class ConfigError(FedstratError, ValueError):
    """A setting is unknown, of the wrong type, out of range or contradicts another."""


class UnknownSettingError(ConfigError, TypeError):
    """A keyword or run-config key that nobody reads."""


class PayloadError(FedstratError, ValueError):
    """A message holds something else than the wire contract says."""


class StateError(FedstratError, RuntimeError):
    """State that should have survived (a client's, a checkpoint's) is missing, damaged or foreign."""


class DataError(FedstratError, ValueError):
    """A data set can't be read, or a partition that was asked for can't exist."""


class RuleError(FedstratError, RuntimeError):
    """A training loop uses a local rule in a way that the rule can't honour."""


class RunFailedError(FedstratError, RuntimeError):
    """The run can't go on: too few nodes, too few good replies, or no successful round.

    Attributes:
        result: Flower's Result with the last good model, where rounds had begun.
    """

    result: Any = None


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the known name nearest to ``name``, whatever its case, or a full stop."""
    folded: dict[str, str] = {}
    for candidate in known:
        folded.setdefault(candidate.casefold(), candidate)
    close = difflib.get_close_matches(name.casefold(), list(folded), n=1, cutoff=0.5)
    return f"; did you mean '{folded[close[0]]}'?" if close else "."
