"""Images that never had a label: folders and lists of them, runs that imitate on them, and two views of each."""

import json

import pytest
import torch
from photos import photo
from safetensors.torch import load_file
from shortcuts import losses, refused

from finetune_mile import cli
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Preprocess
from finetune_mile.images.pipeline import Augmentation, Views, batches
from finetune_mile.images.sources import load_data, load_unlabelled
from finetune_mile.run import main
from finetune_mile.training import steps as training
from finetune_mile.training.features import stamper

CLASSES = ("a", "b", "c")
FLAGS = [
    "--init", "none", "--arch", "resnet-demo", "--steps", "12", "--batch-size", "8", "--k-t", "4", "--k-s", "2",
    "--set", "size=16", "--set", "log_every=1", "--set", "checkpoint_every=5", "--set", "mile.warmup=0",
    "--set", "evaluate.labels=false", "--set", "workers=0",
]  # fmt: skip
SEMI = [*FLAGS, "--semi", "unlabelled"]
CYCLE = ["--set", "mile.pseudo_labels=cycle"]
SIDE = (24, 20)


def write(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(photo(sum(map(ord, str(name))), size=SIDE))
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path):
    """12 labelled images and 6 to validate on."""
    names = [f"train/{k}/{i}.jpg" for k in CLASSES for i in range(4)]
    return write(tmp_path / "photos", *names, *(f"val/{k}/{i}.jpg" for k in CLASSES for i in range(2)))


@pytest.fixture
def loose(tmp_path):
    """30 images in no class folder."""
    return write(tmp_path / "loose", *(f"{i:02d}.jpg" for i in range(30)))


def said(capsys):
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]


# ------------------------------------------------------------------------------------ sources


def test_a_folder_of_nothing_but_images_has_no_labels(loose, tmp_path):
    data = load_data(str(loose), need_labels=False)
    assert data.classes == ()
    assert data.train.given.tolist() == [-1] * 30
    assert list(data.train.ids) == [f"{i:02d}.jpg" for i in range(30)]
    assert len(data.val) == 0
    with refused("30 images", "finetune-mile pretrain", "--unlabelled"):
        load_data(str(loose))
    write(loose, "cat/1.jpg")
    with refused("00.jpg", "class folder", "unlabelled/", "--unlabelled"):
        load_data(str(loose), need_labels=False)
    nested = load_data(f"{loose}?labels=none", need_labels=False)
    assert len(nested.train) == 31
    assert "cat/1.jpg" in nested.train.ids
    with pytest.raises(Problem, match="labels=some must be none, or left out"):
        load_data(f"{loose}?labels=some")
    with refused("one class (cat)", "labels=none"):
        load_data(str(write(tmp_path / "one", "cat/1.jpg", "cat/2.jpg")), need_labels=False)


def test_unlabelled_beside_train_joins_the_training_images(photos):
    before = load_data(str(photos))
    write(photos, "unlabelled/x.jpg", "unlabelled/deep/a.jpg")
    data = load_data(str(photos))
    assert data.classes == CLASSES
    assert list(data.train.ids) == [*before.train.ids, "unlabelled/deep/a.jpg", "unlabelled/x.jpg"]
    assert data.train.given.tolist() == [*before.train.given.tolist(), -1, -1]
    assert data.train.read(12).shape == (3, SIDE[1], SIDE[0])
    assert data.train.content(13) == (photos / "unlabelled/x.jpg").read_bytes()
    assert data.train.content(11) == before.train.content(11)
    stamp = stamper(data.train.content)
    assert stamp(11).startswith(f"{photos}/train/c/3.jpg ")
    assert stamp(13).startswith(f"{photos}/unlabelled/x.jpg ")
    everything = load_data(f"{photos}?labels=none", need_labels=False)
    assert everything.classes == ()
    assert len(everything.train) == 14
    assert len(everything.val) == 6


def test_unlabelled_in_one_tree_is_no_class(tmp_path):
    names = [f"{k}/{i}.jpg" for k in CLASSES for i in range(5)]
    data = load_data(str(write(tmp_path / "tree", *names, "unlabeled/1.jpg", "unlabeled/2.jpg")))
    assert data.classes == CLASSES
    assert int((data.train.given < 0).sum()) == 2
    assert len(data.train) == 14
    assert int((data.val.given < 0).sum()) == 0


