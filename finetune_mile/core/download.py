"""Downloads: resumed after a broken connection, checked against published sizes and hashes. No torch here.

The network's modules are imported when a file is fetched: they would slow down every --help.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from finetune_mile.core.files import MOST_RUN_BYTES, read_regular, write_json, writing
from finetune_mile.core.problems import Problem
from finetune_mile.core.types import Section

if TYPE_CHECKING:
    from urllib.request import OpenerDirector

CHUNK = 1 << 20
MOST_BYTES = 2**37  # of a file whose size is not published
_TRIES = 2  # in a row without a single new byte, for each mirror; and how often it starts anew
_PAUSE = 0.5  # seconds before the next try, doubled each time
_TIMEOUT = 30.0
PAGE = "a web page, not a file; the address may need a login"


class WrongBytes(Exception):
    """The file is not the one that was published."""


class RemoteFile(Section):
    """One file to fetch: the same bytes at each of `urls`."""

    name: str = Field(pattern=r"^[\w][\w.+=-]*$", description="file name in the cache; no folders")
    urls: tuple[str, ...] = Field(min_length=1, description="mirrors, tried in this order")
    bytes: int | None = Field(default=None, gt=0)
    sha256: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    md5: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{6,32}$", description="a published md5, or its published first digits"
    )

    @field_validator("urls")
    @classmethod
    def _only_https(cls, urls: tuple[str, ...]) -> tuple[str, ...]:
        for url in urls:
            if not is_https(url):
                raise ValueError(f"{url}: only https is fetched")
        return urls


def is_https(url: str) -> bool:
    """Whether a file may be fetched from there; plain http on this very machine is for tests."""
    try:
        parts = urlsplit(url)
    except ValueError:  # such as http://[::1
        return False
    return parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1"))


def fetch(files: Sequence[RemoteFile], folder: Path, *, file: str | None = None, unpack: str | None = None) -> Path:
    """Download the files that are not in a folder yet, and check all of them. Safe in several processes.

    Args:
        files: at least one.
        folder: is created. A file that was put there by hand is used.
        file: the one that the caller opens; None: the first.
        unpack: the first file is a zip: take out the members whose name begins so.

    Returns:
        The path of `file`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / (file or files[0].name)
    from filelock import FileLock

    with FileLock(folder / ".lock"):  # the processes of one run ask at once; one of them fetches
        for remote in files:
            _fetch_file(remote, folder, [other for other in files if not (folder / other.name).is_file()])
        if unpack and not target.is_file():
            _unpack(folder / files[0].name, unpack, folder)
    if not target.is_file():
        raise Problem(f"{target.name} is not among the files fetched into {folder}")
    return target


def _fetch_file(remote: RemoteFile, folder: Path, missing: list[RemoteFile]) -> None:
    target = folder / remote.name
    if target.is_file():
        seen, stat = _recorded(target), target.stat()
        # By size and time: hashing 4 GB at each start is slow.
        if not _is_page(target) and (seen.get("bytes"), seen.get("mtime_ns")) == (stat.st_size, stat.st_mtime_ns):
            return
        try:
            return _accept(target, remote, target)
        except WrongBytes as error:
            raise Problem(f"{target} is damaged or another file ({error}); delete it, it is fetched again") from error
    part = folder / f"{remote.name}.part"
    reasons = []
    for url in remote.urls:
        try:
            transfer(url, part, remote)
            return _accept(part, remote, target)
        except WrongBytes as error:
            part.unlink(missing_ok=True)
            part.with_name(f"{part.name}.tag").unlink(missing_ok=True)
            reasons.append(f"{url}: {error}")
        except (OSError, ValueError) as error:  # ValueError: an address or a note that cannot be read
            where = f"{url}: " if len(remote.urls) > 1 else ""
            reasons.append(f"{where}{getattr(error, 'reason', None) or error}")
    urls = " and ".join(other.urls[0] for other in missing)
    there = f"put it at {target}" if len(missing) == 1 else f"put both into {folder}"
    raise Problem(f"{remote.name} could not be fetched ({'; '.join(reasons)}); fetch {urls} elsewhere and {there}")


# ------------------------------------------------------------------------------------ the connection


def transfer(url: str, part: Path, remote: RemoteFile) -> None:
    """Bring `part` to its full length, from where an earlier attempt ended. Raises OSError and WrongBytes."""
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError

    failures = anew = 0
    while failures <= _TRIES:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _connect(url, part, remote):
                return
        except HTTPError as error:
            if error.code != 416 or not before:
                raise
            if anew == _TRIES:
                raise WrongBytes("the server has fewer bytes than it says") from error
            part.unlink()  # longer than what the server has: start anew
            anew += 1
        except (OSError, HTTPException) as error:
            offline = isinstance(getattr(error, "reason", None), socket.gaierror) and not before
            if (failures == _TRIES or offline) and not isinstance(error, OSError):
                raise OSError(str(error)) from error
            if failures == _TRIES or offline:
                raise
        failures = 0 if part.exists() and part.stat().st_size > before else failures + 1
        time.sleep(_PAUSE * 2**failures)
    raise URLError("the connection breaks off again and again")


