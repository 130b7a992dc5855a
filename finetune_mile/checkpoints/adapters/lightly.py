"""lightly: the examples (`Sequential` indices), its own generator, and the benchmarks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from finetune_mile.checkpoints.adapters.adapter import Adapter, UnknownKey, Vocabulary, below, state_dict_of, tops
from finetune_mile.checkpoints.adapters.vocabularies import generator, sequential, torchvision_or_vit

if TYPE_CHECKING:
    from finetune_mile.checkpoints.readers import Contents

_MARKS = {"projection_head", "prediction_head", "online_classifier", "student_projection_head"}
_DROPPED = _MARKS - {"online_classifier"} | {
    "backbone_momentum",
    "projection_head_momentum",
    "teacher_backbone",
    "teacher_projection_head",
    "student_backbone",
    "key_backbone",
    "key_projection_head",
    "query_backbone",
    "query_projection_head",
    "prototypes",
    "queues",
    "memory_bank",
    "criterion",
}
_PROBE = "online_classifier.classification_head."


def _adapter(vocabulary: Vocabulary, says: str, *, without: tuple[str, ...] = (), stem_relu: bool = True) -> Adapter:
    def recognise(contents: Contents) -> str | None:
        weights = state_dict_of(contents)
        inner = {below("backbone.", key) for key in weights}
        named = {name for key in inner if key and (name := vocabulary(key))}
        marks = tops(weights) & _MARKS
        if any(key.startswith(without) for key in inner if key and without):
            return None
        if not marks or not any(name.startswith(("layer1.", "blocks.")) for name in named):
            return None
        return f"backbone.* {says} beside {', '.join(sorted(marks))}"

    return Adapter(
        recognise=recognise,
        unwrap=state_dict_of,
        rename=_rename_with(vocabulary),
        method="lightly",
        stem_relu=stem_relu,
    )


def _rename_with(vocabulary: Vocabulary) -> Callable[[str], str | None]:
    def rename(key: str) -> str | None:
        if key.startswith(_PROBE):  # the online probe: it has seen labels
            return f"fc.{key.removeprefix(_PROBE)}"
        if key.split(".", 1)[0] in _DROPPED:
            return None
        inner = below("backbone.", key)
        name = None if inner is None else vocabulary(inner)
        if name is None:
            raise UnknownKey(key)
        return name

    return rename


# 2 and 3, the ReLU and the pooling, have no tensors
LIGHTLY = _adapter(sequential(4), "as the children of a torchvision ResNet", without=("2.", "3."))
# the generator's own forward has a ReLU after bn1, a Sequential of its children has none
LIGHTLY_GENERATOR = _adapter(sequential(2), "as the children of lightly's ResNetGenerator", stem_relu=False)
LIGHTLY_BENCHMARK = _adapter(lambda key: torchvision_or_vit(key) or generator(key), "in torchvision names")