@pytest.mark.parametrize("split", [True, False])
def test_an_empty_label_in_a_list_is_an_unlabelled_image(photos, split):
    rows = [f"train/{k}/{i}.jpg,{k if i else ''},train" for k in CLASSES for i in range(4)]
    rows += [f"val/{k}/{i}.jpg,{k},val" for k in CLASSES for i in range(2)]
    lines = ["file,label,split", *rows] if split else ["file,label", *(row.rpartition(",")[0] for row in rows)]
    (photos / "list.csv").write_text("\n".join(lines))
    data = load_data(f"csv:{photos / 'list.csv'}")
    assert data.classes == CLASSES
    assert int((data.train.given < 0).sum()) == 3
    assert int((data.val.given < 0).sum()) == 0
    with pytest.raises(Problem, match="labelled images"):
        main_split(photos, data, fraction=0.1)


def main_split(photos, data, fraction):
    """A list of all labelled images, with a fraction that it is not."""
    from finetune_mile.images.splits import labelled_pools

    names = [name for name, label in zip(data.train.ids, data.train.given.tolist(), strict=True) if label >= 0]
    (photos / "split.txt").write_text("\n".join(names))
    return labelled_pools(data, fraction=fraction, seed=0, split=str(photos / "split.txt"))


def test_lists_and_fractions_count_labelled_images_only(photos):
    write(photos, *(f"unlabelled/{i:03d}.jpg" for i in range(100)))
    data = load_data(str(photos))
    pools = main_split(photos, data, fraction=0.9)
    assert {name: len(members) for name, members in pools.indices.items()} == {
        "labelled": 12, "unlabelled": 100, "all": 112,
    }  # fmt: skip


def test_pretraining_embed_doctor_and_pack_take_images_without_labels(loose, tmp_path, capsys):
    assert cli.main(["check", "--data", str(loose), "--workers", "0"]) == 0
    out = capsys.readouterr().out
    assert "loose: 30 training and 0 validation images, 0 classes" in out
    assert "train: 30 images without labels" in out
    assert cli.main(["pack", str(loose), str(tmp_path / "packed"), "--size", "16", "--workers", "1"]) == 0
    assert len(load_data(f"wds:{tmp_path / 'packed'}", need_labels=False).train) == 30
    assert (
        cli.main(["embed", "--init", "simclr-demo", "--data", str(loose), "--workers", "0", str(tmp_path / "f")]) == 0
    )
    assert "30 training and 0 validation images, 128 features" in capsys.readouterr().out
    run = tmp_path / "pretrained"
    flags = ["--data", str(loose), "--arch", "resnet-mini", "--steps", "2", "--batch-size", "8", "--set", "workers=0"]
    assert cli.main(["pretrain", *flags, "--set", "size=16", "--out", str(run)]) == 0
    results = json.loads((run / "results.json").read_text())
    assert results["images"] == 30
    assert results["neighbours"] is None


# ------------------------------------------------------------------------------------ runs


@pytest.fixture
def drawn(monkeypatch):
    """(pool, batch) of every part of a batch that is fed."""
    seen, feed = [], training.feed

    def recording(task, device, pool, first_step):
        for batch in feed(task, device, pool, first_step):
            seen.append((pool, batch))
            yield batch

    monkeypatch.setattr(training, "feed", recording)
    return seen


@pytest.mark.parametrize(
    "extra",
    [[], CYCLE, ["--set", "labelled_share=0.25"], ["--rho", "auto", "--set", "auto.gate=off"], ["--trunk", "frozen"]],
)
def test_a_run_imitates_on_another_folder(photos, loose, run_demo, drawn, capsys, extra):
    run = run_demo("run", *SEMI, "--data", str(photos), "--fraction", "1.0", "--unlabelled", str(loose), *extra)
    imitated = torch.cat([batch.samples for pool, batch in drawn if pool != "labelled"])
    taught = torch.cat([batch.samples for pool, batch in drawn if pool == "labelled"])
    assert int(taught.max()) < 12
    assert int((imitated >= 12).sum()) == (12 if "labelled_share=0.25" in extra else 16) * len(imitated) // 16
    split = json.loads((run / "split.json").read_text())
    assert split["unlabelled"] == 30
    assert split["labelled"] == 12 - len(split.get("calibration", ()))
    assert "of 42 training images keep their label" in capsys.readouterr().err


