"""Numbers of groups as people read them: mean ± deviation over seeds, bytes, times."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NONE = "–"


def spread(values: Iterable[float | None], digits: int = 3) -> str:
    """Return mean ± sample standard deviation; the number alone if there is one, a dash if there is none."""
    known = [float(value) for value in values if value is not None]
    if not known:
        return NONE
    mean = f"{statistics.fmean(known):.{digits}f}"
    return mean if len(known) == 1 else f"{mean} ± {statistics.stdev(known):.{digits}f}"


def significant(values: Iterable[float | None]) -> str:
    """Return the mean with three significant digits."""
    known = [float(value) for value in values if value is not None]
    return f"{statistics.fmean(known):.3g}" if known else NONE


def size(count: float | None) -> str:
    """Return a number of bytes with its unit, in powers of 1000."""
    if count is None:
        return NONE
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000.0:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000.0
    return f"{count:,.3g} TB" if count < 1000.0 else f"{count:,.0f} TB"


def duration(seconds: float | None) -> str:
    """Return seconds as people say them."""
    if seconds is None:
        return NONE
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    minutes = seconds / 60.0
    return f"{minutes:.0f} min" if minutes < 120.0 else f"{minutes / 60.0:.1f} h"


def traffic(total: Mapping[str, Any]) -> float:
    """Return the array bytes of training, both directions."""
    return float(total.get("train_down_payload", 0) + total.get("train_up_payload", 0))


def mean_of(values: Sequence[float | None]) -> float | None:
    """Return the mean of what is there."""
    known = [float(value) for value in values if value is not None]
    return statistics.fmean(known) if known else None
