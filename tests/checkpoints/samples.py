"""One file of each format as its makers write it: key lists built in code, no memory taken."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

from making import (
    TF_LEAVES,
    Make,
    Tensors,
    as_children,
    as_detectron2,
    as_generator,
    as_haiku,
    as_separius,
    as_tensorflow,
    byol_convert,
    flat,
    light,
    linear,
    norm,
    torch_file,
    trunk,
    under,
)

from finetune_mile.checkpoints.readers import Contents


def _simclr_tf(arch: str = "resnet50-sk", make: Make = light) -> Contents:
    tensors = as_tensorflow(trunk(arch, make, counters=False))
    tree: Tensors = tensors | under("ema_model/", as_tensorflow(trunk(arch, counters=False)))
    tree["global_step"] = light("num_batches_tracked", ())
    for layer, outputs in enumerate((2048, 2048, 128)):
        own = f"head_contrastive/nl_{layer}"
        tree[f"{own}/dense/kernel"] = light("", (2048, outputs))
        leaves = [leaf for leaf in TF_LEAVES.values() if layer < 2 or leaf != "beta"]
        tree |= {f"{own}/batch_normalization/{leaf}": light("", (outputs,)) for leaf in leaves}
    head = "head_supervised/linear_layer/dense"
    for name, shape in ((f"{head}/kernel", (2048, 1000)), (f"{head}/bias", (1000,))):
        tree |= {name: light("", shape), f"{name}/Momentum": light("", shape)}
    return Contents(container="tf-checkpoint", tree=dict(tree))


def _byol() -> Contents:
    params, state = as_haiku(trunk("resnet18-proj", counters=False))
    params |= {"projector/linear": {"w": light("", (512, 64)), "b": light("", (64,))}}
    params |= {"predictor/linear_1": {"w": light("", (64, 32))}}
    params |= {"classifier": {"w": light("", (512, 10)), "b": light("", (10,))}}
    target = as_haiku(trunk("resnet18-proj", counters=False))
    experiment = {"online_params": params, "online_state": state, "target_params": target[0], "target_state": target[1]}
    return Contents(container="pickle", tree={"experiment_state": experiment, "step": 1})


def _vissl(tensors: Tensors, prefix: str, heads: Tensors) -> Contents:
    model = {"trunk": under(prefix, tensors), "heads": heads}
    return torch_file(
        phase_idx=99, loss={"moco_encoder.x": light("", (1,))}, type="consolidated",
        classy_state_dict={"base_model": {"model": model, "meta": {}}, "train": True},
    )  # fmt: skip


def _separius(arch: str, sk: bool) -> Contents:
    resnet = as_separius(trunk(arch), sk=sk) | linear("fc", 2048, 1000)
    head: Tensors = {}
    for layer, outputs in zip((0, 3, 6), (2048, 2048, 128), strict=True):
        head |= linear(f"layers.{layer}", 2048, outputs, bias=False) | norm(f"layers.{layer + 1}", outputs)
    return torch_file(resnet=resnet, head=head)


def _moco() -> Contents:
    encoder = trunk("resnet18") | linear("fc.0", 512, 512) | linear("fc.2", 512, 128)
    state = {"queue": light("", (128, 64)), "queue_ptr": light("num_batches_tracked", (1,))}
    state |= under("encoder_q.", encoder) | under("encoder_k.", encoder)
    optimizer = {"state": {0: {"momentum_buffer": light("", (64, 3, 7, 7))}}, "param_groups": []}
    return torch_file(epoch=1, arch="resnet18", state_dict=under("module.", state), optimizer=optimizer)


def _moco_v3() -> Contents:
    encoder = trunk("resnet50") | linear("fc.0", 2048, 4096, bias=False) | norm("fc.1", 4096)
    state = under("base_encoder.", encoder) | under("momentum_encoder.", encoder)
    state |= linear("predictor.0", 256, 4096, bias=False)
    return torch_file(epoch=1, state_dict=under("module.", state))


def _swav() -> Contents:
    heads = linear("projection_head.0", 2048, 2048) | norm("projection_head.1", 2048)
    heads |= linear("projection_head.3", 2048, 128) | linear("prototypes", 128, 3000, bias=False)
    return flat(under("module.", trunk("resnet50") | heads))


def _solo() -> Contents:
    backbone = trunk("resnet18")
    state = under("backbone.", backbone) | under("momentum_backbone.", backbone)
    state |= linear("classifier", 512, 100) | linear("projector.0", 512, 256) | norm("projector.1", 256)
    state |= linear("momentum_projector.0", 512, 256) | linear("predictor.0", 64, 256)
    return torch_file(**{"pytorch-lightning_version": "2.6", "state_dict": state, "epoch": 1})


def _lightly(backbone: Tensors, heads: Tensors) -> Contents:
    state = under("backbone.", backbone) | linear("projection_head.layers.0", 512, 128) | heads
    return torch_file(**{"pytorch-lightning_version": "2.6", "state_dict": state})


def _dino() -> Contents:
    student, teacher = (under("backbone.", trunk("resnet50")) | linear("head.mlp.0", 2048, 256) for _ in range(2))
    return torch_file(student=under("module.", student), teacher=teacher, epoch=1)


def _mile(tensors: Tensors, features: int) -> Contents:
    network = tensors | linear("fc", features, 10)
    return torch_file(model=under("backbone.module.", network) | under("teacher.module.", network), opt={})


def _tonylins() -> Contents:
    plain = trunk("resnet50")
    moved: Tensors = {}
    for name, tensor in plain.items():
        block = re.match(r"(layer\d\.0)\.conv1\.", name)
        if block:
            moved |= {n: t for n, t in plain.items() if n.startswith(f"{block[1]}.downsample.")}
        moved.setdefault(name, tensor)
    return torch_file(state_dict=moved | linear("fc", 2048, 1000))


def _own() -> Contents:
    config = {"arch": "resnet-demo", "padding": "torch", "mean": [0, 0, 0], "std": [1, 1, 1], "size": 32}
    tensors = trunk("resnet-demo") | linear("fc", 128, 10)
    return flat(tensors, "safetensors", finetune_mile=json.dumps(config))


def _upstream(name: str) -> Contents:
    """A file as the specification of upstream's own (parity/) describes it, without memory."""
    text = gzip.decompress((Path(__file__).parent / "parity" / f"{name}.json.gz").read_bytes())
    (entry,) = json.loads(text)["files"].values()

    def grow(node: object, key: str = "") -> object:
        if not isinstance(node, dict):
            return node
        if "shape" in node:
            return light(key, tuple(node["shape"]))
        ((tag, body),) = [item for item in node.items() if item[0] != "metadata"]
        if tag in ("list", "tuple"):
            return [grow(value) for value in body]
        pairs = body.items() if isinstance(body, dict) else body
        return {name: grow(value, str(name)) for name, value in pairs} if tag in ("dict", "odict") else body

    tree = grow(entry["tree"])
    assert isinstance(tree, dict)
    return torch_file(**tree)


