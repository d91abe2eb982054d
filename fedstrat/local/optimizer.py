"""RuleOptimizer: a torch Optimizer whose ``step`` runs the hooks of a local rule."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from fedstrat.errors import RuleError
from fedstrat.local.rule import LocalRule, global_norm

_PLAIN_SGD = torch.optim.SGD


class RuleOptimizer(torch.optim.Optimizer):
    """Wraps a base optimizer and runs raw gradient -> weight decay -> clip -> the rule's correction -> step.

    Args:
        base: Steps with the corrected gradients. Its ``weight_decay`` is taken over, if it is SGD.
        rule: The algorithm's local rule, already begun.
        weight_decay: lambda, added to the raw gradient as ``lambda y``; >= 0.
        clip_norm: Bound of the raw gradient's global norm; 0 is off.
        buffers: The model's buffers; a second pass leaves them as the first left them.

    Raises:
        RuleError: The rule can't honour this base optimizer; the message says why.
    """

    def __init__(
        self,
        base: torch.optim.Optimizer,
        rule: LocalRule[Any, Any],
        *,
        weight_decay: float = 0.0,
        clip_norm: float = 0.0,
        buffers: list[torch.Tensor] | None = None,
    ) -> None:
        self._check(base, rule)
        self.base, self.rule, self.clip_norm, self.buffers = base, rule, clip_norm, buffers or []
        self.weight_decay = weight_decay
        self._names = {id(p): n for n, p in rule.params.items()}
        for group in base.param_groups:
            self._take(group)
        rule.momentum = float(base.param_groups[0].get("momentum", 0.0))
        held = {id(p) for group in base.param_groups for p in group["params"]}
        missing = [n for n, p in rule.params.items() if id(p) not in held]
        if missing and rule.acts_on_all:
            raise RuleError(
                f"{type(rule).__name__} acts on every trainable parameter, but the optimizer lacks {missing[:3]};"
                " give it all of them, or freeze them"
            )
        super().__init__(base.param_groups, {})
        self._share()

    def _take(self, group: dict[str, Any]) -> None:
        """Take a group's weight decay over: the base's own would come after the correction."""
        for p in group["params"]:
            if p.requires_grad and id(p) not in self._names:
                raise RuleError(
                    "the optimizer holds a parameter that the session's model doesn't have, or that isn't among the"
                    " names that are exchanged"
                )
        taken = group.get("weight_decay", 0.0) if isinstance(self.base, _PLAIN_SGD) else 0.0
        if taken:
            group["weight_decay"] = 0.0
        group.setdefault("rule_weight_decay", self.weight_decay or taken)
        for p in group["params"]:
            if id(p) in self._names:
                self.rule.weight_decays[self._names[id(p)]] = group["rule_weight_decay"]

    def _share(self) -> None:
        # Shared with the base, so that schedulers and scalers act on both.
        self.param_groups = self.base.param_groups
        self.state = self.base.state

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "rule_weight_decay" in param_group:  # one of the base's own, while torch sets this object up
            super().add_param_group(param_group)
            return
        self.base.add_param_group(param_group)
        self._take(self.base.param_groups[-1])
        self._share()

    @override
    def state_dict(self) -> dict[str, Any]:
        return self.base.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.base.load_state_dict(state_dict)
        self._share()

    @staticmethod
    def _check(base: torch.optim.Optimizer, rule: LocalRule[Any, Any]) -> None:
        groups = base.param_groups
        why = rule.refuses_momentum
        if why is not None:
            plain = isinstance(base, _PLAIN_SGD) and all(
                not g.get("momentum") and not g.get("maximize") for g in groups
            )
            if not plain:
                raise RuleError(
                    f"{type(rule).__name__} needs torch.optim.SGD without momentum, but got {type(base).__name__} with"
                    f" momentum {groups[0].get('momentum', 'of its own')}: {why}; use momentum 0"
                )
        if rule.needs_sgd is not None:
            heavy_ball = isinstance(base, _PLAIN_SGD) and not any(
                g.get("nesterov") or g.get("dampening") or g.get("maximize") for g in groups
            )
            if not heavy_ball or len({g["momentum"] for g in groups}) > 1:
                raise RuleError(
                    f"{type(rule).__name__} needs torch.optim.SGD with one momentum for all parameters and without"
                    f" nesterov, dampening and maximize, but got {type(base).__name__}: {rule.needs_sgd}"
                )
        RuleOptimizer._check_lr(groups, rule)

    @staticmethod
    def _check_lr(groups: list[dict[str, Any]], rule: LocalRule[Any, Any]) -> None:
        if rule.one_lr and len({float(g["lr"]) for g in groups}) > 1:
            raise RuleError(
                f"{type(rule).__name__} needs one learning rate for all parameters, since the server divides each"
                f" client's displacement by its sum, but the groups have {[float(g['lr']) for g in groups]}"
            )

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self._params():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def _params(self) -> Iterator[torch.nn.Parameter]:
        for group in self.param_groups:
            yield from group["params"]

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one local step.

        Args:
            closure: Returns the batch's loss, and may have called ``backward`` itself. Gradients are cleared first.
                Rules of one pass also take no closure, after ``loss.backward()``.

        Returns:
            What the closure returned at the first pass, or None.

        Raises:
            RuleError: The rule needs two passes and no closure was given, or no gradient appeared.
        """
        loss = None
        if closure is None:
            if self.rule.passes > 1:
                raise RuleError(
                    f"{type(self.rule).__name__} evaluates each batch twice; call optimizer.step(lambda:"
                    " loss_fn(model(x), y)), without loss.backward(), and without a GradScaler"
                )
        else:
            with self._replayable() as replay:
                loss = self._evaluate(closure)

                def again() -> None:
                    # Autocast would hand the second pass the weights that it cast in the first.
                    torch.clear_autocast_cache()
                    with replay():
                        self._evaluate(closure)
                        self._fill()
                    torch.clear_autocast_cache()

                with torch.no_grad():
                    self._fill()
                    self.rule.backward(again)
        with torch.no_grad():
            self._fill()
            self._decay_and_clip()
            self.rule.correct_gradients()
        self._check_lr(self.param_groups, self.rule)  # a scheduler may have parted them
        self.base.step()
        self._count()
        self.rule.after_step()
        return loss

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
            if all(p.grad is None for p in self._params()):
                if not isinstance(loss, torch.Tensor) or not loss.requires_grad:
                    raise RuleError(
                        "optimizer.step(closure): expected the closure to return the loss, or to call loss.backward()"
                        f" itself, but it returned {type(loss).__name__} and no gradient appeared"
                    )
                torch.autograd.backward(loss)
        return loss

    @contextmanager
    def _replayable(self) -> Iterator[Callable[[], Any]]:
        """Let a second pass see the same dropout masks, and keep running statistics to the first pass."""
        if self.rule.passes == 1:
            yield lambda: None
            return
        devices = sorted({p.device.index or 0 for p in self._params() if p.device.type == "cuda"})
        before = [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]

        @contextmanager
        def replay() -> Iterator[None]:
            statistics = [b.clone() for b in self.buffers]
            torch.set_rng_state(before[0])
            for device, state in zip(devices, before[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            for buffer, value in zip(self.buffers, statistics, strict=True):
                buffer.copy_(value)

        yield replay

    def _fill(self) -> None:
        # A parameter outside of this batch's graph has gradient 0, and still gets the rule's direction.
        for p in self._params() if self.rule.acts_on_all else ():
            if p.grad is None and p.requires_grad:
                p.grad = torch.zeros_like(p)

    def _decay_and_clip(self) -> None:
        for group in self.param_groups:
            decay = group["rule_weight_decay"]
            if decay:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.add_(p, alpha=decay)
        if self.clip_norm:
            grads = [p.grad for p in self._params() if p.grad is not None]
            if grads:
                norm = global_norm(grads)
                # As torch.nn.utils.clip_grad_norm_, but without its 1e-6: a gradient of norm clip_norm stays as it is.
                scale = torch.clamp(self.clip_norm / norm, max=1.0)
                torch._foreach_mul_(grads, torch.where(norm > 0, scale, torch.ones_like(scale)))

    def _count(self) -> None:
        self.rule.num_steps += 1
        for group in self.param_groups:
            for p in group["params"]:
                name = self._names.get(id(p))
                if name is not None:
                    self.rule.lr_sums[name] += float(group["lr"])
