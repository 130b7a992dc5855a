"""--trunk: a classifier on features that are computed once, in the same loop; and parts of a backbone that learn."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from shortcuts import SHORT, SHORT_MILE, losses

import finetune_mile
from finetune_mile.cli import main as embed
from finetune_mile.core.problems import Problem
from finetune_mile.images.sources import load_data
from finetune_mile.networks.heads import build, get_head, new_head
from finetune_mile.networks.parts import blocks_of, choose_trainable
from finetune_mile.run import main
from finetune_mile.training import features, finish
from finetune_mile.training.processes import Device

PLAIN = ["--arch", "resnet-demo-gn", "--set", "augment.crop=none", "--set", "augment.flip=false"]
FROZEN = [*PLAIN, "--trunk", "frozen"]
WIDE = ["--set", "feature_dtype=float32"]
TENTH = ["--fraction", "0.1", "--semi"]


@pytest.fixture(autouse=True)
def short(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(finish, "write_report", lambda *anything: None)  # half of the time of a run this small


@pytest.fixture
def embedded(monkeypatch):
    """How many images were shown to a backbone for their features."""
    rows, write = [], features._write_rows

    def note(writer, members, outputs):
        rows.extend(members.tolist())
        write(writer, members, outputs)

    monkeypatch.setattr(features, "_write_rows", note)
    return rows


def exported(run):
    return load_file(run / "export/model.safetensors")


def results(run):
    return json.loads((run / "results.json").read_text())


@pytest.mark.parametrize("flags", [[], [*TENTH, "all", "--set", "mile.pseudo_labels=cycle"]], ids=["batch", "cycle"])
def test_a_head_on_features_is_the_head_that_images_train(run_demo, flags):
    """float32 to the bit: the same batches, and a backbone whose rows do not depend on their neighbours."""
    flags = [*SHORT_MILE, "--data", "demo:120", "--steps", "12", *flags]
    images = run_demo("images", *flags, *PLAIN, "--trunk", "last:0")
    wide = run_demo("wide", *flags, *FROZEN, *WIDE)
    half = run_demo("half", *flags, *FROZEN)
    whole = exported(images)
    assert all(tensor.equal(exported(wide)[name]) for name, tensor in whole.items())
    assert results(wide) == results(images)
    assert losses(wide) == losses(images)
    assert abs(results(half)["accuracy"] - results(images)["accuracy"]) <= 0.3
    moved = float((exported(half)["fc.weight"] - whole["fc.weight"]).abs().max())
    assert 0 < moved < 1e-3, "float16 is not float32"


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mile", "softmax"])
def test_float16_costs_no_accuracy(run_demo, method):
    """On 1,000 validation images that a backbone of another scale than a new classifier tells apart."""
    flags = ["--data", "demo:4000", "--init", "simclr-demo", "--trunk", "frozen", "--method", method]
    flags += ["--recipe", "finetune", "--keep", "last", "--steps", "300", "--batch-size", "64", "--set", "precision=no"]
    half, wide = (run_demo(dtype, *flags, "--set", f"feature_dtype={dtype}") for dtype in ("float16", "float32"))
    assert results(wide)["images"] == 1000
    assert results(wide)["accuracy"] > 30
    assert results(half)["accuracy"] == pytest.approx(results(wide)["accuracy"], abs=0.3)


def test_the_export_joins_backbone_and_head(run_demo):
    out = run_demo("run", *SHORT_MILE, "--init", "simclr-demo", "--arch", "resnet-demo", "--trunk", "frozen", *WIDE)
    backbone = finetune_mile.load("simclr-demo").state_dict()
    tensors = exported(out)
    assert all(tensor.equal(tensors[name]) for name, tensor in backbone.items())
    network = finetune_mile.load_classifier(str(out))
    images = load_data("demo:200").val
    logits = network(torch.stack([network.preprocess(images.read(i)) for i in range(len(images))]))
    right = 100 * float((logits.argmax(1) == images.given).float().mean())
    assert right == pytest.approx(results(out)["accuracy"], abs=1.0)


@pytest.mark.parametrize("arch", ["resnet-demo-gn", "timm:test_vit"])
@pytest.mark.parametrize("head", ["bn-linear", "mlp"])
def test_other_heads_are_trained_and_exported(run_demo, tmp_path, monkeypatch, capsys, head, arch):
    """The export gives the logits of backbone, norm or hidden layer, and classifier."""
    learners, write = [], finish.write_export

    def keep(folder, network, config):
        write(folder, network, config)
        learners.append(network)

    monkeypatch.setattr(finish, "write_export", keep)
    scored, outputs = [], Device.outputs
    monkeypatch.setattr(Device, "outputs", lambda self, *given: scored.append(given[0]) or outputs(self, *given))
    flags = [*SHORT, "--method", "sigmoid", "--data", "demo:40", "--arch", arch, "--trunk", "frozen", *WIDE]
    size = 160 if arch.startswith("timm") else 24
    out = run_demo("run", *flags, "--set", f"head={head}", "--set", f"size={size}", "--set", "head_weight=normal")
    classifier = finetune_mile.load_classifier(str(out))
    images = load_data("demo:40").val
    batch = torch.stack([classifier.preprocess(images.read(i)) for i in range(8)])
    with torch.inference_mode():
        features = finetune_mile.load(str(out))(batch)  # the backbone alone
        trained = scored[-1].cpu().eval()(features)
        assert classifier(batch).allclose(trained, atol=1e-4)
    tensors = exported(out)
    (weight,) = (tensor for name, tensor in tensors.items() if name in ("fc.weight", "head.weight"))
    hidden = [tensor.shape[0] for name, tensor in tensors.items() if name.endswith("hidden.weight")]
    assert (weight.shape[1], hidden) == ((2048, [2048]) if head == "mlp" else (features.shape[1], []))
    if head == "bn-linear":
        norm = scored[-1].norm
        assert norm.running_mean.abs().max() > 0.01
        assert not norm.state_dict().keys() & {"weight", "bias"}
    elif arch.startswith("timm"):
        assert embed(["weights", "convert", str(out / "export"), str(tmp_path / "timm"), "--to", "timm"]) == 2
        assert "test_vit has other tensors, first head.hidden.bias" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        [*SHORT, "--method", "softmax"],
        [*SHORT, "--method", "noisy-student"],
        [*SHORT, "--method", "self-distill"],
        [*SHORT, "--method", "wan"],
        [*SHORT, "--method", "large-loss", "--set", "large_loss.share=0.2"],
        [*SHORT, "--method", "role"],
        [*SHORT_MILE, "--rho", "auto"],
        [*SHORT_MILE, *TENTH, "unlabelled", "--set", "labelled_share=0.4", "--set", "mile.targets=soft"],
    ],
    ids=["softmax", "noisy-student", "self-distill", "wan", "large-loss", "role", "auto", "semi"],
)
def test_every_method_trains_a_head(run_demo, flags):
    out = run_demo("run", *flags, *FROZEN)
    assert len(losses(out)) == 24
    tensors = exported(out)
    assert tensors["fc.weight"].shape == (10, 128)
    assert "layer1.0.conv1.weight" in tensors


def test_features_are_found_again_under_another_name_and_other_settings(run_demo, embedded):
    run_demo("first", *SHORT_MILE, *FROZEN)
    assert len(embedded) == 250
    run_demo("second", *SHORT, "--method", "softmax", *FROZEN)
    assert len(embedded) == 250
    run_demo("third", *SHORT_MILE, *FROZEN, "--seed", "1")  # other random weights
    assert len(embedded) == 500


def test_a_run_finds_the_features_of_embed(run_demo, embedded):
    """Also a run in another precision: its features are computed in float32."""
    assert embed(["embed", "--init", "simclr-demo", "--data", "demo:200"]) == 0
    assert len(embedded) == 250
    flags = [*SHORT_MILE, "--init", "simclr-demo", "--arch", "resnet-demo", "--trunk", "frozen"]
    run_demo("run", *flags, "--set", "precision=bf16")
    assert len(embedded) == 250


def test_only_what_a_run_needs_is_embedded(run_demo, embedded):
    out = run_demo("run", *SHORT_MILE, *FROZEN, "--fraction", "0.1")
    assert len(embedded) == json.loads((out / "split.json").read_text())["labelled"] + 50 < 100


def test_explain_embeds_nothing(tmp_path, capsys, embedded):
    assert main([*SHORT_MILE, *FROZEN, "--out", str(tmp_path / "run"), "--explain"]) == 0
    assert "frozen: 1,290 parameters learn, on features" in capsys.readouterr().out
    assert not embedded
    assert not (tmp_path / "cache").exists()


def test_a_stopped_run_continues(run_demo, stop_at, tmp_path):
    flags = [*SHORT_MILE, *FROZEN]
    whole = exported(run_demo("whole", *flags))
    stop_at(11)
    assert main([*flags, "--out", str(tmp_path / "stopped")]) == 143
    stop_at(None)
    assert main(["--resume", str(tmp_path / "stopped")]) == 0
    assert all(tensor.equal(whole[name]) for name, tensor in exported(tmp_path / "stopped").items())


def test_bad_images_are_replaced_and_counted(run_demo, tmp_path):
    from PIL import Image

    for part in ("train", "val"):
        for label in ("a", "b"):
            (tmp_path / "photos" / part / label).mkdir(parents=True)
            for i in range(6):
                pixels = np.random.default_rng(i).integers(0, 255, (24, 24, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / part / label / f"{i}.png")
        (tmp_path / "photos" / part / "a/2.png").write_bytes(b"broken")
    out = run_demo(
        "run", *SHORT, "--method", "sigmoid", *FROZEN, "--data", str(tmp_path / "photos"), "--set", "workers=0"
    )
    assert results(out)["images"] == 11
    assert results(out)["bad_images"] == 2
    assert all(bool(tensor.isfinite().all()) for tensor in exported(out).values())


@pytest.mark.parametrize("arch", ["resnet-demo", "timm:vit_tiny_patch16_224"])
def test_parts_of_a_backbone_learn(arch):
    network = build(arch)
    new_head(network, 3, "zero")
    head = {id(p) for p in get_head(network).parameters()}

    def learning():
        return {name for name, p in network.named_parameters() if p.requires_grad and id(p) not in head}

    everything = learning()
    choose_trainable(network, "norm-only")
    norms = learning()
    assert norms
    assert all("bn" in name or "norm" in name or "downsample.1" in name for name in norms)
    choose_trainable(network, "last:0")
    assert learning() == set()
    assert all(p.requires_grad for p in get_head(network).parameters())
    choose_trainable(network, "last:1")
    last = learning()
    prefix = "layer4" if arch == "resnet-demo" else "blocks.11"
    assert {name for name in last if name.startswith(prefix)}
    assert all(name.startswith((prefix, "norm", "fc_norm")) for name in last)
    choose_trainable(network, f"last:{len(blocks_of(network))}")
    assert last < learning() < everything, "the stem stays"
    with pytest.raises(Problem, match="blocks; use last:0"):
        choose_trainable(network, "last:99")


def test_norm_only_leaves_the_rest_alone(run_demo):
    tensors = exported(run_demo("run", *SHORT, "--init", "simclr-demo", "--method", "sigmoid", "--trunk", "norm-only"))
    before = finetune_mile.load("simclr-demo").state_dict()
    moved = {name for name, tensor in before.items() if tensor.is_floating_point() and not tensor.equal(tensors[name])}
    assert moved
    assert not any("conv" in name for name in moved)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--trunk", "ice"], "'ice' is not one of all, frozen, norm-only, last:N"),
        (["--trunk", "frozen", "--method", "distill", "--teacher", "simclr-demo"], "--trunk last:0"),
        (["--trunk", "frozen", "--set", "augment.cutmix=1"], "does not go with augment.cutmix"),
        (["--set", "head=mlp"], "head: mlp is for --trunk frozen: add it, or leave head out"),
        (["--trunk=frozen", "--set=head=mlp", "--head-init=probe"], "head: mlp starts anew: use --head-init random"),
        (["--trunk=frozen", "--set=head=bn-linear", "--keep-head=fc"], "head: bn-linear starts anew"),
    ],
)
def test_what_is_refused(flags, sentence, tmp_path, capsys):
    assert main([*SHORT_MILE, *flags, "--out", str(tmp_path / "run")]) == 2
    assert sentence in capsys.readouterr().err
