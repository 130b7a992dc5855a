"""What a reader hands over: plain tensors, inert stubs, the reason where it refuses."""

from dataclasses import dataclass, field
from typing import Any, Literal

Container = Literal["torch-zip", "torch-legacy", "safetensors", "tf-checkpoint", "tf-savedmodel", "pickle"]

_LARGEST_SIDE = 2**40


class Refused(Exception):
    """Why a file is not read; `read` puts the file's name to it and raises a Problem."""


def require(holds: object, why: str) -> None:
    """Refuse the file unless a condition holds."""
    if not holds:
        raise Refused(why)


def check_shape(shape: Any) -> tuple[int, ...]:
    """The sides of a tensor, or its strides: not negative, and none that no machine could hold."""
    require(
        isinstance(shape, tuple | list) and len(shape) <= 32, "is damaged: the shape of a tensor in it is not valid"
    )
    require(
        all(type(side) is int and 0 <= side <= _LARGEST_SIDE for side in shape),
        "is damaged: a tensor in it has a negative or impossibly large side",
    )
    return tuple(shape)


@dataclass(slots=True, eq=False)
class Stub:
    """A foreign object as inert data: its class was neither imported nor called.

    `args` is what the constructor would have been given, `state` what would have been restored;
    `elements` and `entries` are the contents of a list-like and of a dict-like class.
    """

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    elements: list[Any] = field(default_factory=list)
    entries: dict[Any, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"<{self.name}, inert>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A checkpoint file as plain data.

    Attributes:
        container: What the file is, by its first and last bytes.
        tree: Nested dicts, lists, tuples, scalars and strings; the leaves that matter are CPU
            tensors, most of them mapped from the file (private: writing does not reach the disk).
        stubs: Sorted qualified names of the foreign classes that were met and not called.
        metadata: A safetensors file's own notes.
        full_names: Checkpoint key to the variable's full name, for TF2 files with an object graph.
    """

    container: Container
    tree: dict[str, Any]
    stubs: tuple[str, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    full_names: dict[str, str] = field(default_factory=dict)
