"""The one training loop. It knows tasks by their batches and models by their logits."""

from __future__ import annotations

import dataclasses
import math
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpexp.build import Experiment
from fpexp.errors import FpexpError, Interrupted
from fpexp.evaluation.length_curve import evaluate_length
from fpexp.evaluation.metrics import Accuracy, LayerStatistics, summed_loss
from fpexp.machine import autocast
from fpexp.randomness import derive_seed, generator
from fpexp.run_folder import RunFolder
from fpexp.tasks import Batch, HeldOut
from fpexp.tracking.tracker import Tracker
from fpexp.training import checkpoint
from fpexp.training.batches import Batches
from fpexp.training.distributed import Replicas, gradient_norm, micro_batches
from fpexp.training.interruption import Interruption
from fpexp.training.optimizer import learning_rate, make_optimizer
from fpexp.world import ALONE, World

MAX_SKIPPED_IN_A_ROW = 20
"""With training.non_finite=skip, so many bad steps without a good one between them end the run."""


@dataclass
class Progress:
    """Where training stands; saved with every checkpoint."""

    step: int = 0  # optimiser steps done, skipped ones included; also the position in the data
    seconds: float = 0.0  # of training, over all sittings
    validated_at: int = -1
    best_accuracy: float = -1.0
    best_loss: float | None = None  # at that accuracy
    skipped: int = 0
    skipped_in_a_row: int = 0
    stopped_early: bool = False


