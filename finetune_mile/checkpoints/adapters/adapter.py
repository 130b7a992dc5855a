"""What an adapter is: pure functions that bring one format's tensors into torchvision's names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from finetune_mile.core.types import Preprocess
from finetune_mile.networks.resnets import Padding, Stem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

Tensors = dict[str, Tensor]
Vocabulary = Callable[[str], str | None]

IMAGENET = Preprocess()
UNIT_RANGE = Preprocess(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0), interpolation="bicubic", antialias=False)
"""SimCLR's convention: [0, 1] without mean and deviation, a crop, then a bicubic resize."""

_WRAPPERS = ("module.", "_orig_mod.")  # DistributedDataParallel, torch.compile
_HOMES = ("state_dict", "model_state_dict", "model")  # where files keep their state dict


class UnknownKey(LookupError):
    """A name that the format does not have: the load stops."""


class InsideBackbone(UnknownKey):
    """An unknown tensor among those of a backbone: without it the features would be wrong."""


def as_it_is(key: str, tensor: Tensor) -> Tensor:
    """The layout of a torch file: nothing to do."""
    del key
    return tensor


def always(contents: Contents) -> bool:
    """For formats whose marks leave no doubt."""
    del contents
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One format. None of the functions changes its argument or looks at anything else.

    Names after `rename` are those of `networks/resnets.py` (or of timm's vision transformers),
    and two groups that are dropped unless somebody asks for them: `fc.*`, a classifier that has
    seen labels, and `proj.*`, the first layer of SimCLR-v2's projection head.
    """

    recognise: Callable[[Contents], str | None]
    """Why a file is of this format, or None; looks at content, never at a file's name."""
    unwrap: Callable[[Contents], Tensors]
    """The tensors that concern this format, flat, in its own names."""
    rename: Callable[[str], str | None]
    """Own name to ours; None: known and dropped; raises UnknownKey."""
    relayout: Callable[[str, Tensor], Tensor] = as_it_is
    """Own layout (say HWIO) to torch's (OIHW); takes the own name."""
    method: str = "unknown"
    padding: Padding = "torch"
    preprocess: Preprocess = IMAGENET
    cifar_stem: Stem | None = "cifar"
    """The form of a 3x3 stem; None: the names are those of two formats with different ones."""
    stem_relu: bool = True
    """Is there a ReLU after bn1?"""
    own: bool = False
    """An export of ours: its config names the network, and its head and projection layer were trained together."""
    plain: bool = False
    """Nothing but the tensors of one network, so that a part of the file has no format either."""
    padding_known: bool = True
    """False: formats that pad differently have the same names."""
    is_certain: Callable[[Contents], bool] = always
    """Whether a recognised file is certainly of this format; False: its names are common ones."""
    small_vit_heads: int | None = None
    """Attention heads of the tiny and the small vision transformer, where they are not timm's."""
    columns_first: bool = False
    """Are fixed positions of a vision transformer those of MAE (columns first), with 12 heads as MoCo-v3's?"""


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a tree with its path, parts joined by `/`."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping | list | tuple):
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in items:
            yield from leaves(value, f"{path}/{key}" if path else str(key))


def tensors_of(mapping: object) -> Tensors:
    """The tensors that lie directly in a mapping, by name; empty for anything else."""
    if not isinstance(mapping, Mapping):
        return {}
    return {k: v for k, v in mapping.items() if isinstance(k, str) and isinstance(v, Tensor)}


def unwrapped(tensors: Tensors) -> Tensors:
    """Take off, again and again, a leading `module.` or `_orig_mod.` that all names share."""
    for wrapper in _WRAPPERS:
        if tensors and all(key.startswith(wrapper) for key in tensors):
            return unwrapped({key.removeprefix(wrapper): value for key, value in tensors.items()})
    return tensors


def state_dict_of(contents: Contents) -> Tensors:
    """The state dict of a torch file: at the top, or under one of the usual names."""
    for home in _HOMES:
        found = tensors_of(contents.tree.get(home))
        if found:
            return unwrapped(found)
    return unwrapped(tensors_of(contents.tree))


def tops(tensors: Mapping[str, object]) -> set[str]:
    """The first components of all names."""
    return {key.split(".", 1)[0] for key in tensors}


def below(prefix: str, key: str) -> str | None:
    """What follows `prefix` and any wrappers after it, or None where a name begins otherwise."""
    if not key.startswith(prefix):
        return None
    rest = key[len(prefix) :]
    while rest.startswith(_WRAPPERS):
        rest = rest.split(".", 1)[1]
    return rest
