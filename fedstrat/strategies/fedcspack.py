"""FedCSPACK: sparse packs both ways, weighted by cosine and divergence; clients keep personal models.

arXiv 2601.01840, https://arxiv.org/abs/2601.01840.

    client i   w = its personal model with the received packs written over it, then K_i steps of SGD
               sends the packs with cos(w_j, x_j) < cos(w, x), at most K of them, with M_j = |kappa_j + theta_j|
    server     x_j <- x_j + sum_i M_ij (w_ij - x_j) / sum_i M_ij     on packs that somebody sent; others keep x_j

The equations of packs, theta, kappa and M are in ``fedstrat.aggregation.packs``.

Downlinks:
    synced   a version per pack and, per client, the version it last had: it is sent what changed since then. Every
             client knows the true global value of every pack, apart from its personal one. First contact: the whole
             model.
    mask     only the packs of the last round travel (the paper's wording); clients compare with what they know, which
             may be old, and upload weights instead of differences.
    dense    the whole model every round (the authors' code); clients remember nothing.

Further savings, all off by default, none of them in the paper:
    initial_model "seed"   at first contact a client is sent the packs that have changed since x_0, and the SHA-256 of
                           x_0, which it has built by itself; one whose x_0 is another says so and is sent the model.
    pack_dtype             packs travel as bfloat16 (relative error at most 2^-8) or float16 (2^-11; not above 65504),
                           both ways; the server sums and keeps x in full, what is sent is rounded afresh each time.
    error_feedback         e <- e + (w - w at the start of the round); the candidates are those of x + e instead of w,
                           e_j is sent in place of w_j - x_j, and what isn't sent stays in e.

Differs from the paper (whose formulas leave cases open, and whose code differs from its text):
* kappa = KL(softmax x || softmax w) of the weights, as in the code; the paper's ratio of raw weights has no logarithm.
* M is the absolute value and at least 1e-12; a pack that is zero on both sides has cosine 1 and isn't sent.
* Packs that nobody sent keep the global value; the paper's "0 otherwise" would erase them.
* top_k and keep_ratio bound the candidates; the code has no K. Explicit indices travel, so that alignment never
  depends on weights.
* One pack only (B >= d): no pack is below the threshold and the model never moves; choose a smaller pack_size.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch
from flwr.app import ArrayRecord, RecordDict
from typing_extensions import override

from fedstrat.aggregation.packs import Weights, clip, from_packs, gram, merge, num_packs, select, to_packs
from fedstrat.errors import ConfigError, PayloadError
from fedstrat.local.rule import LocalRule, Tensors
from fedstrat.local.state import StateLostError
from fedstrat.payloads import Broadcast, Params, Payload, Update, decode, is_finite
from fedstrat.strategies.base import FedStrategy
from fedstrat.strategies.settings import hyper
from fedstrat.strategies.state import ServerState

logger = logging.getLogger("flwr")

PackDtype = Literal["model", "bfloat16", "float16"]
_FIRST_CONTACT, _NEEDS_MODEL = 0, -1
"""Generations of clients that build x_0 by themselves, and of those that can't."""


@dataclass(frozen=True)
class CspackBroadcast(Payload):
    """Global packs: ``index`` int32 (K,), ``value`` (K, B); no packs where the whole model travels.

    At the first contact of a client that builds x_0 by itself also ``initial`` uint8 (32,): the SHA-256 of x_0.
    """

    packs: Mapping[str, torch.Tensor]
    per_parameter = False

    @classmethod
    @override
    def decode(cls, content: RecordDict, params: Params, sender: str) -> Self:
        record = content.array_records.get("packs")
        packs = cls({} if record is None else decode(record, "packs"))
        packs.check(params)
        return packs

    @override
    def encode(self) -> dict[str, ArrayRecord]:
        return super().encode() if self.packs else {}

    @property
    @override
    def on_initial(self) -> bool:
        return "initial" in self.packs

    @override
    def check_initial(self, model: Params) -> None:
        if self.on_initial and not torch.equal(digest(model), self.packs["initial"].cpu()):
            raise StateLostError("the model as built here isn't the run's initial model; the server will send it")

    @override
    def check(self, params: Params) -> None:
        if self.packs:
            check_packs({n: t for n, t in self.packs.items() if n != "initial"}, params, ("index", "value"))


@dataclass(frozen=True)
class CspackUpdate(Payload):
    """A client's packs: ``index`` int32 (K,), ``weight`` float32 (K,), ``value`` (K, B)."""

    packs: Mapping[str, torch.Tensor]
    per_parameter = False

    @override
    def check(self, params: Params) -> None:
        check_packs(self.packs, params, ("index", "weight", "value"))


