"""Backbones behind prefixes: where they are in a file, which one is meant, and how the others are asked for."""

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from finetune_mile.checkpoints.adapters.adapter import UNIT_RANGE, VOCABULARIES, Adapter, InsideBackbone, Vocabulary
from finetune_mile.checkpoints.readers.torch_files import leaves

_TRUNK_PARTS = re.compile(r"(?:conv1|bn1|layer\d+|blocks|patch_embed|stem|stages|layers|net|[0-7])(?:\.|$)")
_FIRST = ("layer1.0.", "blocks.0.", "stages.0.blocks.0.", "layers.0.blocks.0.")
_STEM = ("conv1.", "bn1.", "patch_embed.", "cls_token", "pos_embed", "stem.")
_BESIDE = re.compile(  # words in the names of modules that the features do not need
    "fc|heads?|proj|projector|projection|pred|predictor|prediction|classifier|classification|linear|probe|mlp|neck|"
    "queues?|memory|bank|prototypes?|momentum|teacher|target|online|decoder|mask|masked|loss|criterion|center|centre|"
    "temperature|logits?|contrastive"
)
_COPY = re.compile("momentum|target|key|k|ema|shadow|averaged|average")  # words for a moving average of a network
# A tensor that each backbone has once, in every language of names.
_NAMES = (
    *("layers.0.blocks.0.attn.qkv.weight", "stages.0.blocks.0.conv_dw.weight"),  # before a part of them
    *("layer1.0.conv1.weight", "blocks.0.attn.qkv.weight", "4.0.conv1.weight", "3.0.conv1.weight", "2.0.conv1.weight"),
    *("net.1.blocks.0.net.0.weight", "res2.0.conv1.weight"),
)
_ANCHORS = [re.compile(rf"(|.*[./]){name.replace('.', '[./]')}", re.DOTALL) for name in _NAMES]
_WRAPPERS = ("module", "_orig_mod", "model", "state_dict")
TOP = "."  # the choice of a backbone without a prefix, beside others that have one


def way(place: str, choice: str) -> str:
    """What to type for a part of a file: `--init 'FILE::PREFIX'`."""
    return "--init '" + f"{place}::{choice}".replace("'", "'\\''") + "'"


# ---------------------------------------------------------------------------------- where they are


def find_trunks(paths: Iterable[str]) -> tuple[str, dict[str, dict[str, str]]]:
    """The vocabulary that explains most, and for each prefix with a trunk: our name to the path."""
    paths = list(paths)
    best: tuple[str, dict[str, dict[str, str]]] = ("", {})
    for name, vocabulary in VOCABULARIES.items():
        groups: dict[str, dict[str, str]] = {}
        for path in paths:
            hit = _split(path, vocabulary)
            if hit is not None:
                groups.setdefault(hit[0], {}).setdefault(hit[1], path)
        trunks = {prefix: group for prefix, group in groups.items() if _is_trunk(group)}
        if sum(map(len, trunks.values())) > sum(map(len, best[1].values())):
            best = name, trunks
    return best


def _is_trunk(group: Container[str] | Iterable[str]) -> bool:
    names = list(group)  # type: ignore[arg-type]
    first = any(name.startswith(_FIRST) for name in names)
    return len(names) > 5 and first and any(name.startswith(_STEM) for name in names)


def _split(path: str, vocabulary: Vocabulary) -> tuple[str, str] | None:
    """A path to (prefix, our name): the shortest prefix behind which the rest is known."""
    dotted = path.replace("/", ".")
    for start in (0, *(i + 1 for i, c in enumerate(dotted) if c == ".")):
        name = vocabulary(dotted[start:])
        if name is not None:
            return path[:start], name
    return None