def _connect(url: str, part: Path, remote: RemoteFile) -> bool:
    """One connection; True when the file is complete."""
    from urllib.request import Request

    from finetune_mile.core.console import progress

    start = part.stat().st_size if part.exists() else 0
    tag = part.with_name(f"{part.name}.tag")
    request = Request(url, headers={"User-Agent": "finetune_mile", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
        if tag.exists():
            request.add_header(
                "If-Range", tag.read_text(encoding="ascii", errors="replace").strip().replace("\ufffd", "?")
            )
    with _opener().open(request, timeout=_TIMEOUT) as answer:
        if str(answer.headers.get("Content-Type", "")).lower().startswith(("text/html", "application/xhtml")):
            raise WrongBytes(PAGE)
        partial = answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(f"bytes {start}-")
        start = start if partial else 0
        length, most = answer.headers.get("Content-Length"), remote.bytes or MOST_BYTES
        if length is not None and not (length.isascii() and length.isdigit() and len(length) < 20):
            raise WrongBytes("the server gives no number as Content-Length")
        total = start + int(length) if length is not None else None
        if total is not None and (total > most or total != (remote.bytes or total)):
            raise WrongBytes(f"the server has {total} bytes, expected {remote.bytes or f'at most {most}'}")
        etag = answer.headers.get("ETag") or ""
        tag.unlink(missing_ok=True)
        if etag.isascii() and etag and not etag.startswith("W/"):  # the next attempt asks whether the file is the same
            with writing(part):
                tag.write_text(etag, encoding="ascii")
        with writing(part):
            file = part.open("ab" if partial else "wb")
        with file, progress(remote.name, total, start=start, in_bytes=True) as advance:
            while block := answer.read(CHUNK):
                with writing(part, remote.bytes):
                    file.write(block)
                    file.flush()
                advance(len(block))
                if file.tell() > most:
                    raise WrongBytes(f"more than {'the expected ' if remote.bytes else ''}{most} bytes came")
    done = total is None or part.stat().st_size == total
    if done:
        tag.unlink(missing_ok=True)
    return done


def _opener() -> OpenerDirector:
    """Follows redirects, to https only."""
    from urllib.error import URLError
    from urllib.request import HTTPRedirectHandler, Request, build_opener

    class OnlyHttps(HTTPRedirectHandler):
        def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
            if not is_https(newurl):
                raise URLError(f"redirected to {newurl}, which is not https")
            return super().redirect_request(req, fp, code, msg, headers, newurl)

    return build_opener(OnlyHttps)


# --------------------------------------------------------------------------------------- the check


def digest(path: Path, kind: str) -> str:
    """The hash of a file in hexadecimal; `kind` is sha256 or md5."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, kind).hexdigest()


def _is_page(path: Path) -> bool:
    """Whether a file begins as a web page does; servers do not always label theirs."""
    with path.open("rb") as file:
        start = file.read(256)
    return start.removeprefix(b"\xef\xbb\xbf").lstrip().lower().startswith((b"<!doctype html", b"<html"))


def _record_of(target: Path) -> Path:
    return target.with_name(target.name + ".seen.json")


def _recorded(target: Path) -> dict[str, Any]:
    """Hash, size and time of a file when it was accepted; empty where it never was."""
    try:
        seen = json.loads(read_regular(_record_of(target), MOST_RUN_BYTES))
    except (OSError, ValueError, RecursionError):  # none, or damaged: the file is checked again
        return {}
    return seen if isinstance(seen, dict) and isinstance(seen.get("sha256"), str) else {}


def _accept(path: Path, remote: RemoteFile, target: Path) -> None:
    """Check `path` against what is published, or its first use; then it becomes `target`."""
    if _is_page(path):
        raise WrongBytes(PAGE)
    size = path.stat().st_size
    if remote.bytes is not None and size != remote.bytes:
        raise WrongBytes(f"{size} bytes, expected {remote.bytes}")
    sha256 = digest(path, "sha256")
    if remote.sha256 and sha256 != remote.sha256:
        raise WrongBytes(f"sha256 {sha256[:12]}..., expected {remote.sha256[:12]}...")
    if remote.md5 and not digest(path, "md5").startswith(remote.md5):
        raise WrongBytes(f"md5 does not begin with {remote.md5}, as published")
    first = _recorded(target).get("sha256", sha256)
    if not remote.sha256 and not remote.md5 and sha256 != first:
        raise WrongBytes(f"sha256 {sha256[:12]}..., at its first use it was {first[:12]}...")
    path.replace(target)
    facts = {"sha256": sha256, "bytes": size, "mtime_ns": target.stat().st_mtime_ns, "urls": list(remote.urls)}
    write_json(_record_of(target), facts)


def _unpack(archive: Path, start: str, folder: Path) -> None:
    """Take members whose name begins with `start` out of a zip, flat: no folder is used."""
    try:
        with zipfile.ZipFile(archive) as source:
            members = [member for member in source.infolist() if Path(member.filename).name.startswith(start)]
            if sum(member.file_size for member in members) > 10 * archive.stat().st_size + CHUNK:
                raise Problem(f"{archive} would unpack to far more than weights can be compressed; it is not unpacked")
            for member in members:
                part = folder / f"{Path(member.filename).name}.part"
                with source.open(member) as packed, part.open("wb") as file:
                    shutil.copyfileobj(packed, file)
                part.replace(part.with_suffix(""))
    except zipfile.BadZipFile as error:
        _record_of(archive).unlink(missing_ok=True)
        raise Problem(f"{archive} is not a zip file; delete it, it is fetched again") from error