def check_packs(packs: Mapping[str, torch.Tensor], params: Params, names: tuple[str, ...]) -> None:
    """Check names, shapes, dtypes, order and numbers of packs.

    Raises:
        PayloadError: The first thing that is wrong.
    """
    if set(packs) != set(names):
        raise PayloadError(
            f"packs: expected the arrays {', '.join(names)}, but got {', '.join(sorted(packs)) or 'none'}"
        )
    index, value = packs["index"], packs["value"]
    if index.dtype != torch.int32 or index.ndim != 1 or value.ndim != 2 or len(value) != len(index):
        raise PayloadError(
            f"packs: expected index int32 [K] and value [K, B], but got {index.dtype} {list(index.shape)} and"
            f" {list(value.shape)}"
        )
    size = sum(p.numel() for p in params.values())
    if not value.shape[1] or not value.is_floating_point() or not is_finite(value):
        raise PayloadError(f"packs/value: expected finite floating numbers, [K, B] with B > 0, got {list(value.shape)}")
    count = num_packs(size, value.shape[1])
    if len(index) and (int(index.min()) < 0 or int(index.max()) >= count or bool((index[1:] <= index[:-1]).any())):
        raise PayloadError(f"packs/index: expected ascending pack numbers from 0 to {count - 1}")
    if "weight" in packs:
        weight = packs["weight"]
        if weight.shape != index.shape or weight.dtype != torch.float32:
            raise PayloadError(f"packs/weight: expected float32 {list(index.shape)}, but got {list(weight.shape)}")
        if not is_finite(weight) or bool((weight <= 0).any()):
            raise PayloadError("packs/weight: expected finite numbers > 0")


@dataclass(frozen=True, kw_only=True)
class CspackState(ServerState):
    """The model, the versions of its packs, and who has which.

    Attributes:
        generation: How often the model has changed, from 0.
        versions: ``{"packs": int64 (P,)}``: the generation in which each pack last changed.
        synced: Client id -> generation of the model it had when it last replied.
        initial: ``{"sha256": uint8 (32,)}`` of x_0.
    """

    generation: int
    versions: Mapping[str, torch.Tensor]
    synced: Mapping[str, int]
    initial: Mapping[str, torch.Tensor]


