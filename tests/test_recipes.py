"""The recipes of the paper's tables: every value has a source, every cell a plan; the command picks the right one."""

import re

import pytest
import yaml
from shortcuts import ROOT

from finetune_mile.checkpoints.cards import find_card
from finetune_mile.config.resolve import choose_recipe, find_recipe, read_yaml, resolve, resolve_tree
from finetune_mile.config.schema import FullRecipe
from finetune_mile.core.problems import Problem
from finetune_mile.learning.optim import rate_at
from finetune_mile.paper.tables.description import find_table, read_table
from finetune_mile.paper.tables.ledger import make_ledger
from finetune_mile.paper.tables.writing import markdown
from finetune_mile.training.plan import make_plan

FOLDERS = ("ssl", "semi", "imagenet")
RECIPES = [path for folder in FOLDERS for path in sorted((ROOT / "recipes" / folder).glob("*.yaml"))]
TRAIN = {0.01: 12_811, 0.05: 64_000, 0.1: 128_116, 1.0: 1_281_167}  # images; published lists at 1 and 10 %
UPSTREAM = ("MILe paper", "published MILe code", "SimCLR paper", "SimCLR README", "SimCLR code", "SimCLR-v2 paper",
            "SimCLR-v2 README", "BYOL paper", "BYOL code", "SwAV README", "SwAV eval_semisup.py", "VISSL",
            "lightly benchmarks")  # fmt: skip
# What a cell is (not how it is trained), and what leaves the weights as they are.
NO_NUMBER = ("data", "init", "arch", "teacher", "truth", "fraction", "method", "variant", "seed", "evaluate",
             "workers", "checkpoint_every", "log_every", "track")  # fmt: skip


def solve(path, **given):
    return resolve_tree(FullRecipe, read_yaml(path), path, "test", given)


@pytest.mark.parametrize("fraction", TRAIN)
@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_value_that_changes_a_number_says_where_it_is_from(path, fraction):
    found = solve(path, fraction=fraction)
    spoken = [key for key, speaker in found.said_by.items() if speaker.startswith(("recipe", "base"))]
    changing = [key for key in spoken if key.partition(".")[0] not in NO_NUMBER]
    assert len(changing) > 15
    for key in changing:
        source = found.sources.get(key, "")
        named = source.startswith(UPSTREAM) or re.match(r"our choice: .{20}", source)
        assert named, f"{path.name} at {fraction:g}: {key} has no source, but {source!r}"


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_method_and_fraction_of_a_table_has_a_plan(path):
    methods = {"ssl": ("softmax", "sigmoid", "mile"), "imagenet": ("softmax", "sigmoid", "mile"), "semi": (None,)}
    for fraction in (0.01, 0.1) if path.parent.name == "semi" else TRAIN:
        for method in methods[path.parent.name]:
            recipe = solve(path, fraction=fraction, **({} if method is None else {"method": method})).recipe
            pools = {"labelled": TRAIN[fraction], "all": TRAIN[1.0], "unlabelled": TRAIN[1.0] - TRAIN[fraction]}
            plan = make_plan(recipe, pools)
            if recipe.method == "mile":
                assert plan.phases[-1].name == "imitation"
                assert len(plan.phases) >= 7, f"{path.name} at {fraction:g}: too few generations to iterate"


@pytest.mark.parametrize(("fraction", "steps"), [(0.01, 751), (0.1, 3754), (1.0, 37535)])
def test_simclrv2_takes_its_published_numbers_of_steps(fraction, steps):
    recipe = solve(ROOT / "recipes/ssl/simclrv2.yaml", fraction=fraction, method="softmax").recipe
    pools = {"labelled": TRAIN[fraction], "all": TRAIN[1.0], "unlabelled": 0}
    assert make_plan(recipe, pools).total_steps == steps
    assert recipe.optimizer.lr == pytest.approx(0.005 * 1024**0.5)
    assert recipe.head_from == (0 if fraction == 1 else 1)


