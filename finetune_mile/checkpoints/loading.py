"""From `--init` to a network: strict, and every tensor accounted for by name."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from finetune_mile.checkpoints.cards import SCRATCH, Card, find_card
from finetune_mile.networks.heads import HeadBias, build, new_head
from finetune_mile.places import shipped
from finetune_mile.problems import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What became of every tensor: the file's are loaded or dropped, the network's are loaded or reset."""

    format: str
    why: str
    arch: str
    loaded: tuple[str, ...]
    reset: tuple[str, ...]
    dropped: tuple[str, ...]

    def to_json(self) -> dict[str, object]:
        """Counts first, then the names: the contents of init.json."""
        counts = {part: len(getattr(self, part)) for part in ("loaded", "reset", "dropped")}
        return {"counts": counts, **asdict(self)}


def load_trunk(network: nn.Module, tensors: dict[str, Tensor], *, source: str) -> None:
    """Copy `tensors` into a trunk; any name or shape that does not fit stops the load and is named."""
    want = network.state_dict()
    wrong = [f"{k} is missing" for k in want.keys() - tensors.keys() if not k.endswith("num_batches_tracked")]
    wrong += [f"{k} is not in the network" for k in tensors.keys() - want.keys()]
    wrong += [
        f"{k} is {tuple(tensors[k].shape)}, the network has {tuple(want[k].shape)}"
        for k in want.keys() & tensors.keys()
        if tensors[k].shape != want[k].shape
    ]
    if wrong:
        raise Problem(f"{source} does not fit the network: {len(wrong)} tensors differ; first: {sorted(wrong)[0]}")
    network.load_state_dict(want | tensors)


def load_network(
    init: str, *, arch: str | None, num_classes: int, head_bias: HeadBias
) -> tuple[nn.Module, Card, LoadReport]:
    """The network that a run starts from: trunk from `init` (a card's name or `none`), head new."""
    card = SCRATCH if init == "none" else find_card(init)
    name = arch or card.arch
    if name is None:
        raise Problem("--init none needs --arch: from scratch, nothing says which network")
    network = build(name, padding=card.padding)
    loaded: tuple[str, ...] = ()
    if card.file is not None:
        path = Path(shipped("weights")) / card.file
        tensors = load_file(path)
        load_trunk(network, tensors, source=str(path))
        loaded = tuple(sorted(tensors))
    reset = tuple(sorted(set(network.state_dict()) - set(loaded)))
    new_head(network, num_classes, head_bias)
    report = LoadReport(
        format=card.format or "none",
        why=f"card {card.name}",
        arch=name,
        loaded=loaded,
        reset=(*reset, "fc.weight", "fc.bias"),
        dropped=(),
    )
    return network, card, report