def digest(model: Params) -> torch.Tensor:
    """The SHA-256 of a whole model, buffers and frozen parameters included, as it is in memory; uint8 (32,)."""
    sha256 = hashlib.sha256()
    for name in sorted(model):
        sha256.update(name.encode())
        sha256.update(model[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return torch.frombuffer(bytearray(sha256.digest()), dtype=torch.uint8)


def rounded(value: torch.Tensor, dtype: PackDtype) -> torch.Tensor:
    """Packs as they travel; what is beyond the range of ``dtype`` becomes its largest number."""
    if dtype == "model":
        return value
    largest = torch.finfo(getattr(torch, dtype)).max
    return value.clamp(-largest, largest).to(getattr(torch, dtype))


class FedCSPACK(FedStrategy[CspackState, CspackUpdate]):
    """A fraction of FedAvg's bytes, and a personal model per client."""

    payload = CspackUpdate
    sends_model = False
    stateful_clients = True
    evaluate_personal = True
    evaluate_in_train = False  # packs travel, not the model

    pack_size: int = hyper(default=1024, ge=1, symbol="B", doc="parameters in a pack")
    top_k: int | None = hyper(default=None, ge=1, symbol="K", doc="largest number of packs a client sends")
    keep_ratio: float | None = hyper(default=None, gt=0.0, le=1.0, doc="the same as a share of all packs")
    weights: Weights = hyper(default="dual", symbol="M", doc="weight of a pack; full sends all packs with weight 1")
    kl_temperature: float = hyper(default=1.0, gt=0.0, symbol="T", doc="temperature of the divergence")
    downlink: Literal["synced", "mask", "dense"] = hyper(default="synced", doc="what travels to a client")
    initial_model: Literal["wire", "seed"] = hyper(
        default="wire", doc="whether x_0 travels, or clients build it from the run's seed and only its digest travels"
    )
    pack_dtype: PackDtype = hyper(default="model", doc="numbers of the packs on the wire, both ways")
    error_feedback: bool = hyper(default=False, doc="whether what wasn't sent is added to what is sent later")

    @override
    def check_settings(self) -> None:
        if self.top_k is not None and self.keep_ratio is not None:
            raise ConfigError("FedCSPACK: give top_k or keep_ratio, not both")
        if self.downlink == "dense" and self.initial_model == "seed":
            raise ConfigError(
                "FedCSPACK: downlink 'dense' sends the model in every round; initial_model must be 'wire'"
            )
        if self.downlink == "mask" and self.error_feedback:
            raise ConfigError("FedCSPACK: downlink 'mask' uploads weights; error_feedback needs 'synced' or 'dense'")

    @override
    def check_update(self, extra: CspackUpdate) -> None:
        size = extra.packs["value"].shape[1]
        if size != self.pack_size:
            raise PayloadError(f"packs/value: expected packs of {self.pack_size} numbers, but got {size}")
        dtype = extra.packs["value"].dtype
        if self.pack_dtype != "model" and dtype != getattr(torch, self.pack_dtype):
            raise PayloadError(f"packs/value: expected {self.pack_dtype}, but got {str(dtype).removeprefix('torch.')}")

    @override
    def init_state(self, params: Params) -> CspackState:
        count = num_packs(sum(p.numel() for p in params.values()), self.pack_size)
        if count == 1:
            logger.warning(
                "FedCSPACK: the model is one pack of %d and will never move; lower pack_size", self.pack_size
            )
        versions = {"packs": torch.zeros(count, dtype=torch.int64)}
        initial = {"sha256": digest({**params, **self.buffers})}
        return CspackState(params=params, generation=0, versions=versions, synced={}, initial=initial)

    @override
    def forget(self, state: CspackState, client: str) -> CspackState:
        return dataclasses.replace(state, synced={**state.synced, client: _NEEDS_MODEL})

    @property
    @override
    def pack_content(self) -> str:
        return "weights" if self.downlink == "mask" else "delta"

    @override
    def broadcast(self, state: CspackState, client: str) -> Broadcast[CspackBroadcast]:
        first = client not in state.synced
        had = state.synced.get(client, _FIRST_CONTACT if self.initial_model == "seed" else _NEEDS_MODEL)
        if self.downlink == "dense" or had == _NEEDS_MODEL:
            return Broadcast(state.params, CspackBroadcast({}))
        since = had if self.downlink == "synced" or first else state.generation - 1
        index = torch.nonzero(state.versions["packs"] > since).flatten()
        value = rounded(to_packs(state.params, self.pack_size)[index], self.pack_dtype)
        initial = {"initial": state.initial["sha256"]} if first else {}
        return Broadcast(None, CspackBroadcast({"index": index.to(torch.int32), "value": value, **initial}))

    @override
    def grams(self, state: CspackState, updates: Sequence[Update[CspackUpdate]]) -> dict[str, torch.Tensor]:
        x = to_packs(state.params, self.pack_size)
        return {"packs": gram(x, self._packs(x, updates), content=self._content)}

    @property
    def _content(self) -> Literal["delta", "weights"]:
        return "weights" if self.downlink == "mask" else "delta"

    def _packs(
        self, x: torch.Tensor, updates: Sequence[Update[CspackUpdate]]
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        sent = [(u.extra.packs["index"], u.extra.packs["weight"], u.extra.packs["value"]) for u in updates]
        if self.max_update_norm is not None:
            sent = [clip(x, *packs, max_norm=self.max_update_norm, content=self._content) for packs in sent]
        return sent

    @override
    def aggregate(self, state: CspackState, updates: Sequence[Update[CspackUpdate]]) -> CspackState:
        x = to_packs(state.params, self.pack_size)
        packs, changed = merge(x, self._packs(x, updates), content=self._content)
        generation = state.generation + 1
        versions = torch.where(changed, generation, state.versions["packs"])
        self.note(packs_changed=int(changed.sum()), packs=len(changed))
        return CspackState(
            params=from_packs(packs, state.params),
            generation=generation,
            versions={"packs": versions},
            # Whoever replied had the model of the generation before this step.
            synced={**state.synced, **{u.client: state.generation for u in updates}},
            initial=state.initial,
        )


@dataclass
class FedCSPACKRule(LocalRule[CspackBroadcast, CspackUpdate]):
    """Trains the personal model; sends the packs that turned away most from the global ones."""

    pack_size: int
    weights: Weights
    kl_temperature: float
    downlink: str
    pack_dtype: PackDtype
    error_feedback: bool
    top_k: int | None = None
    keep_ratio: float | None = None
    receives = CspackBroadcast
    keeps_state = True
    sends_model = False
    local_settings = ("top_k", "keep_ratio")

    @override
    def start(self, received: CspackBroadcast, state: Tensors | None) -> None:
        self.known = to_packs(self.params, self.pack_size)
        # Without packs the whole model was loaded. Without state there is nothing to write them to: the client lost
        # it, and its reply will say just that; unless they change the initial model.
        if received.packs and (state is not None or received.on_initial):
            personal = self.known.clone()
            if state is not None:
                self.known = state["known"].to(personal.device).clone()
            index, value = received.packs["index"].long(), received.packs["value"].to(personal.dtype)
            self.known[index] = personal[index] = value
            with torch.no_grad():
                for name, w in from_packs(personal, self.params).items():
                    self.params[name].copy_(w)
        if self.error_feedback:
            self.begun = to_packs(self.params, self.pack_size)
            self.unsent = torch.zeros_like(self.begun) if state is None else state["unsent"].to(self.begun.device)

    @override
    def finish(self) -> tuple[CspackUpdate, Tensors]:
        w, x = to_packs(self.params, self.pack_size), self.known
        if self.error_feedback:
            e = self.unsent + (w - self.begun)
            w = x + e
        chosen = select(
            w,
            x,
            top_k=self.top_k,
            keep_ratio=self.keep_ratio,
            weights=self.weights,
            kl_temperature=self.kl_temperature,
        )
        rows = chosen.index.long()
        value = rounded(w[rows] if self.downlink == "mask" else w[rows] - x[rows], self.pack_dtype)
        update = CspackUpdate({"index": chosen.index, "weight": chosen.weight, "value": value})
        state = {"known": x, **self.personal_model()}
        if self.error_feedback:
            e[rows] -= value.to(e.dtype)  # what rounding takes away stays here, too
            state["unsent"] = e
        return update, state