def test_what_upstream_says_of_each_family():
    swav = solve(ROOT / "recipes/ssl/swav.yaml", fraction=0.01).recipe.optimizer
    assert (swav.lr, swav.head_lr, swav.gamma, swav.milestones) == (0.02, 5.0, 0.2, ("12 epochs", "16 epochs"))
    large = solve(ROOT / "recipes/ssl/simclrv2-large.yaml", fraction=0.01).recipe
    assert large.optimizer.lr == pytest.approx(0.002 * 1024**0.5)
    assert (large.optimizer.name, large.head_weight, large.sync_batch_norm) == ("lars", "zero", True)
    assert solve(ROOT / "recipes/semi/self-distilled.yaml").recipe.distill.temperature == 0.1


def test_finding_3_distilled_learns_from_labels_and_teacher_and_starts_from_random_weights():
    path = ROOT / "recipes/semi/distilled.yaml"
    recipe = solve(path, fraction=0.01).recipe
    assert (recipe.init, recipe.arch, recipe.semi, recipe.head_from) == ("none", "resnet50", "all", 0)
    assert 0 < recipe.distill.label_weight < 1
    phase = make_plan(recipe, {"labelled": TRAIN[0.01], "all": TRAIN[1.0], "unlabelled": 0}).phases[0]
    assert (phase.label_weight, phase.pool, phase.loss) == (recipe.distill.label_weight, "all", "cross_entropy")
    assert "70.6 (1 %) or 77.0 (10 %)" in path.read_text(), "what its teacher must reach first"
    with pytest.raises(Problem, match=r"distill\.label_weight needs distill\.loss: cross_entropy"):
        resolve_tree(FullRecipe, read_yaml(path), path, "test", sets=["distill.loss=bce"])


@pytest.mark.parametrize("variant", ["paper", "published"])
@pytest.mark.parametrize(("fraction", "steps"), [(0.01, 751), (0.1, 3754)])
def test_finding_11_the_first_teacher_is_simclrv2s_fine_tuned_network(fraction, steps, variant):
    """Its number of steps on the labels, with the complete cosine; then a schedule for all other steps."""
    recipe = solve(ROOT / "recipes/semi/mile.yaml", fraction=fraction, variant=variant).recipe
    plan = make_plan(recipe, {"labelled": TRAIN[fraction], "all": TRAIN[1.0], "unlabelled": 0})
    warm_up, interaction, imitation = plan.phases[:3]
    assert warm_up.steps + interaction.steps in ((steps,) if variant == "paper" else (steps - 1,))
    assert (interaction.becomes, imitation.name, imitation.pool) == (("teacher",), "imitation", "all")
    assert sum(phase.steps for phase in plan.phases) == plan.total_steps == 37535
    assert plan.phases[-1].steps > imitation.steps, "the rest is imitation"
    settings = recipe.optimizer
    whole = {"total_steps": plan.total_steps, "schedule": settings.schedule, "restart": plan.steps(settings.restart)}
    alone = {"total_steps": steps, "schedule": "cosine"}
    assert [rate_at(s, **whole) for s in range(steps)] == [rate_at(s, **alone) for s in range(steps)]
    assert rate_at(steps - 1, **whole) < 1e-5
    assert rate_at(steps, **whole) == 1.0
    assert rate_at(plan.total_steps - 1, **whole) < 1e-5


def test_simclrv2s_cards_have_the_published_top_1_of_all_13_files():
    """README.md:21-33 of google-research/simclr 383d414."""
    published = {
        (50, 1, 0): (57.9, 68.4, 76.3, 71.7),
        (50, 1, 1): (64.5, 72.1, 78.7, 74.6),
        (50, 2, 0): (66.3, 73.9, 79.1, 75.6),
        (50, 2, 1): (70.6, 77.0, 81.3, 77.7),
        (101, 1, 0): (62.1, 71.4, 78.2, 73.6),
        (101, 1, 1): (68.3, 75.1, 80.6, 76.3),
        (101, 2, 0): (69.1, 75.8, 80.7, 77.0),
        (101, 2, 1): (73.2, 78.8, 82.4, 79.0),
        (152, 1, 0): (64.0, 73.0, 79.3, 74.5),
        (152, 1, 1): (70.0, 76.5, 81.3, 77.2),
        (152, 2, 0): (70.2, 76.6, 81.1, 77.4),
        (152, 2, 1): (74.2, 79.4, 82.9, 79.4),
        (152, 3, 1): (74.9, 80.1, 83.1, 79.8),
    }
    for (depth, width, kernels), (*tuned, linear) in published.items():
        card = find_card(f"simclrv2-r{depth}-{width}x-sk{kernels}")
        assert card.linear_top1 == linear, card.name
        assert card.finetune_top1 == dict(zip(("0.01", "0.1", "1.0"), tuned, strict=True)), card.name


