"""A network that was given from Python, in the place of a checkpoint."""

import copy

from torch import nn

from finetune_mile.checkpoints.cards import Card
from finetune_mile.checkpoints.init import Init
from finetune_mile.checkpoints.loading import LoadReport, Opened, build_for
from finetune_mile.checkpoints.timm_weights import timm_card
from finetune_mile.core.in_memory import get_object
from finetune_mile.core.problems import Problem
from finetune_mile.networks.heads import build


def open_brought(init: Init, arch: str | None) -> Opened:
    """A copy of a network that was given from Python, without its head.

    A network of `finetune_mile.load` or of timm keeps its name, so that the export of a run can be loaded without it.
    """
    own = get_object(init.text, init.flag, "")
    if not isinstance(own, nn.Module):
        raise Problem(f"{init.flag} {init}: expected a torch.nn.Module that has num_features, or text as for --init")
    if arch is not None:
        raise Problem(f"--arch {arch}: the network was given, so there is nothing to choose; leave arch out")
    network = copy.deepcopy(own)
    if hasattr(network, "reset_classifier"):
        network.reset_classifier(0)  # type: ignore[operator]
    elif isinstance(getattr(network, "fc", None), nn.Linear):
        network.fc = nn.Identity()
    known = getattr(own, "report", None)
    card = getattr(own, "card", None) if isinstance(known, LoadReport) else timm_card(own)
    name = known.arch if isinstance(known, LoadReport) else card.arch if card else None
    if card is None or name is None or _shapes(build_for(name, card.padding, None)) != _shapes(network):
        network, name = build(init.text), init.text
        card = Card(name=name, method="python", arch=name, notes="a network that was given from Python")
    report = LoadReport(
        format="python", why="given from Python", arch=name, padding=card.padding, loaded=tuple(network.state_dict()),
        reset=(), dropped=(),
    )  # fmt: skip
    return Opened(network=network, card=card, report=report)


def _shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    return {key: tuple(tensor.shape) for key, tensor in network.state_dict().items()}
