"""safetensors files, through the library: it checks the header and maps the tensors."""

from __future__ import annotations

from safetensors import SafetensorError, safe_open

from finetune_mile.checkpoints.readers.contents import Contents, Refused
from finetune_mile.checkpoints.readers.mapped import MappedFile


def read_safetensors(file: MappedFile) -> Contents:
    """Every tensor of the file, by name, and the file's own notes."""
    try:
        with safe_open(file.path, framework="pt", device="cpu") as opened:
            tree = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            metadata = dict(opened.metadata() or {})
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise Refused(f"is a damaged safetensors file, fetch it again ({error})") from error
    return Contents(container="safetensors", tree=tree, metadata=metadata)
