"""A table of demo runs of a second each, for the tests of tables."""

import copy

import yaml

TINY = {
    "title": "A tiny table",
    "about": "Demo runs.",
    "runs": "runs/tiny",
    "settings": {
        "data": "demo:200", "init": "none", "arch": "resnet-demo", "steps": 6, "batch_size": 8, "size": 16,
        "evaluate": {"images": 20, "labels": False}, "mile.warmup": 0, "k_t": 2, "k_s": 1,
    },
    "seeds": [0],
    "blocks": [
        {
            "name": "fine-tuning",
            "columns": {"10 %": {"fraction": 0.1}, "100 %": {"fraction": 1.0}},
            "rows": {
                "sigmoid": {
                    "settings": {
                        "method": "sigmoid", "optimizer.name": "relative", "optimizer.lr": "auto",
                        "optimizer.nesterov": False, "optimizer.head_lr": None,
                    },
                    "only": ["10 %"],
                    "note": "one long interaction",
                },
                "student": {
                    "needs": {"teacher": "sigmoid"},
                    "settings": {"method": "distill", "teacher": "{teacher}"},
                    "only": ["10 %"],
                },
                "broken": {"settings": {"method": "mile", "lr": 1e30}, "only": ["100 %"]},
                "after": {
                    "needs": {"teacher": "broken"},
                    "settings": {"method": "distill", "teacher": "{teacher}"},
                    "only": ["100 %"],
                },
            },
            "measures": {"top-1": "accuracy", "F1": "f1@0.25"},
            "paper": {"sigmoid": {"10 %": {"top-1": 50.0}}, "after": {"100 %": {"top-1": 60.0}}},
            "differences": [["student", "sigmoid"]],
            "bars": [
                {"rows": ["student", "sigmoid"], "column": "10 %", "measure": "top-1", "at_least": -100},
                {"row": "sigmoid", "column": "10 %", "measure": "F1", "between": [101, 102]},
                {"row": "after", "column": "100 %", "measure": "F1", "at_least": 1},
            ],
            "constants": {"trivial F1": "trivial_f1"},
        }
    ],
    "quick": {"blocks": {"fine-tuning": {"columns": ["10 %"], "rows": ["student"]}}},
}  # fmt: skip


def write_tiny(folder, change=None, name="tiny"):
    """The description as a file; `change` is called with a copy of it first."""
    tree = copy.deepcopy(TINY)
    if change is not None:
        change(tree)
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree, sort_keys=False))
    return path