@pytest.mark.parametrize(
    ("flags", "stem"),
    [
        ({"init": "simclrv2-sk1"}, "simclrv2-large"),
        ({"init": "simclrv2-r50-2x-sk0"}, "simclrv2-large"),
        ({"init": "simclrv2-r50-1x-sk1"}, "simclrv2-large"),  # an alias
        ({"init": "simclrv2-sk1::ema_model"}, "simclrv2-large"),
        ({"init": "simclrv2-sk0"}, "simclrv2"),
        ({"init": "simclr", "data": "imagenet"}, "simclr"),
        ({"init": "byol", "data": "imagenet:somewhere"}, "byol"),
        ({"init": "swav", "data": "hf:ILSVRC/imagenet-1k"}, "swav"),
        ({"init": "vissl-mocov2-200ep"}, "mocov2"),
        ({"init": "mocov2", "data": "folder:photos"}, "finetune"),
        ({"init": "mocov2", "data": "hf:me/birds"}, "finetune"),
        ({"init": "mocov2", "recipe": "ssl/any"}, "any"),
        ({"init": "deepclusterv2"}, "finetune"),
        ({"init": "no-such-card"}, "finetune"),
        ({"init": "timm:resnet50"}, "finetune"),
        ({"init": "none", "data": "imagenet"}, "scratch"),
        ({"data": "folder:photos"}, "scratch"),
        ({"init": "simclr-demo"}, "demo"),
        ({}, "demo"),
    ],
)
def test_the_recipe_follows_from_weights_and_data(flags, stem):
    path, why = choose_recipe(flags)
    assert path.stem == stem
    assert why


@pytest.mark.parametrize("init", ["simclr", "byol", "swav", "mocov2", "simclrv2-sk0", "simclrv2-sk1"])
def test_finding_13_every_family_is_fine_tuned_with_mile(init, tmp_path, monkeypatch):
    """README promises MILe; --init byol, swav and simclr ran softmax without a word."""
    monkeypatch.setenv("IMAGENET_DIR", str(tmp_path))
    assert resolve({"init": init, "fraction": 0.01}, []).recipe.method == "mile"


def test_finding_7_byols_sweep_is_of_base_rates():
    """BYOL's evaluation code scales a base rate by batch / 256; its sweep is {0.005, 0.01, 0.02, 0.05, 0.1}."""
    for fraction, base in ((0.01, 0.05), (0.1, 0.02), (1.0, 0.02)):
        recipe = solve(ROOT / "recipes/ssl/byol.yaml", fraction=fraction).recipe
        assert recipe.optimizer.lr == pytest.approx(base * recipe.batch_size / 256)


def test_simclrs_tensorflow_files_are_known_by_their_index(shared, tmp_path):
    source = shared / "checkpoints/simclrv2_tf1_sk1"
    (tmp_path / "model.ckpt-1.index").write_bytes((source / "model.ckpt-1.index").read_bytes())
    for init in (tmp_path, tmp_path / "model.ckpt-1", tmp_path / "model.ckpt-1.index"):
        assert choose_recipe({"init": str(init)})[0].stem == "simclrv2-large"
    (tmp_path / "model.ckpt-1.index").write_bytes(b"not an index at all")
    assert choose_recipe({"init": str(tmp_path)})[0].stem == "finetune"


