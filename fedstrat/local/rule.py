"""LocalRule: what an algorithm does on the client, as hooks of one loop.

The hooks in the order in which they run; all but ``start`` and ``finish`` are no-ops by default:

    start(params, received, state)       once, after the received model was loaded
      per batch:
        loss(model, x, y, loss_fn)       the objective (in a loop of one's own: session.loss)
        backward(again)                  after the gradient g_i(y) is there; SAM's second pass lives here
          + weight decay, then clipping  done by RuleOptimizer: on the raw gradient, before any correction
        correct_gradients()              control variates, proximal term, mixing with a direction
          base optimizer's step
        after_step()
      per epoch:
        should_stop(full_gradient)       gamma-inexact stopping
    finish() -> (payload, next_state)    what travels beside the model, and what this client remembers

Weight decay is added to the raw gradient, and the raw gradient is clipped, BEFORE the correction: after it, the
identities behind SCAFFOLD's option 2 and FedVSSAM's server step would break.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import torch

Tensors: TypeAlias = Mapping[str, torch.Tensor]
_HOOKS = (
    "start", "loss", "backward", "correct_gradients", "after_step", "should_stop", "prepare", "train_personal",
    "finish",
)  # fmt: skip
LossFunction: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
FullGradient: TypeAlias = Callable[[], Tensors]

PERSONAL = "personal/"
"""Prefix of a client's own model in its state."""

Received = TypeVar("Received")
Sent = TypeVar("Sent")


@dataclass
class LocalRule(Generic[Received, Sent]):
    """Base of the local rules. A subclass is a dataclass whose fields are the hyper-parameters it needs.

    Attributes:
        params: The model's trainable parameters by name, live.
        buffers: Everything else of the model, live.
        initial: Their values as received, x (detached copies; only where ``keeps_initial``).
        sent: At :meth:`finish`, the parameters as the server will have them: y_i, or rounded (``update_dtype``).
        num_steps: Local steps taken so far, K_i (a step that a GradScaler skipped doesn't count).
        lr_sums: Per parameter, the sum of the learning rates of those steps.
        weight_decays: Per parameter, lambda of the optimizer, which is part of f_i.
        momentum: Momentum of the optimizer, where it is SGD.
    """

    receives: ClassVar[type[Any] | None] = None
    """Payload type that comes beside the model; None where nothing does."""
    keeps_state: ClassVar[bool] = False
    """Whether the client remembers something that depends on what the server accepted."""
    sends_model: ClassVar[bool] = True
    """Whether the trained model travels; otherwise the rule's payload stands for it."""
    local_settings: ClassVar[tuple[str, ...]] = ()
    """Fields that a node may set for itself in its node config."""
    passes: ClassVar[int] = 1
    """Gradient evaluations of a step; 2 needs ``optimizer.step(closure)``."""
    keeps_initial: ClassVar[bool] = False
    """Whether the rule needs a copy of the received parameters."""
    acts_on_all: ClassVar[bool] = False
    """Whether it moves every parameter, also those that the batch's loss doesn't reach."""
    refuses_momentum: ClassVar[str | None] = None
    """Why the base optimizer must be SGD without momentum; None where any optimizer will do."""
    needs_sgd: ClassVar[str | None] = None
    """Why the base optimizer must be SGD, with heavy-ball momentum at most; None where any optimizer will do."""
    one_lr: ClassVar[bool] = False
    """Whether all parameters must share one learning rate, because the server divides by its sum."""
    done = False
    """Whether there is nothing to train: the received model already solves the local problem."""

    @classmethod
    def is_plain(cls) -> bool:
        """Whether it is plain training, which any client does: no hook is overridden."""
        return all(getattr(cls, hook) is getattr(LocalRule, hook) for hook in _HOOKS)

    def begin(
        self, params: dict[str, torch.nn.Parameter], buffers: Tensors, received: Received, state: Tensors | None
    ) -> None:
        """Called by the session: keep what every rule needs, then :meth:`start`."""
        self.params = params
        self.sent: Tensors = params
        self.buffers = buffers
        self.num_steps = 0
        self.lr_sums = dict.fromkeys(params, 0.0)
        self.weight_decays = dict.fromkeys(params, 0.0)
        self.momentum = 0.0
        # Detached copies, not a generator: they are read at every step.
        self.initial = {n: p.detach().clone() for n, p in params.items()} if self.keeps_initial else {}
        self.start(received, state)

    @property
    def needs_calls(self) -> tuple[str, ...]:
        """Session calls that a training loop must make: full_gradient, should_stop, loss_before, train_personal."""
        return ()

    @property
    def lr_sum(self) -> float:
        """Lambda_i, the sum of the learning rates of the steps taken."""
        return max(self.lr_sums.values(), default=0.0)

    def start(self, received: Received, state: Tensors | None) -> None:
        """Take what came beside the model, and this client's state (None at its first participation)."""

    def loss(self, model: torch.nn.Module, x: Any, y: Any, loss_fn: LossFunction) -> torch.Tensor:
        """Return the objective of one batch."""
        return loss_fn(model(x), y)

    def backward(self, again: Callable[[], None]) -> None:
        """Change ``p.grad`` after the first pass; ``again()`` evaluates it anew on the same batch."""

    def correct_gradients(self) -> None:
        """Correct ``p.grad`` after weight decay and clipping."""

    def after_step(self) -> None:
        """Called after the base optimizer's step."""

    def should_stop(self, full_gradient: FullGradient) -> bool:
        """Whether to stop at this epoch's end; ``full_gradient()`` is the gradient over all local data."""
        del full_gradient
        return False

    def prepare(self, full_gradient: FullGradient) -> None:
        """Called before the first step where ``needs_calls`` holds ``full_gradient``."""

    def metrics(self) -> dict[str, float]:
        """Return numbers that the server's half needs, such as FedNova's ``step-norm``."""
        return {}

    def train_personal(
        self, model: torch.nn.Module, loader: Iterable[Any], loss_fn: LossFunction, **training: float
    ) -> None:
        """Train this client's own model where ``needs_calls`` holds ``train_personal``; ``model`` ends as it began."""

    def personal_model(self) -> dict[str, torch.Tensor]:
        """The model as it is now, as entries ``personal/<name>`` of a client's state."""
        return {f"{PERSONAL}{n}": t.detach().clone() for n, t in {**self.params, **self.buffers}.items()}

    def finish(self) -> tuple[Sent | None, Tensors | None]:
        """Return what travels beside the model, and the next state (None: nothing of either)."""
        return None, None

    def with_decay(self, gradient: Tensors, at: Tensors) -> dict[str, torch.Tensor]:
        """Return ``gradient + lambda y``: the gradient of f_i with its weight decay, at ``at``."""
        return {n: g.add(at[n].detach(), alpha=self.weight_decays[n]) for n, g in gradient.items()}

    @property
    def trainable(self) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """(name, parameter, gradient) of every parameter that has a gradient."""
        return [(n, p, p.grad) for n, p in self.params.items() if p.grad is not None]


def global_norm(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One L2 norm over all tensors together, as a 0-dim tensor (no host sync)."""
    if not tensors:
        return torch.zeros(())
    norms = torch._foreach_norm(tensors)  # noqa: SLF001 - the fused form
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm
