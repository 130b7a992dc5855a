"""The child process: reads the pickles of the file that is its standard input, and sends what they hold.

    python -I -S -c "... sending.main()" CONTAINER START COUNT

It imports neither torch nor numpy, opens nothing, and limits its own memory and time first. To its standard output go
a `Header` and the tree, as pickles of the classes in `unpickling.py`; a file is refused by one sentence on its
standard error and the exit code `REFUSED`. Where Python has no `resource` (Windows), the parent's clock is the limit.
"""

import contextlib
import io
import os
import pickle
from typing import Any, BinaryIO, NamedTuple, NoReturn

from finetune_mile.checkpoints.readers import Refused, require
from finetune_mile.checkpoints.readers.unpickling import Unpickler

REFUSED = 3
_ROOM, _TIMES = 256 * 2**20, 8  # bytes of memory, and on top so many times the size of the pickle
_SECONDS, _PER_SECOND = 4, 16 * 2**20  # of the processor, and one more for so many bytes


class Header(NamedTuple):
    """What the parent needs before the tensors: names of stubs, {key: (dtype, count)} of storages, where data begin."""

    stubs: list[str]
    storages: dict[str, tuple[str | None, int]]
    end: int


def main(container: str, start: str, count: str) -> NoReturn:
    try:
        _limit(int(count))
        with os.fdopen(0, "rb") as file, os.fdopen(1, "wb") as out:
            file.seek(int(start))
            header, tree = _read_legacy(file) if container == "torch-legacy" else _read(file, int(count))
            pickler = pickle.Pickler(out, 5)
            pickler.dump(tuple(header))
            pickler.dump(tree)
    except Refused as why:
        _refuse(str(why))
    except MemoryError:
        _refuse("needs far more memory than its size explains; save its state_dict alone and use that")
    except RecursionError:
        _refuse("is refused: its containers are nested without end")
    except Exception as error:
        _refuse(f"is damaged: its pickle is not valid ({type(error).__name__}); fetch it again")
    os._exit(0)


def _refuse(why: str) -> NoReturn:
    os.write(2, why.encode("utf-8", "replace"))
    os._exit(REFUSED)


def _limit(count: int) -> None:
    """Memory and processor time, and no written file. A system that does not know a limit does without it."""
    with contextlib.suppress(ImportError):
        import resource

        seconds = _SECONDS + count // _PER_SECOND
        limits = {"RLIMIT_AS": _ROOM + _TIMES * count, "RLIMIT_CPU": seconds, "RLIMIT_FSIZE": 0, "RLIMIT_CORE": 0}
        for name, most in limits.items():
            kind = getattr(resource, name)
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            with contextlib.suppress(ValueError, OSError):  # macOS refuses RLIMIT_AS
                resource.setrlimit(kind, (most, hard))


def _read(file: BinaryIO, count: int) -> tuple[Header, Any]:
    unpickler = Unpickler(io.BytesIO(file.read(count)))
    return _header([unpickler], unpickler.load(), 0)


def _read_legacy(file: BinaryIO) -> tuple[Header, Any]:
    """torch.save before 1.6: magic number, version, system, object, keys, then raw storages."""
    unpicklers = [Unpickler(file) for _ in range(5)]
    _, version, system, tree, keys = [unpickler.load() for unpickler in unpicklers]
    require(
        version == 1001 and isinstance(system, dict) and system.get("little_endian"),
        "is a torch file of an unknown version, or from a big-endian machine",
    )
    storages = unpicklers[3].storages
    require(
        isinstance(keys, list) and sorted(map(str, keys)) == sorted(storages),
        "is damaged: it lists other storages than its tensors use",
    )
    unpicklers[3].storages = {str(key): storages[str(key)] for key in keys}  # in the order of the file
    return _header(unpicklers, tree, file.tell())


def _header(unpicklers: list[Unpickler], tree: Any, end: int) -> tuple[Header, Any]:
    stubs = sorted({name for unpickler in unpicklers for name in unpickler.stubs})
    storages = {key: (one.dtype, one.count) for unpickler in unpicklers for key, one in unpickler.storages.items()}
    return Header(stubs, storages, end), tree
