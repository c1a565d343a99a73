"""Is what a solver found a solution, and are the gradients right? Asked of the reference backends in float64."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fpexp.bench.measure import Check
from fpexp.evaluation.metrics import summed_loss
from fpexp.fixed_point import Cap, SolveResult
from fpexp.fixed_point.iterate import token_residual
from fpexp.models import LanguageModel
from fpexp.ops.backend import only_reference
from fpexp.tasks import Batch

RESIDUAL_LIMIT = 1e-3
"""Largest error of a reported residual, absolute below 1 and relative above: a hundredth of the paper's tolerance."""

GRADIENT_LIMIT = 1e-3
LOSS_LIMIT = 1e-5


class Given:
    """Stands in for a layer's solver: hands back what another one found.

    A solver reports the residual of the iterate that it returns. `errors` are how far those are from the residuals
    that this layer's own evaluation of f finds there. Two solvers or two roundings may stop elsewhere, or at different
    solutions, without one of them being wrong; a wrong evaluation cannot report the right residual.
    """

    whole_sequence = False

    def __init__(self, found: SolveResult, kind: str) -> None:
        self.found, self.kind = found, kind
        self.errors: list[float] = []

    def solve(self, problem: Any, cap: Cap, *, training: bool) -> SolveResult:
        """Return the given result in the type of the problem."""
        del cap, training
        self.errors.append(residual_error(problem, self.found, self.kind))
        return dataclasses.replace(self.found, value=self.found.value.to(problem.start().dtype))


@torch.no_grad()
def residual_error(problem: Any, found: SolveResult, kind: str) -> float:
    """Return the largest error of the reported residuals, by the problem's evaluation of f."""
    value = found.value.to(problem.start().dtype)
    tokens = token_residual(problem.evaluate(value), value, kind)
    if problem.mask is not None:
        tokens = tokens.masked_fill(~problem.mask, 0.0)
    residual = tokens.amax(-1)
    return float(((residual - found.residual) / residual.clamp_min(1.0)).abs().max())


def solving_layers(model: nn.Module) -> list[Any]:
    """Return the layers that solve a fixed point, in the order of their solves."""
    return [module for module in model.modules() if hasattr(module, "solver")]


@dataclass(frozen=True)
class Posed:
    """The fixed-point problem that a layer poses at its input `u` (B, T, d_model)."""

    layer: Any
    u: Tensor

    @torch.no_grad()
    def problem(self) -> Any:
        """Return the problem as the model computes it."""
        return self.layer.problem(self.u)

    @torch.no_grad()
    def check(self, found: SolveResult, kind: str) -> Check:
        """Hold the residuals of a solve against the reference evaluation in float64."""
        exact = copy.deepcopy(self.layer).double().problem(self.u.double())
        with only_reference():
            return Check("error of the reported residual", residual_error(exact, found, kind), RESIDUAL_LIMIT)


@torch.no_grad()
def posed(model: LanguageModel, tokens: Tensor) -> list[Posed]:
    """Return what each solving layer is asked when the model reads these tokens, its own solvers below it."""
    found: list[Posed] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, inputs: found.append(Posed(layer, inputs[0])))
        for layer in solving_layers(model)
    ]
    try:
        model(tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def step_checks(model: LanguageModel, batch: Batch, cap: Cap) -> list[Check]:
    """Compare the loss and the gradients of a training step with the reference's, at the fixed points of `model`."""
    layers = solving_layers(model)
    exact = copy.deepcopy(model).double()
    was_training = model.training
    model.eval()  # no dropout: it would draw other numbers
    output, loss, gradients = _step(model, batch, cap)
    model.train(was_training)
    given = [Given(solve, layer.solver.tolerance_kind) for solve, layer in zip(output.solves, layers, strict=True)]
    for layer, solver in zip(solving_layers(exact), given, strict=True):
        layer.solver = solver
    with only_reference():
        _, exact_loss, exact_gradients = _step(exact.eval(), batch, cap)
    errors = [error for solver in given for error in solver.errors]
    return [
        *([Check("error of the reported residual", max(errors), RESIDUAL_LIMIT)] if errors else []),
        Check(
            "error of the loss", abs(loss - exact_loss) / max(1.0, abs(exact_loss)), LOSS_LIMIT
        ),  # a trained one is 0
        Check("relative error of a gradient", max(_errors(gradients, exact_gradients)), GRADIENT_LIMIT),
    ]


def _step(model: LanguageModel, batch: Batch, cap: Cap) -> tuple[Any, float, list[Tensor]]:
    output = model(batch.inputs, cap, batch.mask)
    loss = summed_loss(output.logits, batch.targets) / batch.scored
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return output, float(loss.detach()), list(torch.autograd.grad(loss, parameters, materialize_grads=True))


def _errors(gradients: Sequence[Tensor], exact: Sequence[Tensor]) -> Iterator[float]:
    """|g - exact| / |exact| of each parameter; one that hardly counts in the whole gradient is not held to itself."""
    least = 1e-3 * float(torch.stack([g.norm() for g in exact]).norm())
    for g, e in zip(gradients, exact, strict=True):
        yield float((g.double() - e).norm() / e.norm().clamp_min(least))
