"""Which format a file has: by content, never by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from finetune_mile.checkpoints.adapters import ADAPTERS
from finetune_mile.checkpoints.adapters.adapter import (
    UNIT_RANGE,
    VOCABULARIES,
    Adapter,
    InsideBackbone,
    Vocabulary,
    leaves,
)
from finetune_mile.core.problems import Problem

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

BEHIND_PREFIX = "trunk behind a prefix"
_TRUNK_PARTS = re.compile(r"(?:conv1|bn1|layer\d+|blocks|patch_embed|net|[0-7])(?:\.|$)")
_BESIDE = re.compile(  # words in the names of modules that the features do not need
    "fc|heads?|proj|projector|projection|pred|predictor|prediction|classifier|classification|linear|probe|mlp|neck|"
    "queues?|memory|bank|prototypes?|momentum|teacher|target|online|decoder|mask|masked|loss|criterion|center|centre|"
    "temperature|logits?|contrastive"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a file turned out to be."""

    format: str
    why: str
    adapter: Adapter
    contents: Contents  # the file, or the part of it that was asked for
    mapping: dict[str, str] = field(default_factory=dict)  # a prefix that was recognised, and ours
    outside: tuple[str, ...] = ()  # tensors that the asked-for part leaves out
    forced: bool = False  # `--init FILE::FORMAT` named the format
    arch: str | None = None  # the network, where its own names were recognised


def detect(contents: Contents, choice: str | None, *, source: str) -> Found:
    """Find the adapter for a file.

    Args:
        contents: the file as read.
        choice: what follows `::` in `--init`: the prefix of one trunk, or the name of a format.
        source: the file's name, for messages.
    """
    if choice in ADAPTERS:
        why = f"--init says {choice}"
        return Found(format=choice, why=why, adapter=ADAPTERS[choice], contents=contents, forced=True)
    if choice is not None:
        part, outside = _part(contents, choice, source)
        found = _as_in(_recognised(contents), detect(part, None, source=source))
        why = f"{found.why}, below {choice}"
        return replace(found, why=why, outside=outside, mapping={choice: "", **found.mapping})
    return _recognised(contents) or _behind_prefix(contents, source)


def _recognised(contents: Contents) -> Found | None:
    for name, adapter in ADAPTERS.items():
        why = adapter.recognise(contents)
        if why is not None:
            return Found(format=name, why=why, adapter=adapter, contents=contents)
    return None


def _as_in(complete: Found | None, part: Found) -> Found:
    """Give a part of a file the format and the conventions of the complete file, where that has a format of its own."""
    if complete is None or complete.adapter.plain:
        return part
    own = part.adapter
    adapter = replace(
        complete.adapter, recognise=own.recognise, unwrap=own.unwrap, rename=own.rename, relayout=own.relayout,
        stem_relu=own.stem_relu,
    )  # fmt: skip
    return replace(part, format=complete.format, why=complete.why, adapter=adapter)


def _part(contents: Contents, prefix: str, source: str) -> tuple[Contents, tuple[str, ...]]:
    """What lies below a prefix, as a flat file of its own; and the paths of the rest."""
    everything = dict(leaves(contents.tree))
    for start in (prefix, f"{prefix}/", f"{prefix}."):
        inside = {path[len(start) :]: t for path, t in everything.items() if path.startswith(start)}
        if inside and start[-1] in "./":
            rest = tuple(path for path in everything if not path.startswith(start))
            return replace(contents, tree=dict(inside), full_names={}, metadata={}), rest
    near = ", ".join(sorted(_trunks(everything)[1])) or ", ".join(map(str, contents.tree))
    raise Problem(f"{source}: nothing lies below {prefix!r}; the file has: {near}")


# ------------------------------------------------------------------------- behind an unknown prefix


def _trunks(paths: Mapping[str, object]) -> tuple[str, dict[str, dict[str, str]]]:
    """The vocabulary that explains most, and for each prefix with a trunk: our name to the path."""
    best: tuple[int, str, dict[str, dict[str, str]]] = (0, "", {})
    for name, vocabulary in VOCABULARIES.items():
        groups: dict[str, dict[str, str]] = {}
        for path in paths:
            hit = _split(path, vocabulary)
            if hit is not None:
                groups.setdefault(hit[0], {}).setdefault(hit[1], path)
        trunks = {prefix: group for prefix, group in groups.items() if _is_trunk(group)}
        size = sum(map(len, trunks.values()))
        if size > best[0]:
            best = (size, name, trunks)
    return best[1], best[2]


def _split(path: str, vocabulary: Vocabulary) -> tuple[str, str] | None:
    """A path to (prefix, our name): the shortest prefix behind which the rest is known."""
    dotted = path.replace("/", ".")
    for start in (0, *(i + 1 for i, c in enumerate(dotted) if c == ".")):
        name = vocabulary(dotted[start:])
        if name is not None:
            return path[:start], name
    return None


def _is_trunk(group: Mapping[str, str]) -> bool:
    return len(group) > 5 and any(name.startswith(("layer1.0.", "blocks.0.")) for name in group)


def _behind_prefix(contents: Contents, source: str) -> Found:
    paths = dict(leaves(contents.tree))
    if not paths:
        raise Problem(f"{source}: there is no tensor in this file")
    name, trunks = _trunks(paths)
    if not trunks:
        sample = ", ".join(sorted(paths)[:3])
        raise Problem(
            f"{source}: no format we know, and no ResNet or vision transformer behind any prefix "
            f"(its {len(paths)} tensors are called {sample}, ...); docs/checkpoints.md lists the "
            "formats"
        )
    if len(trunks) > 1:
        ways = " or ".join(f"--init '{source}::{prefix}'" for prefix in sorted(trunks))
        raise Problem(f"{source} holds {len(trunks)} trunks; say which one is meant: {ways}")
    (prefix,) = trunks
    return Found(
        format=BEHIND_PREFIX,
        why=f"{len(trunks[prefix])} tensors are a trunk in {name} names behind {prefix!r}",
        adapter=behind(prefix, name, nested=any("/" in path[len(prefix) :] for path in trunks[prefix].values())),
        contents=contents,
        mapping={prefix: ""},
    )


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
