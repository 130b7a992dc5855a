"""The JSON schema of a recipe file, for editors: recipes/schema.json, which `python tests/test_house.py` writes."""

from finetune_mile.config.schema import FullRecipe


def file_schema():
    """JSON schema of a recipe file: `Recipe`, where any value may come from another layer, and the three keys."""
    schema = _nothing_required(FullRecipe.model_json_schema())
    settings = dict(schema["properties"])
    words = {"type": "object", "additionalProperties": {"type": "string"}}
    sources = words | {"description": "setting or block (optimizer.lr): where its value is from"}
    entry = {"type": "object", "properties": settings | {"sources": sources}, "additionalProperties": False}
    schema["properties"] = settings | {
        "base": {"type": "string", "description": "a recipe that this one lies on: a file beside it, or its name"},
        "fractions": {
            "type": "object",
            "additionalProperties": entry,
            "description": "settings on top for a share of the labels; the nearest one counts",
        },
        "sources": sources,
    }
    return schema


def _nothing_required(node):
    if isinstance(node, dict):
        return {key: _nothing_required(value) for key, value in node.items() if key != "required"}
    return [_nothing_required(value) for value in node] if isinstance(node, list) else node
