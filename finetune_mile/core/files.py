"""Files: what ships with the install, safe reading of files and YAML from people, atomic writing, locks. No torch here.

YAML is bounded in size, depth and aliases before it becomes values, because a few aliases can stand for gigabytes.
`1:30` and `010` are text here; YAML 1.1 would make them 90 and 8.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import yaml

from finetune_mile.core.problems import Problem

# Bytes of one image file. The largest image that is decoded (pipeline.MOST_PIXELS) takes as much without compression.
LARGEST_IMAGE = 2**29
LOCK_SECONDS = 10.0  # loader processes outlive a kill by some seconds
_PACKAGE = Path(__file__).resolve().parent.parent


def shipped(name: str) -> Path:
    """The folder `weights` or `recipes`: inside an installed wheel, or at the repository's root.

    Beside an installed package lies site-packages, where other packages put folders of these names.
    """
    inside = _PACKAGE / "_shipped" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def cache() -> Path:
    """The folder for downloads: FINETUNE_MILE_CACHE, else XDG_CACHE_HOME, else ~/.cache."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("FINETUNE_MILE_CACHE") or caches / "finetune_mile").expanduser()


def config() -> Path:
    """The folder for what a user adds: FINETUNE_MILE_CONFIG, else XDG_CONFIG_HOME, else ~/.config."""
    configs = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(os.environ.get("FINETUNE_MILE_CONFIG") or configs / "finetune_mile").expanduser()


# -------------------------------------------------------------------------------- reading and writing


def open_regular(path: str | Path) -> int:
    """Open a regular file for reading and return its descriptor.

    Opening a pipe can block for ever, and reading a device may never end. The file is opened without blocking and
    checked afterwards, so that it cannot be replaced in between.

    Raises:
        OSError: the file cannot be opened, or it is a pipe, a device, a socket or a folder.
    """
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file (a pipe, a device or a socket)", str(path))


def read_regular(path: str | Path, most: int) -> bytes:
    """Read a regular file of at most `most` bytes.

    Raises:
        OSError: as `open_regular`, or the file is larger.
    """
    with os.fdopen(open_regular(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most:
            raise OSError(errno.EFBIG, f"larger than {size_in_words(most)}", str(path))
        return stream.read(size)


def open_text(path: str | Path, encoding: str = "utf-8") -> TextIO:
    """Open a regular text file; line ends are left alone."""
    return os.fdopen(open_regular(path), encoding=encoding, newline="")


def size_in_words(size: int) -> str:
    """A size limit for messages, such as 512 MB."""
    return f"{size // 2**20} MB" if size >= 2**20 else f"{size:,} bytes"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path`, flushed to disk, if the block ends well."""
    part = path.with_name(f".{path.name}.part")
    yield part
    with part.open("rb") as stream:
        os.fsync(stream.fileno())
    part.replace(path)


def write_json(path: Path, value: object) -> None:
    with whole_file(path) as part:
        part.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


@contextlib.contextmanager
def locked(path: Path, sentence: str, seconds: float | None = None) -> Iterator[None]:
    """Hold a lock file while the block runs. A process that died holds nothing.

    Args:
        path: the lock file; it stays.
        sentence: of the `Problem` if another process holds it.
        seconds: to wait for it; None: LOCK_SECONDS.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        with contextlib.suppress(NotImplementedError):  # a file system without locks
            lock.acquire(timeout=LOCK_SECONDS if seconds is None else seconds)
    except Timeout as error:
        raise Problem(sentence) from error
    try:
        yield
    finally:
        lock.release()


def check_empty(folder: Path, flag: str) -> None:
    """Refuse a folder that has content, or that cannot be made."""
    try:
        if os.path.lexists(folder) and (not folder.is_dir() or any(folder.iterdir())):
            raise Problem(f"{flag} {folder}: it already exists; give a folder that is new or empty")
        above = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise Problem(f"{flag} {folder}: {above} is not a folder that can be written; choose another")
    except OSError as error:
        raise Problem(f"{flag} {folder}: {error.strerror}; choose another folder") from error


# -------------------------------------------------------------------------------------------- YAML

MOST_YAML_BYTES = 2**20
DEEPEST = 50  # values inside each other
MOST_VALUES = 100_000  # with aliases expanded
TOO_DEEP = f"it is nested more than {DEEPEST} levels deep"


class RefusedYaml(yaml.MarkedYAMLError):
    """YAML that is larger, deeper or more repetitive than any file of ours, or sets a key twice."""


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, AttributeError) as error:  # such as !!int x, or the date 2024-13-01
            raise yaml.MarkedYAMLError(
                problem=f"a value cannot be read: {error}", problem_mark=node.start_mark
            ) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> Any:
        """Refuse a key that is set twice: YAML itself silently takes the last one."""
        seen = set()
        pairs = node.value if isinstance(node, yaml.MappingNode) else ()  # `!!map [a]` is refused below
        for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise RefusedYaml(problem=f"{key.value} is set twice", problem_mark=key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag not in (_INT, _FLOAT)]
    for first, resolvers in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _INT, re.compile(r"^[-+]?(?:0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^(?:[-+]?(?:[0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)(?:[eE][-+][0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def load_yaml_file(path: Path) -> Any:
    """The one value of a YAML file; None where there is none.

    Raises:
        OSError: the file cannot be read, is not a regular file, or is larger than 1 MB.
        UnicodeDecodeError: the file is not UTF-8.
        yaml.YAMLError: the text is not YAML, or is `RefusedYaml`.
    """
    return load_yaml(read_regular(path, MOST_YAML_BYTES).decode("utf-8"))


def load_yaml(text: str) -> Any:
    """The one value of a YAML text; None where the text holds nothing but comments. Raises yaml.YAMLError."""
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):  # libyaml crashes on deep values when it makes nodes of them
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > DEEPEST:
                raise RefusedYaml(problem=TOO_DEEP, problem_mark=event.start_mark)  # type: ignore[arg-type]
        loader = _Loader(text)
        node: yaml.Node | None = loader.get_single_node()
        if node is None:
            return None
        _count_values(node)
        return loader.construct_document(node)
    except UnicodeError as error:
        raise yaml.YAMLError("it holds characters that are not Unicode") from error


def _count_values(node: yaml.Node, depth: int = 0, before: int = 0) -> int:
    """How many values there are with those `before`, aliases expanded; too many are refused, and too deep ones."""
    if depth > DEEPEST:
        raise RefusedYaml(problem=f"{TOO_DEEP} by its aliases, or in a circle", problem_mark=node.start_mark)
    if before == MOST_VALUES:
        raise RefusedYaml(problem=f"it holds more than {MOST_VALUES:,} values, aliases expanded")
    values = before + 1
    if isinstance(node, yaml.CollectionNode):
        for entry in node.value:
            for inner in entry if isinstance(entry, tuple) else (entry,):  # a mapping has pairs of key and value
                values = _count_values(inner, depth + 1, values)
    return values
