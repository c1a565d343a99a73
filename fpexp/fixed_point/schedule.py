"""Schedules of the cap l_max on whole-sequence iterations (paper sec. 3.4). Not the learning rate's."""

from __future__ import annotations

import math
from typing import Annotated, Protocol

import torch

from fpexp.fixed_point.types import Cap
from fpexp.ranges import Count, Positive, Range


class Schedule(Protocol):
    """Gives the cap of a training step and of an evaluation."""

    caps_training: bool
    """True where the schedule limits iterations on purpose, which only whole-sequence solvers can obey."""

    def training_cap(self, length: int, generator: torch.Generator) -> Cap:
        """Return the cap of one training step; all micro-batches and ranks share the generator's seed."""
        ...

    def evaluation_cap(self) -> Cap:
        """Return the cap in evaluation."""
        ...


class Converge:
    """Iterate to the tolerance, under a generous cap."""

    caps_training = False

    def __init__(self, *, max_iterations: Count = 100, evaluation_max_iterations: Count = 1000) -> None:
        self.max_iterations, self.evaluation_max_iterations = max_iterations, evaluation_max_iterations

    def training_cap(self, length: int, generator: torch.Generator) -> Cap:
        """Return the same cap at every step."""
        return Cap(self.max_iterations)

    def evaluation_cap(self) -> Cap:
        """Return the cap in evaluation."""
        return Cap(self.evaluation_max_iterations)


class Fixed:
    """The same cap at every training step; without `stop_early` exactly that many iterations are made."""

    caps_training = True

    def __init__(
        self, *, max_iterations: Count, stop_early: bool = True, evaluation_max_iterations: Count = 1000
    ) -> None:
        self.max_iterations, self.stop_early = max_iterations, stop_early
        self.evaluation_max_iterations = evaluation_max_iterations

    def training_cap(self, length: int, generator: torch.Generator) -> Cap:
        """Return the same cap at every step."""
        return Cap(self.max_iterations, self.stop_early)

    def evaluation_cap(self) -> Cap:
        """Return the cap in evaluation, which iterates to the tolerance."""
        return Cap(self.evaluation_max_iterations)


MOST = 1e6
"""Mean of the caps that may be asked for."""


class Gamma:
    """A cap drawn at each step: ceil(G), G ~ Gamma(shape, mean + mean_per_token * T) by its mean."""

    caps_training = True

    def __init__(
        self,
        *,
        shape: Positive = 4.0,
        mean: Annotated[float, Range(above=0, maximum=MOST)] = 4.0,
        mean_per_token: Annotated[float, Range(minimum=0, maximum=MOST)] = 0.0,
        evaluation_max_iterations: Count = 1000,
    ) -> None:
        self.shape, self.mean, self.mean_per_token = shape, mean, mean_per_token
        self.evaluation_max_iterations = evaluation_max_iterations

    def training_cap(self, length: int, generator: torch.Generator) -> Cap:
        """Draw the cap of one step."""
        shape = torch.tensor([self.shape], dtype=torch.float64)
        draw = torch._standard_gamma(  # the public samplers take no generator
            shape, generator=generator
        ).item()
        mean = self.mean + self.mean_per_token * length
        return Cap(max(1, math.ceil(draw * mean / self.shape)))

    def evaluation_cap(self) -> Cap:
        """Return the cap in evaluation, which iterates to the tolerance."""
        return Cap(self.evaluation_max_iterations)