def test_imagenet_is_found_and_who_said_so_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("IMAGENET_DIR", str(tmp_path))
    found = resolve({"init": "simclrv2-sk1", "fraction": 0.01}, [])
    assert found.recipe.data == f"imagenet:{tmp_path}"
    assert found.said_by["data"] == "IMAGENET_DIR"
    assert found.recipe.epochs == 60
    assert found.sources["epochs"].startswith("SimCLR-v2 README")
    assert resolve({"recipe": "imagenet/scratch"}, []).recipe.data == f"imagenet:{tmp_path}"
    monkeypatch.delenv("IMAGENET_DIR")
    (tmp_path / "data/imagenet").mkdir(parents=True)
    assert resolve({"init": "mocov2", "data": "imagenet"}, []).recipe.data == "imagenet:data/imagenet"


def cells(name):
    """Block, row, column and recipe of every cell of a table."""
    table = yaml.safe_load((ROOT / f"recipes/tables/{name}.yaml").read_text())
    for block in table["blocks"]:
        for column, here in block["columns"].items():
            for row, own in block["rows"].items():
                settings = table["settings"] | block.get("settings", {}) | here | own["settings"]
                path = find_recipe(settings.pop("recipe"))
                sets = [f"{key}={settings.pop(key)}" for key in list(settings) if "." in key]
                yield block, row, column, resolve_tree(FullRecipe, read_yaml(path), path, "test", settings, sets).recipe


@pytest.mark.parametrize(("name", "count"), [("ssl", 42), ("semi", 12), ("imagenet", 32)])
def test_every_cell_of_a_table_is_a_recipe(name, count):
    seen = set()
    for block, row, column, recipe in cells(name):
        assert recipe.fraction == float(column.removesuffix(" %")) / 100
        assert recipe.data == "imagenet"
        assert recipe.truth == "real"
        assert recipe.method == ("mile" if "mile" in row else "softmax" if name == "ssl" else recipe.method)
        if "paper" in block:
            assert block["paper"][row][column]["accuracy"] > 0
        seen.add(recipe)
    assert len(seen) == count, "two cells are the same run"


@pytest.mark.parametrize("name", ["ssl", "semi", "imagenet"])
def test_finding_5_every_row_of_mile_is_there_in_both_readings(name):
    found = {(block["name"], row): recipe for block, row, _, recipe in cells(name)}
    rows = [key for key in found if key[1].endswith("mile")]
    assert len(rows) == {"ssl": 3, "semi": 1, "imagenet": 2}[name]
    for block, row in rows:
        paper, published = found[block, row], found[block, f"{row}-published"]
        assert (paper.variant, paper.mile.imitate_from, paper.mile.rho) == ("paper", "student", 0.25)
        assert (published.variant, published.mile.imitate_from, published.mile.rho) == ("published", "teacher", 0.5)
        assert paper.model_copy(update={"variant": "published", "mile": published.mile}) == published


def test_finding_4_the_leaked_head_is_a_diagnostic_and_in_no_other_row():
    leaked = [(row, recipe) for _, row, _, recipe in cells("ssl") if recipe.keep_head is not None]
    assert len(leaked) == 6
    for row, recipe in leaked:
        assert row.endswith("+mile-leaked")
        assert (recipe.keep_head, recipe.head_from) == ("head_supervised", 0)
    page = (ROOT / "docs/recipes.md").read_text()
    assert page.index("classifier that has seen all labels") < page.index("## The rows"), "it is said first"


@pytest.mark.parametrize("name", ["ssl", "semi", "imagenet"])
def test_finding_8_a_ledger_says_which_rows_have_which_prediction_set(name):
    table = read_table(find_table(name))
    text = markdown(make_ledger(table, [], {}))
    for block, row, _, recipe in cells(name):
        rule = "argmax" if recipe.activation == "softmax" else "argmax_or_threshold"
        assert recipe.evaluate.prediction_set == rule, row
        if not block.get("hidden"):
            assert re.search(rf"^- F1 and label coverage of [^:]*\(`{rule}`\): .*\b{re.escape(row)}\b", text, re.M), row