def test_supervised_steps_do_not_change_with_unlabelled_images(photos, loose, run_demo):
    """Only the first interaction: later weights have seen other images."""
    plain = run_demo("plain", *FLAGS, "--data", str(photos))
    more = run_demo("more", *SEMI, "--data", str(photos), "--unlabelled", str(loose))
    assert losses(plain)[:4] == losses(more)[:4]
    assert losses(plain)[4:] != losses(more)[4:]


def test_a_stopped_run_continues_and_notices_other_images(photos, loose, run_demo, tmp_path, stop_at, capsys):
    flags = [*SEMI, "--data", str(photos), "--unlabelled", str(loose)]
    undisturbed, stopped = run_demo("undisturbed", *flags), tmp_path / "stopped"
    stop_at(6)
    assert main([*flags, "--out", str(stopped)]) == 143
    stop_at(None)
    write(loose, "one-more.jpg")
    assert main(["--resume", str(stopped)]) == 2
    assert "the training images changed since the run began: 12 labelled and 30 not, now 12 and 31" in said(capsys)[0]
    (loose / "one-more.jpg").unlink()
    assert main(["--resume", str(stopped)]) == 0
    one, two = (load_file(run / "export/model.safetensors") for run in (undisturbed, stopped))
    assert all(tensor.equal(two[name]) for name, tensor in one.items())


