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
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator
from io import RawIOBase
from pathlib import Path
from typing import IO, Any, TextIO, cast

import yaml

from finetune_mile.core.problems import Failed, Problem, inert, tell

# Bytes of one image file. The largest image that is decoded (pipeline.MOST_PIXELS) takes as much without compression.
LARGEST_IMAGE = 2**29
MOST_RUN_BYTES = 2**26  # of a run.json
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


def is_finished(run: Path) -> bool:
    """Has the run of this folder done all its work? One answer for runs, seeds, tables, `predict`, `eval` and `export`.

    results.json and export/ come before the report: what was killed between them is not finished.
    """
    try:
        info = json.loads(read_regular(run / "run.json", MOST_RUN_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(info, dict) and info.get("status") == "finished" and (run / "results.json").is_file()


def size_in_words(size: int) -> str:
    """A size for messages, such as 512 MB."""
    return f"{size // 2**20} MB" if size >= 2**20 else f"{size:,} bytes"


def unwritable(path: Path | str, error: OSError, needed: int | None = None, done: str = "written") -> Failed:
    """The sentence for a file that cannot be written, with the fix; `needed` bytes, where that is known."""
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        cached = cache() in Path(path).parents
        other = "name another cache with FINETUNE_MILE_CACHE" if cached else "choose another folder"
        return Failed(f"{path}: cannot be {done} ({error.strerror}); mend that or {other}, then run the command again")
    room = "" if needed is None else f", {size_in_words(needed)} are needed"
    with contextlib.suppress(OSError, ValueError, StopIteration):
        above = next(folder for folder in Path(path).absolute().parents if folder.is_dir())
        room += f", {size_in_words(shutil.disk_usage(above).free)} are free"
    return Failed(f"{path}: the disk is full{room}; make room, then run the same command again")


def told(error: Problem | OSError) -> int:
    """At the entry of a command: print what ended it, without a traceback; returns the exit code."""
    if isinstance(error, Problem):
        return tell(error)
    if error.filename is not None:
        return tell(unwritable(error.filename, error, done="used"))  # who knows whether it was to be read
    broken = isinstance(error, BrokenPipeError)  # such as `| head`
    if error.errno is None and not broken:  # not of the system
        raise error
    with contextlib.suppress(OSError, ValueError):  # or Python complains of its output when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 128 + signal.SIGPIPE if broken else tell(unwritable("the output, or a file", error, done="used"))


@contextlib.contextmanager
def writing(path: Path, needed: int | None = None) -> Iterator[None]:
    """A system's error in the block becomes the `Problem` that `path` cannot be written; `needed` bytes."""
    try:
        yield
    except OSError as error:
        raise unwritable(path, error, needed) from error


@contextlib.contextmanager
def whole_file(path: Path, needed: int | None = None) -> Iterator[Path]:
    """A temporary path that becomes `path`, flushed to disk, if the block ends well; else nothing is left of it.

    A device or a pipe, such as /dev/null, is not replaced: it is written into.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        with tempfile.TemporaryDirectory() as place:
            yield (part := Path(place) / "part")
            path.write_bytes(part.read_bytes())
        return
    part = path.with_name(f".{path.name}.part")
    try:
        with writing(path, needed):
            yield part
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, complete or not at all; bytes of names that are not UTF-8 stay as they are."""
    content = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with whole_file(path, len(content)) as part:
        part.write_bytes(content)


def write_json(path: Path, value: object) -> None:
    write_whole(path, json_text(value))


class Patient:
    """A stream for writers in C++: torch's ends the process where a write fails. The error is kept for later.

    What comes after the error is only counted: then it is known how many bytes are needed.
    """

    def __init__(self, stream: RawIOBase) -> None:
        self._stream, self._pending, self.size = stream, bytearray(), 0
        self.error: OSError | None = None

    def write(self, content: bytes | memoryview) -> int:
        self.size += len(content)
        self._pending += content
        if len(self._pending) >= 2**20:
            self.drain()
        return len(content)

    def drain(self) -> None:
        left = memoryview(self._pending)
        try:
            while len(left) and self.error is None:
                left = left[self._stream.write(left) or 0 :]
        except OSError as error:
            self.error = error
        self._pending = bytearray()

    def flush(self) -> None:
        """Nothing: `drain` is called at the end."""


@contextlib.contextmanager
def whole_stream(path: Path) -> Iterator[IO[bytes]]:
    """`whole_file` for a writer that takes a stream."""
    with whole_file(path) as part:
        with part.open("wb", buffering=0) as raw:
            stream = Patient(raw)
            yield cast("IO[bytes]", stream)
            stream.drain()
        if stream.error is not None:
            raise unwritable(path, stream.error, stream.size) from stream.error


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
    except Timeout as error:  # which is an OSError, too
        raise Problem(sentence) from error
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()


PART, _BEGUN = ".part", ".begun"  # in an output until it is complete: a folder, and the names of what was begun


@contextlib.contextmanager
def begun(out: Path, *names: str) -> Iterator[Path]:
    """A folder inside of `out` whose content moves up when the block ends well.

    What a command that was killed has left there, and nothing else, is removed first.

    Args:
        out: passes `check_empty`.
        names: what the block writes into `out` itself; where the block fails it stays.
    """
    part, made = out / PART, not out.exists()
    with contextlib.ExitStack() as held:
        try:
            with writing(out):
                part.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(part / ".lock", f"{out}: another process is writing there; wait for it", 0))
        except Failed:
            for folder in (part, out) if made else (part,):
                with contextlib.suppress(OSError):
                    folder.rmdir()
            raise
        _remove([*(out / name for name in _left(out)), *_parts(part)])
        try:
            write_json(out / _BEGUN, names)
            yield part
            ready = sorted(_parts(part), key=lambda path: path.name == "README.md")
            write_json(out / _BEGUN, [*names, *(path.name for path in ready)])
            with writing(out):
                for path in ready:
                    path.rename(out / path.name)
                shutil.rmtree(part)
                (out / _BEGUN).unlink()  # the last step: without it the output is complete
        except BaseException:
            if not any((out / name).exists() for name in names):
                _remove([*(out / name for name in _left(out)), part, out / _BEGUN, *([out] if made else [])])
            raise


def leftovers(out: Path) -> set[str]:
    """Names in `out` that a killed command has left, and that `begun` removes."""
    return {PART, _BEGUN, f".{_BEGUN}.part", *_left(out)}


def _left(out: Path) -> set[str]:
    """Names in `out` that a killed command has made, or was about to make."""
    try:
        names = json.loads(read_regular(out / _BEGUN, MOST_RUN_BYTES))
    except (OSError, ValueError, RecursionError):
        return set()
    found = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    return {each for name in found if name == Path(name).name != ".." for each in (name, f".{name}.part")}


def _parts(part: Path) -> list[Path]:
    return [path for path in part.iterdir() if path.name != ".lock"]


def _remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)