class Trainer:
    """Trains an experiment's model in place, logging, validating and saving as its config says.

    Of several processes each reads the same batches and takes its rows; what it then knows of a step or a validation
    are the numbers of the whole batch, so all decide alike.
    """

    def __init__(
        self,
        experiment: Experiment,
        run: RunFolder,
        tracker: Tracker,
        interruption: Interruption,
        world: World = ALONE,
    ) -> None:
        self.experiment, self.run, self.tracker, self.interruption = experiment, run, tracker, interruption
        self.world = world
        self.config = experiment.config.training
        self.model = experiment.model
        self.replicas = Replicas(self.model, experiment.config, world)
        self.optimizer = make_optimizer(self.model, self.config)
        self.batches = Batches(experiment.task, self.config.batch_size, experiment.config.seed)
        self.progress = Progress()
        self._saved: Progress | None = None  # as it was when it was last saved
        torch.manual_seed(derive_seed(experiment.config.seed, "dropout"))

    def restore(self, saved: checkpoint.Checkpoint) -> None:
        """Go on from a checkpoint."""
        saved.load_model(self.model)
        saved.load_optimizer(self.optimizer)
        saved.load_randomness()
        self.batches.load_state_dict(saved.state)
        self.progress = Progress(**saved.state["progress"])
        self._saved = dataclasses.replace(self.progress)

    def fit(self) -> None:
        """Train to the end. On a signal the state is saved before `Interrupted` goes on."""
        self.model.train()
        with closing(self.batches):
            self._fit()

    def _fit(self) -> None:
        try:
            while True:
                if self._validation_due():
                    self._validate()
                if self._done():
                    break
                if self._save_due():
                    self.save()
                self.interruption.check()
                self._train_one_step()
        except Interrupted:
            self.save()
            raise
        self.save()

    def save(self) -> None:
        """Write a checkpoint of the present step and drop the old ones; weights that are not finite are refused.

        Where nothing has happened since the last one, that one stays.
        """
        if self.progress == self._saved:
            return
        tensors = checkpoint.collect(self.model, self.optimizer, keep=self.world.is_first)
        self.world.by_first(lambda: self._write(tensors))
        self._saved = dataclasses.replace(self.progress)

    def _write(self, tensors: dict[str, Tensor]) -> None:
        if bad := checkpoint.first_non_finite(checkpoint.weights_of(tensors)):
            raise FpexpError(f"step {self.progress.step}: {bad} is not finite and was not saved; lower training.lr")
        state = {"progress": vars(self.progress), **self.batches.state_dict()}
        checkpoint.write(self.run.checkpoints, self.progress.step, tensors, state)
        checkpoint.prune(self.run.checkpoints, self.config.keep_checkpoints)

    def _validation_due(self) -> bool:
        step = self.progress.step
        due = step % self.config.evaluate_every == 0 or step >= self.config.steps
        return due and step > 0 and self.progress.validated_at != step

    def _save_due(self) -> bool:
        return self.progress.step > 0 and self.progress.step % self.config.checkpoint_every == 0

    def _done(self) -> bool:
        return self.progress.step >= self.config.steps or self.progress.stopped_early

    def _train_one_step(self) -> None:
        began = time.monotonic()
        step = self.progress.step
        batch, length = self._next_batch()
        lr = learning_rate(self.config, step)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if not self.world.is_alone:  # each process its own dropout; by the step, so that a resumed run has it again
            torch.manual_seed(derive_seed(self.experiment.config.seed, f"dropout of {self.world.rank}", step))
        accuracy, statistics = self._accumulate(batch)
        norm = gradient_norm(self.model, math.inf if self.config.clip is None else self.config.clip)
        summary = accuracy.summary()
        loss = summary["loss"]
        if math.isfinite(norm) and loss is not None and math.isfinite(loss):
            self.optimizer.step()
            self.progress.skipped_in_a_row = 0
        else:
            self._skip_or_stop(step, loss, norm)
        self.batches.observe(summary)
        self.progress.step += 1
        self.progress.seconds += time.monotonic() - began
        if self.progress.step % self.config.log_every == 0 or step == 0 or self._done():
            self._log("train", {"length": length, **summary, **statistics.summary(), "lr": lr, "grad_norm": norm})
        self.tracker.progress(self.progress.step)

    def _next_batch(self) -> tuple[Batch, int]:
        before = None if self.world.is_alone else self.batches.state_dict()
        try:
            return self.world.together(lambda: self.batches.next(self.progress.step))
        except FpexpError:
            if before is not None:
                self.batches.load_state_dict(before)  # it may be another process that has not got it
            self.save()  # where data cannot be had now, a resumed run goes on
            raise

    def _accumulate(self, batch: Batch) -> tuple[Accuracy, LayerStatistics]:
        """Leave in .grad the gradient of the mean loss over all scored positions, however the batch is split.

        Returns the sums over all processes.
        """
        config = self.experiment.config
        source = generator(config.seed, "cap", self.progress.step)
        cap = self.experiment.schedule.training_cap(batch.inputs.shape[1], source)
        accuracy, statistics = Accuracy(), LayerStatistics()
        scored = batch.scored
        self.optimizer.zero_grad(set_to_none=True)
        parts = micro_batches(batch, self.config.accumulation, self.world)
        for number, part in enumerate(parts, 1):
            part = part.to(config.device)
            with self.replicas.accumulating(last=number == len(parts)):
                with autocast(config):
                    output = self.replicas.forward(part.inputs, cap, part.mask)
                (summed_loss(output.logits, part.targets) * self.replicas.scale / scored).backward()
            accuracy.add(output.logits.detach(), part.targets, part.examples)
            statistics.add(output.solves)  # after the backward pass, which fills its part in
        return accuracy.over(self.world), statistics.over(self.world)

    def _skip_or_stop(self, step: int, loss: float | None, norm: float) -> None:
        what = f"step {step}: loss {loss}, gradient norm {norm}"
        if self.config.non_finite == "stop":
            raise FpexpError(
                f"{what}; training stopped, checkpoints are as they were; lower training.lr, or skip such steps with "
                "training.non_finite=skip"
            )
        self.progress.skipped += 1
        self.progress.skipped_in_a_row += 1
        if self.progress.skipped_in_a_row > MAX_SKIPPED_IN_A_ROW:
            raise FpexpError(
                f"{what}; {self.progress.skipped_in_a_row} steps in a row were not finite; lower training.lr"
            )

    def _validate(self) -> None:
        """Measure at the training length."""
        step = self.progress.step
        samples = self.experiment.config.evaluation.validation_samples
        with self.interruption.at_once():
            longest, look = self.experiment.task.lengths.max, self.interruption.look
            row = evaluate_length(self.experiment, longest, samples, "validation", 0, self.world, look)
        # No window of text is right as a whole, but by chance.
        accuracy = 0.0 if isinstance(self.experiment.task, HeldOut) else row["sequence_accuracy"]
        best = self._is_best(accuracy, row["loss"])
        if best:
            self.progress.best_accuracy, self.progress.best_loss = accuracy, row["loss"]
        goal = self.config.stop_at_accuracy
        self.progress.validated_at = step
        self.progress.stopped_early = goal is not None and accuracy >= goal
        self._log("validation", row)
        self.save()
        if best and self.world.is_first:
            checkpoint.mark_best(self.run.checkpoints, step, accuracy, row["loss"])

    def _is_best(self, accuracy: float, loss: float) -> bool:
        """Tell whether a validation is better than all before: in accuracy, or as good in that and better in loss."""
        before, least = self.progress.best_accuracy, self.progress.best_loss
        return accuracy > before or (accuracy == before and least is not None and loss < least)

    def _log(self, kind: str, numbers: dict[str, Any]) -> None:
        progress = self.progress
        self.tracker.log(
            {"kind": kind, "step": progress.step, **numbers, "skipped": progress.skipped, "seconds": progress.seconds}
        )