def test_a_bad_unlabelled_image_is_listed_and_replaced(photos, loose, run_demo, drawn):
    (loose / "07.jpg").write_bytes(b"no image")
    run = run_demo("run", *SEMI, "--data", str(photos), "--unlabelled", str(loose), *CYCLE)
    assert "train,unlabelled/07.jpg," in (run / "bad_images.csv").read_text()
    assert 12 + 7 not in torch.cat([batch.samples for _, batch in drawn]).tolist()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--method", "sigmoid"], "--unlabelled needs a method that imitates, such as mile; sigmoid learns from"),
        ([], "--unlabelled needs --semi all or --semi unlabelled"),
        (["--semi", "all", "--unlabelled", "nowhere"], "--unlabelled nowhere: there is no directory 'nowhere'"),
        (["--semi", "all", "--unlabelled", "EMPTY"], "--unlabelled folder:EMPTY?labels=none: no images"),
        (["--semi", "all", "--unlabelled", "fodler:x"], "--unlabelled fodler:x: no source is called 'fodler'"),
        (["--semi", "all", "--data", "LOOSE"], "--data LOOSE: none of its 30 images has a label"),
        (["--set", "views=weak-strong", "--semi", "all", "--trunk", "frozen"], "--trunk frozen does not go with views"),
        (["--set", "views=weak-strong", "--semi", "all", *CYCLE], "with pseudo_labels: cycle the teacher sees"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_one_sentence(flags, sentence, photos, loose, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    places = {"LOOSE": str(loose), "EMPTY": str(tmp_path / "empty")}
    words = [places.get(word, word) for word in ["--data", str(photos), "--unlabelled", "LOOSE", *flags]]
    assert main([*FLAGS[:8], *words, "--out", str(tmp_path / "run")]) == 2
    errors = said(capsys)
    assert len(errors) == 1
    for name, place in places.items():
        sentence = sentence.replace(name, place)
    assert sentence in errors[0]
    assert not (tmp_path / "run").exists()


def test_unused_images_and_prices_are_told(photos, loose, capsys):
    write(photos, *(f"unlabelled/{i}.jpg" for i in range(5)))
    assert main([*FLAGS, "--data", str(photos), "--explain"]) == 0
    assert "5 images have no label and are not used; use them with --method mile --semi all" in capsys.readouterr().out
    flags = [*SEMI, "--data", str(photos), "--unlabelled", str(loose), *CYCLE]
    assert main([*flags, "--explain"]) == 0
    out = capsys.readouterr().out
    assert "12 of 47 training images keep their label" in out
    assert "are not used" not in out
    assert cli.main(["check", *flags]) == 0
    cost = capsys.readouterr().out
    assert "70 images by the teacher" in cost, "two generations label 35 images each"


def test_folders_lists_and_sets_are_taken_without_their_labels(photos, tmp_path):
    assert len(load_unlabelled(str(photos)).train) == 12, "of train/ and val/ only train/"
    tree = write(tmp_path / "tree", *(f"{k}/{i}.jpg" for k in CLASSES for i in range(5)))
    assert len(load_unlabelled(f"folder:{tree}").train) == 15, "no fifth is held out"
    assert len(load_unlabelled("demo:40").train) == 40


# ------------------------------------------------------------------------------------ two views


def test_two_views_have_their_own_draws_and_the_first_is_as_before(photos):
    data, how = load_data(str(photos)), Preprocess(size=12)
    crop = Augmentation(crop="random-resized", scale=(0.3, 1), shift=0, flip=True)
    keys = [[(0, i) for i in range(6)], [(1, i) for i in range(6)]]

    def both_views():
        views = Views(data.train, how, crop, 1)
        views.weak = crop
        return views

    plain = list(batches(Views(data.train, how, crop, 1), keys, workers=0, pin=False))
    twice = [list(batches(both_views(), keys, workers=workers, pin=False)) for workers in (0, 2)]
    for alone, both, elsewhere in zip(plain, *twice, strict=True):
        assert alone.weak is None
        assert both.images.equal(alone.images)
        assert both.weak.shape == both.images.shape
        assert both.weak.equal(elsewhere.weak)
        assert not both.weak.equal(both.images)
    assert not twice[0][0].weak.equal(twice[0][1].weak), "another epoch"
    half = next(iter(batches(both_views(), [keys[0][3:]], workers=0, pin=False)))
    assert half.weak.equal(twice[0][0].weak[3:]), "of each image, not of a batch"


def test_the_teacher_sees_the_weak_view(photos, loose, run_demo, drawn, monkeypatch):
    from finetune_mile.learning.loop import LabelObjective

    inputs, targets = [], LabelObjective._targets

    def recording(self, loop, record, seen, given, batch):
        if not record.phase.given:
            hook = loop.roles.teacher.register_forward_pre_hook(lambda _, args: inputs.append(args[0].clone()))
        try:
            return targets(self, loop, record, seen, given, batch)
        finally:
            if not record.phase.given:
                hook.remove()
                inputs[-1] = (inputs[-1], self.prepare(batch.weak), self.prepare(batch.images))

    monkeypatch.setattr(LabelObjective, "_targets", recording)
    flags = [*SEMI, "--data", str(photos), "--unlabelled", str(loose)]
    colour = ["--set", "augment.policy=trivial"]
    run = run_demo("run", *flags, *colour, "--set", "views=weak-strong")
    assert len(inputs) == 4
    for by_teacher, weak, strong in inputs:
        assert by_teacher.equal(weak)
        assert not by_teacher.equal(strong)
    monkeypatch.undo()
    assert losses(run)[:4] == losses(run_demo("same", *flags, *colour))[:4], "interactions stay"


def test_the_weak_view_may_have_a_crop_of_its_own(photos, loose, run_demo, drawn):
    flags = [*SEMI, "--data", str(photos), "--unlabelled", str(loose), "--set", "views=weak-strong"]
    crops = ["--set", "augment.crop=random-resized", "--set", "augment.scale=[0.1,0.2]"]

    def seen(name, *more):
        drawn.clear()
        run_demo(name, *flags, *crops, *more)
        return [batch for pool, batch in drawn if pool != "labelled"]

    for one, other in zip(seen("one"), seen("other", "--set", "augment.weak_scale=[0.9,1.0]"), strict=True):
        assert one.images.equal(other.images)
        assert not one.weak.equal(other.weak)
