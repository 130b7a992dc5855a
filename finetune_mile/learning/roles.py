"""Learner, teacher, student: one network learns, the others are copies of its weights."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from finetune_mile.learning.phases import Phase

Weights = dict[str, Tensor]


@torch.no_grad()
def copy_into(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Overwrite tensors in place, batch-norm buffers included, so that no reference goes stale."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


def tensors_of(network: nn.Module) -> Weights:
    """All tensors of a network, also those that a state dict leaves out, such as the queues of pre-training."""
    return {name: tensor.detach() for name, tensor in (*network.named_parameters(), *network.named_buffers())}


def snapshot(network: nn.Module) -> Weights:
    """A copy of a network's tensors that does not follow it."""
    return {name: tensor.clone() for name, tensor in tensors_of(network).items()}


def weights_hash(network: nn.Module, more: str = "") -> str:
    """SHA-256 over `more` and over the names and bytes of a network's tensors."""
    digest = hashlib.sha256(more.encode())
    for name, tensor in network.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


class Average:
    """Averaged weights of the learner; they start anew wherever the learner's weights are swapped."""

    def __init__(self, learner: nn.Module, decay: float, follower: nn.Module | None = None) -> None:
        """Start with the learner's weights; a `follower`, a copy of the learner, always has the averaged ones."""
        self.learner, self.decay = learner, decay
        self.weights: Weights = snapshot(learner) if follower is None else tensors_of(follower)

    def restart(self) -> None:
        copy_into(self.weights, tensors_of(self.learner))

    def update(self) -> None:
        """Move a little towards the learner; integer buffers follow at once."""
        for name, tensor in tensors_of(self.learner).items():
            mine = self.weights[name]
            if mine.is_floating_point():
                mine.lerp_(tensor, 1 - self.decay)
            else:
                mine.copy_(tensor)

    def network(self) -> nn.Module:
        """A copy of the learner with the averaged weights."""
        averaged = copy.deepcopy(self.learner)
        copy_into(tensors_of(averaged), self.weights)
        return averaged


class Roles:
    """Who has which weights.

    The learner is the only network that is optimised or wrapped by Accelerate. The teacher is a frozen, unwrapped copy
    in eval mode; student and init are plain tensors. Only the roles that the phases use take memory.
    """

    def __init__(
        self, learner: nn.Module, phases: Sequence[Phase], teacher: nn.Module | None = None, *, keep_init: bool = False
    ) -> None:
        """Start with every role at the learner's weights.

        Args:
            learner: the bare network, on its device.
            phases: what will be trained.
            teacher: a network from outside that never learns (distillation), of any architecture.
            keep_init: remember the first weights, also where no phase starts from them.
        """
        used = {role for phase in phases for role in (phase.start, *phase.becomes)}
        used |= {"init"} if keep_init else set()
        imitates = any(phase.name == "imitation" for phase in phases)
        self.learner = learner
        self.teacher = teacher if teacher is not None else copy.deepcopy(learner) if imitates else None
        if self.teacher is not None:
            self.teacher.eval().requires_grad_(False)
        kept = ("init", "student")
        self.weights: dict[str, Weights] = {role: snapshot(learner) for role in kept if role in used}
        if self.teacher is not None and teacher is None:  # one from outside never changes, and is loaded anew
            self.weights["teacher"] = tensors_of(self.teacher)

    def enter(self, phase: Phase) -> None:
        """Give the learner the weights that `phase` starts from."""
        if phase.start != "learner":
            copy_into(tensors_of(self.learner), self.weights[phase.start])

    def leave(self, phase: Phase) -> None:
        """Give the learner's weights to the roles that they become."""
        for role in phase.becomes:
            copy_into(self.weights[role], tensors_of(self.learner))

    def state_dict(self) -> dict[str, Weights]:
        """All that cannot be derived, to be saved."""
        return {"learner": tensors_of(self.learner), **self.weights}

    def load_state_dict(self, saved: Mapping[str, Weights]) -> None:
        """Take back what `state_dict` gave."""
        for name, tensors in self.state_dict().items():
            copy_into(tensors, saved[name])
