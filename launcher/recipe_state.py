"""The state that a recipe saves and resumes from: engine state and data position, with sanity checks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from launcher.checkpoint.tags import latest_tag
from launcher.data.identity import Identity
from launcher.data.loader import GlobalBatchLoader
from launcher.data.tokenizer import fingerprint
from launcher.engine import Engine
from launcher.engine.background_saves import choose_background
from launcher.engine.nonfinite_tracer import weights_are_finite
from launcher.engine.state import keep_state
from launcher.errors import CheckpointError, ConfigError, NotFiniteError
from launcher.models.adapters import ADAPTED, SETTINGS, TrainedAdapters
from launcher.monitor.metrics import METRICS
from launcher.optim.loss_scale import LossScaleExhausted
from launcher.resuming import Resuming
from launcher.run import Run

EXHAUSTED = "loss_scale_exhausted"  # tag suffix of the checkpoint saved when fp16 cannot continue


@dataclass
class RecipeState:
    """Saves and loads the state of a run.

    Args:
        loader, identity: the position in the training data, and the identity of the data set.
        total_steps: optimizer steps of the whole run.
        tokenizer: None if the run has no tokenizer.
        width: tokens per sequence.
        adapters: the adapters that the run trains; their checkpoints leave out the frozen weights.

    Attributes:
        tokens: tokens seen so far, over all ranks.
        nonfinite: consecutive non-finite steps, up to the last step.
    """

    run: Run
    engine: Engine
    loader: GlobalBatchLoader
    identity: Identity
    total_steps: int
    tokenizer: Any
    width: int
    adapters: TrainedAdapters | None = None
    tokens: int = 0
    nonfinite: int = 0
    saves_chosen: bool = False

    def look(self, loss: float, norm: float | None) -> None:
        """Count consecutive non-finite steps, except those skipped while a dynamic loss scale adapts."""
        skipped = self.engine.loss_scaler.dynamic and not self.engine.was_step_applied()
        fine = math.isfinite(loss) and (norm is None or math.isfinite(norm))
        self.nonfinite = 0 if fine or skipped else self.nonfinite + 1

    @property
    def diverged(self) -> bool:
        """Return whether training must end: `--max-nonfinite-steps` was reached."""
        return self.nonfinite >= self.run.args.max_nonfinite_steps

    def save(self, tag: str | None = None) -> bool:
        """Write a checkpoint that the run can resume from. Return False, and write nothing, if the last step
        or the weights are not finite: the previous checkpoint stays the latest. Every rank must call it."""
        self.collect_garbage()
        self.choose_background()
        if not self.is_sound():
            self.engine.telemetry.say(
                f"step {self.engine.global_steps} is not saved: its loss, gradients or weights are not finite"
            )
            return False
        self.engine.save_checkpoint(
            self.run.checkpoints,
            tag,
            client_state=self.client_state(),
            exclude_frozen_parameters=self.adapters is not None,
        )
        return True

    def keep(self) -> None:
        """Store the state in the memory of the nodes, if it is finite. Every rank must call it."""
        self.choose_background()
        if self.is_sound():
            keep_state(self.engine, self.client_state())

    def client_state(self) -> dict[str, Any]:
        """Return what a checkpoint stores in addition to the engine state."""
        return {
            "data": self.loader.state_dict(),
            "data_of": self.identity.write(),
            "tokens": self.tokens,
            "total_steps": self.total_steps,
            "tokenizer": self.fingerprint(),
            "batch_keys": self.run.batch_keys,
            "replicas": self.run.replicas,
            **self._adapter_state(),
        }

    def choose_background(self) -> None:
        """Choose how checkpoints are written, at the first save, when optimizer state exists. Collective."""
        if not self.saves_chosen and (line := choose_background(self.engine, frozen=self.adapters is None)):
            self.engine.telemetry.say(line)
        self.saves_chosen = True

    def is_sound(self) -> bool:
        """Return whether the last step and the weights after it are finite. Every rank must call it."""
        return self.nonfinite == 0 and weights_are_finite(self.engine)

    def save_last(self, error: LossScaleExhausted) -> None:
        """Write a checkpoint of the state before the step that failed."""
        tag = f"global_step{self.engine.global_steps}_{EXHAUSTED}"
        if self.save(tag):
            self.engine.saver.wait()
            before = self.run.checkpoints / tag
            error.fix = f"{error.fix}; resume from the state before this step: --resume {before}"

    def resume(self) -> None:
        """Load the checkpoint that the run resumes from, if there is one. Every rank must call it."""
        if self.run.memory is not None:
            self.engine.saver.memory = self.run.memory
        resuming = self.run.resuming
        if resuming is None:
            return
        self._check_tokenizer(resuming)
        self._check_adapters(resuming)
        path, client = self.engine.load_checkpoint(
            resuming.directory,
            resuming.tag,
            exclude_frozen_parameters=self.adapters is not None,
            allow_model_changes=self.run.args.allow_model_changes,
        )
        if resuming.is_of_recipe:
            place, self.tokens = client["data"], client["tokens"]
        else:  # only the number of samples is known, not the position
            place, self.tokens = self.loader.after(resuming.samples), resuming.samples * self.width
        if not self.identity.is_other(was := client.get("data_of")):
            self.loader.load_state_dict(place)
        for line in self.identity.changes(was, place):
            self.run.say(f"WARNING {line}")
        in_memory = self.run.memory is not None and resuming.directory == self.run.memory.directory
        source = "the memory of the nodes" if in_memory else path
        self.run.say(f"resumed from {source} at step {self.engine.global_steps}")
        if self.engine.global_steps >= self.total_steps:
            self.run.say(f"WARNING all {self.total_steps} steps are already complete; nothing to train")

    def _check_tokenizer(self, resuming: Resuming) -> None:
        was, now = resuming.client_state.get("tokenizer"), self.fingerprint()
        if None in (was, now) or was == now or self.run.args.allow_model_changes:
            return
        raise ConfigError(
            "the checkpoint was trained with another tokenizer, whose token ids have different meanings",
            where="--tokenizer",
            fix="use the tokenizer that it was trained with, or pass --allow-model-changes",
        )

    def _check_adapters(self, resuming: Resuming) -> None:
        if not resuming.is_of_recipe:  # only names and shapes can be compared
            return
        was, now = resuming.client_state, self._adapter_state()
        if was.get(SETTINGS) != now.get(SETTINGS):
            raise ConfigError(
                f"the checkpoint has {_said(was) or 'no LoRA adapters'}, but this run has {_said(now) or 'none'}",
                where="--lora",
                fix="pass the same --lora, --lora-targets, --lora-alpha, --lora-dropout and --load-in-4bit",
            )
        if was.get(ADAPTED) != now.get(ADAPTED) and not self.run.args.allow_model_changes:
            raise ConfigError(
                "the adapters of the checkpoint belong to other weights",
                where=f"--model {self.run.args.model}",
                fix="name the model that the run started from, or pass --allow-model-changes",
            )

    def _adapter_state(self) -> dict[str, Any]:
        return {} if self.adapters is None else self.adapters.client_state()

    def fingerprint(self) -> str | None:
        """Return the fingerprint of the tokenizer, or None without a tokenizer."""
        return None if self.tokenizer is None else fingerprint(self.tokenizer)

    def failure(self) -> NotFiniteError:
        """Return the error that explains why the run exports no model."""
        step, tag = self.engine.global_steps, None
        with suppress(CheckpointError):  # the reason for the end matters more
            tag = latest_tag(self.run.checkpoints)
        count = f"the last {self.nonfinite} steps are" if self.nonfinite > 1 else "the last step is"
        what = f"{count} not finite" if self.nonfinite else "the weights are not finite"
        back = (
            f"the last good checkpoint is {self.run.checkpoints / tag}"
            if tag
            else "there is no earlier checkpoint"
        )
        return NotFiniteError(
            f"{what}: training ends after step {step}, and no model is exported",
            where=f"{self.run.output_dir / METRICS}; {back}",
            fix="lower the learning rate, clip gradients, or check the data of these steps"
            + ("; resume from there with --resume" if tag else ""),
        )

    def collect_garbage(self) -> None:
        """Collect Python garbage between steps if `disable_python_gc` has turned the collector off."""
        if self.engine.resolved.disable_python_gc:
            self.engine.collect_python_gc()


def _said(client_state: Mapping[str, Any]) -> str | None:
    settings = client_state.get(SETTINGS)
    return settings and f"LoRA adapters with {', '.join(f'{key} {value}' for key, value in settings.items())}"