def list_prefixes(paths: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Prefixes that hold a backbone, each with one tensor of it; quick, by a tensor that each backbone has."""
    for anchor in _ANCHORS:
        hits = [match for path, tensor in paths.items() if tensor.ndim in (2, 4) and (match := anchor.fullmatch(path))]
        if hits:
            return {match[1]: paths[match[0]] for match in reversed(hits)}
    return {}


# ------------------------------------------------------------------------------ which one is meant


def choose(trunks: Mapping[str, Mapping[str, str]], paths: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The backbone to load by default and the reason; None: nothing tells, so that the user is asked."""
    different: list[str] = []
    for prefix in sorted(trunks, key=len):
        if not any(_are_equal(trunks[prefix], trunks[other], paths) for other in different):
            different.append(prefix)
    if len(different) == 1:
        return different[0], "the other copies have the same numbers" if len(trunks) > 1 else ""
    trained = [prefix for prefix in different if not is_copy(prefix)]
    if len(trained) != 1:
        return None
    copies = ", ".join(repr(prefix) for prefix in different if prefix != trained[0])
    return trained[0], f"{copies} is named as a moving average of it"


def is_copy(prefix: str) -> bool:
    """Does a prefix call its backbone a moving average of another one (momentum, target, key, ema)?"""
    return any(_COPY.fullmatch(word) for word in re.split(r"[./_\d]+", prefix.lower()))


def _are_equal(one: Mapping[str, str], other: Mapping[str, str], paths: Mapping[str, Tensor]) -> bool:
    pairs = [(paths[path], paths[other[name]]) for name, path in one.items() if name in other]
    return one.keys() == other.keys() and all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in pairs)


def short(prefix: str, prefixes: Iterable[str]) -> str:
    """The shortest `::` choice for one of several prefixes: a part of it that no other has, or all of it."""
    every = [_parts(each) for each in prefixes]
    for part in reversed(_parts(prefix)):
        if part not in _WRAPPERS and not part.isdigit() and sum(part in parts for parts in every) == 1:
            return part
    return prefix.rstrip("./") or TOP


def resolve(choice: str, paths: Mapping[str, Tensor]) -> str | None:
    """The prefix that a short choice such as `teacher` stands for, where one backbone alone has that part."""
    found = [prefix for prefix in list_prefixes(paths) if choice in _parts(prefix)]
    return found[0] if len(found) == 1 else None


def _parts(prefix: str) -> list[str]:
    return [part for part in re.split(r"[./]", prefix) if part]


def other_backbones(paths: Mapping[str, Tensor], used: Container[int]) -> tuple[str, ...]:
    """Choices (`::CHOICE`) for the backbones of a file that were not loaded.

    Args:
        paths: all tensors of the file.
        used: ids of those that were loaded.
    """
    prefixes = list_prefixes(paths)
    if len(prefixes) < 2:
        return ()
    return tuple(short(prefix, prefixes) for prefix, tensor in prefixes.items() if id(tensor) not in used)


# ------------------------------------------------------------------------------------- its adapter


def behind(prefix: str, language: str, *, nested: bool = False) -> Adapter:
    """Make an adapter for a backbone behind `prefix`: every tensor there is known or part of a head.

    Args:
        prefix: ends where the backbone's own names begin.
        language: the key of those names in `VOCABULARIES`.
        nested: the backbone's own modules are nested mappings.
    """
    vocabulary = VOCABULARIES[language]

    def rename(path: str) -> str | None:
        if not path.startswith(prefix):
            return None
        inner = path[len(prefix) :].replace("/", ".")
        if inner in ("fc.weight", "fc.bias"):
            return inner
        name = vocabulary(inner)
        if name is None and (_TRUNK_PARTS.match(inner) or not _is_beside(path[len(prefix) :], nested)):
            raise InsideBackbone(path)
        return name

    plain = Adapter(
        recognise=lambda _: None,
        unwrap=lambda contents: dict(leaves(contents.tree)),
        rename=rename,
        cifar_stem=None if language == "torchvision" else "cifar",  # solo-learn's names are torchvision's
        stem_relu=language != "lightly generator, sequential",
        padding_known=False,
    )
    return from_simclr(plain) if language.startswith("separius") else plain


def _is_beside(inner: str, nested: bool) -> bool:
    """Whether an unknown tensor next to a backbone's own is a head, a queue or a copy, which features do not need."""
    if "/" in inner and not nested:  # another entry of the file, such as the optimiser
        return True
    words = re.split(r"[_\d]+", re.split(r"[./]", inner)[0].lower())
    return "norm" not in words and any(_BESIDE.fullmatch(word) for word in words)


def from_simclr(adapter: Adapter) -> Adapter:
    """The same names with SimCLR-v2's conventions: only it has selective kernels."""
    return replace(adapter, method="simclrv2", padding="tf", preprocess=UNIT_RANGE)
