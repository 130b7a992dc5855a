"""MILe with the Trainer of transformers: a callback changes phases, compute_loss asks for the targets of the phase."""

from typing import Any

import torch
from transformers import Trainer, TrainerCallback

from finetune_mile.learning.losses import bce, given_matrix
from finetune_mile.learning.phases import Budget, after
from finetune_mile.learning.roles import Roles
from finetune_mile.methods import labels_of_rule, mile


class Phases(TrainerCallback):
    """Before and after each step: the weights that a phase starts from, and what they become."""

    def __init__(self, block: mile.Block) -> None:
        self.block = block

    def on_train_begin(self, _args: Any, state: Any, _control: Any, model: torch.nn.Module, **_: Any) -> None:
        self.phases = mile.phases(self.block, Budget(total_steps=state.max_steps, steps_per_epoch=1))
        self.roles = Roles(model, self.phases)

    def on_step_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        self.phase, self.done = next(after(state.global_step, self.phases))
        if self.done == 0:
            self.roles.enter(self.phase)

    def on_step_end(self, *_args: Any, **_: Any) -> None:
        if self.done + 1 == self.phase.steps:
            self.roles.leave(self.phase)


class MileTrainer(Trainer):
    """A network from images (B, 3, H, W) to logits (B, C), and batches {"pixel_values", "labels"}."""

    def __init__(self, *, block: mile.Block, num_classes: int, **options: Any) -> None:
        self.mile, self.num_classes = Phases(block), num_classes
        super().__init__(callbacks=[self.mile], **options)

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        """The loss of the phase; outside of training, of the given labels."""
        targets = given_matrix(inputs["labels"], self.num_classes)
        if model.training and not self.mile.phase.given:
            with torch.no_grad():
                targets = labels_of_rule(self.mile.phase, self.mile.roles.teacher(inputs["pixel_values"]))
        logits = model(inputs["pixel_values"])
        loss = bce(logits, targets)
        return (loss, {"logits": logits}) if return_outputs else loss