def test_the_papers_numbers_are_the_papers(shared):
    paper = yaml.safe_load((shared / "paper/tables.yaml").read_text())
    found = {name: list(cells(name)) for name in ("ssl", "semi", "imagenet")}
    for block, row, column, recipe in (cell for each in found.values() for cell in each):
        if "paper" in block and recipe.variant == "published":  # both readings beside the same number
            assert block["paper"][row][column] == block["paper"][row.removesuffix("-published")][column]
    found = {name: [c for c in each if c[3].variant == "paper"] for name, each in found.items()}
    for name, source in (("ssl", paper["ssl"]), ("semi", paper["semi_supervised"])):
        rows = {(row, column): block["paper"] for block, row, column, _ in found[name] if "paper" in block}
        assert len(rows) == sum(len(source["fractions"]) for key in source if key != "fractions")
        for (row, column), numbers in rows.items():
            at = source["fractions"].index(float(column.removesuffix(" %")) / 100)
            wanted = source[row.replace("self-", "self_")]
            assert numbers[row][column] == {m: wanted[m][at] for m in ("accuracy", "real_f1") if m in wanted}
    for block, row, column, recipe in found["imagenet"]:
        wanted, at = paper["imagenet"][recipe.arch], paper["imagenet"]["fractions"].index(recipe.fraction)
        assert block["paper"][row][column] == {measure: wanted[measure][row][at] for measure in wanted}


@pytest.mark.parametrize(
    ("flags", "sets", "sentence"),
    [
        ({"flip": "maybe"}, [], "--flip maybe: must be true or false"),
        ({}, ["augment.jitter=0.4"], "--set augment.jitter 0.4: must be four numbers"),
        (
            {},
            ["augment.jitter=[0.4, 0.4, 0.4, 0.6]"],
            "--set augment.jitter 0.6: input should be less than or equal to",
        ),
        ({}, ["augment.policy=trivail"], "should be 'none', 'trivial' or 'rand'"),
        ({}, ["augment.magnitude=31"], "--set augment.magnitude 31"),
        ({"method": "role"}, ["augment.cutmix=1"], "augment.cutmix mixes images, and method role needs"),
        ({"method": "wan"}, ["label_smoothing=0.1"], "label_smoothing: method wan takes every target above 0"),
        ({"method": "large-loss"}, ["label_smoothing=0.1"], "label_smoothing: method large-loss"),
    ],
)
def test_wrong_augmentations_are_told(flags, sets, sentence):
    with pytest.raises(Problem, match=re.escape(sentence)):
        resolve({"data": "demo", **flags}, sets)


def test_a_flip_is_turned_off_by_a_flag_and_the_rest_is_off():
    default = resolve({"data": "folder:photos"}, []).recipe
    assert default.augment.flip
    assert not resolve({"data": "folder:photos", "flip": "false"}, []).recipe.augment.flip
    off = {"jitter": (0, 0, 0, 0), "policy": "none", "erase": 0, "mixup": 0, "cutmix": 0}
    for path in RECIPES:
        recipe = solve(path).recipe
        assert recipe.augment.model_dump(include=set(off)) == off
        assert recipe.label_smoothing == 0


@pytest.mark.parametrize(
    ("labelled", "epochs"), [(1, 10), (199, 10), (500, 10), (1_000, 10), (4_000, 5), (6_250, 4), (100_000, 3)]
)
def test_a_photo_run_is_10_epochs_of_a_thousand_images_and_3_of_many(labelled, epochs):
    """`epochs: auto` of recipes/finetune.yaml, the length of every run on photos; 100 or 300 steps at least."""
    recipe = resolve({"data": "folder:photos", "init": "simclr-demo"}, []).recipe
    assert recipe.epochs == "auto"
    plan = make_plan(recipe, {"labelled": labelled, "all": labelled, "unlabelled": 0})
    assert plan.total_steps == max(round(labelled * epochs / recipe.batch_size), 100 if labelled < 200 else 300)