def check_empty(folder: Path, flag: str) -> None:
    """Refuse a folder that has content, but for what a command has left that was killed; or that cannot be made."""
    try:
        left = leftovers(folder)
        if os.path.lexists(folder) and (not folder.is_dir() or any(e.name not in left for e in folder.iterdir())):
            raise Problem(f"{flag} {folder}: it already exists; give a folder that is new or empty")
        above = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
        if not above.is_dir() or not os.access(above, os.W_OK):
            raise Problem(f"{flag} {folder}: {above} is not a folder that can be written; choose another")
    except OSError as error:
        raise Problem(f"{flag} {folder}: {error.strerror}; choose another folder") from error


MOST_JSON = 2**28  # bytes of a JSON file of ours; the split of ImageNet takes 40 MB


def json_text(value: object) -> str:
    """JSON for people; where a name is not UTF-8, its bytes are escaped, and come back when it is read."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return (text if _is_utf8(text) else json.dumps(value, indent=1)) + "\n"


def read_json(path: Path, fix: str = "restore it from a copy, or begin a new run") -> dict[str, Any]:
    """The JSON object of a file of ours; a `Problem` that ends with `fix` where it is missing or damaged."""
    try:
        value = json.loads(read_regular(path, MOST_JSON))
    except OSError as error:
        raise Problem(f"{path} cannot be read ({error.strerror}); {fix}") from error
    except (ValueError, RecursionError) as error:
        raise Problem(f"{path} is damaged ({inert(str(error), 100)}); {fix}") from error
    if not isinstance(value, dict):
        raise Problem(f"{path} is damaged (it is not a JSON object); {fix}")
    return value


def read_scores(path: Path, *needed: str) -> dict[str, float]:
    """The numbers of a results.json, or of a file like it, as `read_json`; `needed` must be among them."""
    scores = read_json(path)
    odd = [key for key, value in scores.items() if isinstance(value, bool) or not isinstance(value, int | float | None)]
    if odd or not scores.keys() >= {*needed}:
        name = inert((odd or [key for key in needed if key not in scores])[0], 40)
        raise Problem(f"{path} is damaged ({name} is not a number); restore it from a copy, or begin a new run")
    return scores


def utf8_name(name: str) -> str:
    """A file's name for files that must be UTF-8: other bytes are shown as hexadecimal numbers."""
    return name if _is_utf8(name) else name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
