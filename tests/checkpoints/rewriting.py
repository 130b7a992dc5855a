"""Write the shared checkpoints' weights again in formats whose own files are not here.

    python tests/checkpoints/rewriting.py FOLDER
    python -m tests.weights_page --parity ../shared/checkpoints --rewritten FOLDER

Each lies in a folder of its own beside `expected.npz`: the features that the upstream network gave
for these weights, or torchvision's and timm's own where there is no upstream. So every format's
adapter is measured, not only those of the files that are here.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import torch
from bundles import write_bundle
from making import (
    Tensors,
    as_children,
    as_detectron2,
    as_haiku,
    as_separius,
    as_tensorflow,
    byol_convert,
    linear,
    under,
)
from material import SHARED, unpack
from safetensors.torch import save_file
from torch import nn
from torchvision.models import resnet50

from finetune_mile.checkpoints.loading import open_trunk

ODD = 65  # an odd size: there SAME padding is torch's, so torchvision can be the reference


def solid(tensors: Tensors) -> Tensors:
    return {name: tensor.contiguous().clone() for name, tensor in tensors.items()}


def save(folder: Path, tree: object, expected: dict[str, np.ndarray], name: str = "weights.pth") -> None:
    folder.mkdir(parents=True)
    torch.save(tree, folder / name)
    np.savez(folder / "expected.npz", **expected)


def shared(name: str, folder: Path) -> tuple[Tensors, dict[str, np.ndarray]]:
    """Weights of a shared checkpoint in our names, and the upstream's inputs and features."""
    place = folder / f".{name}"
    place.mkdir(parents=True)
    paths = [unpack(file, place) for file in (SHARED / name).glob("*.zst")]
    for file in (SHARED / name).glob("*.index"):
        (place / file.name).write_bytes(file.read_bytes())
        paths = [place / file.name]
    data = np.load(SHARED / name / "expected.npz")
    wanted = {key: data[key] for key in data if key.startswith(("x_", "features_"))}
    return dict(open_trunk(str(paths[0])).network.state_dict()), wanted


def from_moco(folder: Path) -> None:
    ours, expected = shared("mocov2", folder)
    heads = linear("projection_head.0", 512, 512) | linear("prototypes", 128, 30, bias=False)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in ours.items()}
    wrong = under("momentum_encoder.", zeros)
    both = under("backbone.module.", ours) | under("teacher.module.", zeros)
    trees = {
        "torchvision": ours | linear("fc", 512, 10),
        "swav": under("module.", ours | heads),
        "paws": {"encoder": under("module.", ours | linear("fc.fc1", 512, 8))},
        "dino": {"teacher": under("backbone.", ours), "student": under("module.backbone.", zeros)},
        "mile": {"model": both},
        "moco_v3": {"state_dict": under("module.", under("base_encoder.", ours) | wrong)},
        "solo_2021": {"state_dict": under("encoder.", ours) | wrong | linear("projector.0", 512, 8)},
        "lightly_benchmark": {"state_dict": under("backbone.", ours) | linear("projection_head.layers.0", 512, 8)},
        "unknown_prefix": under("module.pre.", ours),
        "sequential": under("enc.", as_children(ours)),
    }
    for name, tree in trees.items():
        plain = {k: solid(v) if isinstance(v, dict) else v.clone() for k, v in tree.items()}
        save(folder / name, plain, expected)
    arrays = {name: tensor.numpy() for name, tensor in as_detectron2(ours).items()}
    (folder / "detectron2").mkdir()
    model = {"model": arrays, "__author__": "MOCO", "matching_heuristics": True}
    (folder / "detectron2" / "moco.pkl").write_bytes(pickle.dumps(model))
    np.savez(folder / "detectron2" / "expected.npz", **expected)


def from_simclr(folder: Path) -> None:
    ours, expected = shared("simclrv2_tf1_sk1", folder)
    port = solid(as_separius(ours, sk=True))
    save(folder / "separius_sk1", {"resnet": port, "head": {}}, expected)
    model = {"trunk": port, "heads": {}}
    save(folder / "vissl_sk", {"classy_state_dict": {"base_model": {"model": model}}}, expected)
    text = (SHARED / "keys" / "simclr_v2_tf2_savedmodel_sk1.key_to_full_name.txt").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line]
    full = {key: name.removeprefix("full_name=") for key, name, _, _ in rows}
    numbered = as_tensorflow(ours, scope="")
    arrays = {
        key: numbered["/".join(name.split("/")[-2:])].contiguous().numpy()
        for key, name in full.items()
        if name.startswith("resnet/")
    }
    write_bundle(folder / "simclrv2_tf2_sk1" / "ckpt-1", arrays, full_names=full, shards=16)
    np.savez(folder / "simclrv2_tf2_sk1" / "expected.npz", **expected)


def from_byol(folder: Path) -> None:
    ours, expected = shared("byol_plain", folder)
    tree = {name: tensor.clone() for name, tensor in byol_convert(ours).tree.items()}
    save(folder / "byol_convert", tree, expected)


def from_torchvision(folder: Path) -> None:
    torch.manual_seed(0)
    network = resnet50()
    network.fc = nn.Identity()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.1, 0.1)
            nn.init.uniform_(module.running_var, 0.8, 1.2)
    images = torch.rand(2, 3, ODD, ODD)
    with torch.inference_mode():
        features = network.eval()(images)
    expected = {f"x_{ODD}": images.numpy(), f"features_{ODD}": features.numpy()}
    ours = dict(network.state_dict())
    save(folder / "separius_sk0", {"resnet": solid(as_separius(ours, sk=False)), "head": {}}, expected)
    plain = {name: tensor for name, tensor in ours.items() if "num_batches" not in name}
    arrays = {name: tensor.contiguous().numpy() for name, tensor in as_tensorflow(plain).items()}
    write_bundle(folder / "simclr_tf1_sk0" / "model.ckpt-1", arrays, shards=16)
    np.savez(folder / "simclr_tf1_sk0" / "expected.npz", **expected)
    params, state = (
        {module: {leaf: value.numpy() for leaf, value in leaves.items()} for module, leaves in part.items()}
        for part in as_haiku(plain, "res_net50")
    )
    (folder / "byol_res50").mkdir()
    raw = pickle.dumps({"experiment_state": {"online_params": params, "online_state": state}}, 2)
    (folder / "byol_res50" / "weights.pkl").write_bytes(raw)
    np.savez(folder / "byol_res50" / "expected.npz", **expected)


def from_timm(folder: Path) -> None:
    import timm

    for name in ("resnet50d", "vit_tiny_patch16_224"):
        network = timm.create_model(name, num_classes=0).eval()
        images = torch.rand(2, 3, 224, 224)
        with torch.inference_mode():
            features = network(images)
        (folder / f"timm_{name}").mkdir()
        save_file(network.state_dict(), folder / f"timm_{name}" / "model.safetensors")
        data = {"x_224": images.numpy(), "features_224": features.numpy()}
        np.savez(folder / f"timm_{name}" / "expected.npz", **data)


def main(folder: Path) -> None:
    """Write them all."""
    for step in (from_moco, from_simclr, from_byol, from_torchvision, from_timm):
        step(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
