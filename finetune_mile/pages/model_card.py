"""The README.md of an export: a model card that the hub understands."""

from __future__ import annotations

from typing import Any

import yaml

from finetune_mile.config.schema import Recipe

SHOWN = ("accuracy", "real_acc", "f1@0.25", "f1@0.5", "trivial_f1", "lrap", "coverage@0.25")


def model_card(recipe: Recipe, config: dict[str, Any], results: dict[str, float], warning: str | None) -> str:
    """Front matter with results, the warning if there is one, how the weights were made and how to load them."""
    metrics = [{"type": key, "value": round(results[key], 2)} for key in SHOWN if key in results]
    front = {
        "library_name": "finetune_mile",
        "tags": ["image-classification", recipe.method],
        "model-index": [
            {
                "name": f"{config['arch']}-{recipe.method}",
                "results": [
                    {
                        "task": {"type": "image-classification"},
                        "dataset": {"name": recipe.data, "type": recipe.data},
                        "metrics": metrics,
                    }
                ],
            }
        ],
    }
    rows = "\n".join(f"| {m['type']} | {m['value']} |" for m in metrics)
    first = "" if warning is None else f"> **Warning:** {warning}\n\n"
    return f"""---
{yaml.safe_dump(front, sort_keys=False)}---
{first}# {config["arch"]}, {recipe.method} on {recipe.data}

Trained by finetune_mile from `{recipe.init}` on {recipe.fraction:.0%} of the labels, {recipe.steps} steps, seed
{recipe.seed}. Outputs are {config["activation"]} logits over {config["num_classes"]} classes.

| measure | value |
|---|---|
{rows}

```python
import finetune_mile

model = finetune_mile.load_classifier("export")  # the folder of this file
print(model.predict("photo.jpg")[:3])  # (class, probability), the most likely class first
```
"""