SAMPLES: dict[str, Callable[[], Contents]] = {
    "finetune-mile": _own,
    "simclr-tf": _simclr_tf,
    "byol": _byol,
    "vissl-sk": lambda: _vissl(as_separius(trunk("resnet50-sk"), sk=True), "", {}),
    "vissl-simclrv2": lambda: _vissl(as_separius(trunk("resnet50"), sk=False), "", {}),
    "vissl": lambda: _vissl(trunk("resnet18"), "_feature_blocks.", linear("0.clf.0", 512, 128)),
    "separius": lambda: _separius("resnet50", sk=False),
    "separius-sk": lambda: _separius("resnet50-sk", sk=True),
    "detectron2": lambda: Contents(
        container="pickle",
        tree={"model": as_detectron2(trunk("resnet50")), "__author__": "MOCO", "matching_heuristics": True},
    ),
    "openmmlab": lambda: _upstream("mmpretrain_byol"),
    "moco": _moco,
    "moco-v3": _moco_v3,
    "swav": _swav,
    "paws": lambda: torch_file(
        encoder=under("module.", trunk("resnet50") | linear("fc.fc1", 2048, 128) | linear("pred.0", 128, 8)), epoch=1
    ),
    "dino": _dino,
    "mile": lambda: _mile(trunk("resnet18"), 512),
    "mile-simclrv2-sk": lambda: _mile(as_separius(trunk("resnet50-sk"), sk=True), 2048),
    "mile-simclrv2": lambda: _mile(as_separius(trunk("resnet50"), sk=False), 2048),
    "barlow-twins": lambda: _upstream("barlow_checkpoint"),
    "vicreg": lambda: _upstream("vicreg_model"),
    "simsiam": lambda: _upstream("simsiam_r50"),
    "solo-learn": _solo,
    "lightly": lambda: _lightly(
        as_children(trunk("resnet18")), under("backbone_momentum.", as_children(trunk("resnet18")))
    ),
    "lightly-generator": lambda: _lightly(as_children(as_generator(trunk("resnet18-cifar")), 2), {}),
    "lightly-benchmark": lambda: _lightly(
        trunk("resnet50"), linear("online_classifier.classification_head", 2048, 1000)
    ),
    "tonylins": _tonylins,
    "byol-convert": lambda: byol_convert(trunk("resnet18-proj")),
    "torchvision": lambda: flat(trunk("resnet50") | linear("fc", 2048, 1000)),
    "vit": lambda: flat(trunk("timm:vit_tiny_patch16_224") | linear("head", 192, 1000)),
}
"""For each adapter a file as its makers write it."""
