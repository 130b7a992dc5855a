"""One file over https, through connections that break off. `download.py` imports it to fetch a file."""

from __future__ import annotations

import http.client
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Any

from finetune_mile.core.download import CHUNK, PAGE, RemoteFile, WrongBytes, is_https

_TRIES = 2  # in a row without a single new byte, for each mirror
_PAUSE = 0.5  # seconds before the next try, doubled each time
_TIMEOUT = 30.0
_NETWORK = (urllib.error.URLError, http.client.HTTPException, OSError)


class _OnlyHttps(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if not is_https(newurl):
            raise urllib.error.URLError(f"redirected to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def transfer(url: str, part: Path, remote: RemoteFile) -> None:
    """Bring `part` to its full length, from where an earlier attempt ended. Raises OSError and WrongBytes."""
    failures = 0
    while failures <= _TRIES:
        before = part.stat().st_size if part.exists() else 0
        try:
            if _connect(url, part, remote):
                return
        except urllib.error.HTTPError as error:
            if error.code != 416 or not before:
                raise
            part.unlink()  # longer than what the server has: start anew
        except _NETWORK as error:
            offline = isinstance(getattr(error, "reason", None), socket.gaierror) and not before
            if (failures == _TRIES or offline) and not isinstance(error, OSError):
                raise OSError(str(error)) from error
            if failures == _TRIES or offline:
                raise
        failures = 0 if part.exists() and part.stat().st_size > before else failures + 1
        time.sleep(_PAUSE * 2**failures)
    raise urllib.error.URLError("the connection breaks off again and again")


def _connect(url: str, part: Path, remote: RemoteFile) -> bool:
    """One connection; True when the file is complete."""
    from finetune_mile.core.console import progress

    start = part.stat().st_size if part.exists() else 0
    tag = part.with_name(f"{part.name}.tag")
    request = urllib.request.Request(url, headers={"User-Agent": "finetune_mile", "Accept-Encoding": "identity"})
    if start:
        request.add_header("Range", f"bytes={start}-")
        if tag.exists():
            request.add_header("If-Range", tag.read_text(encoding="ascii"))
    with urllib.request.build_opener(_OnlyHttps).open(request, timeout=_TIMEOUT) as answer:
        if str(answer.headers.get("Content-Type", "")).lower().startswith(("text/html", "application/xhtml")):
            raise WrongBytes(PAGE)
        partial = answer.status == 206 and str(answer.headers.get("Content-Range", "")).startswith(f"bytes {start}-")
        start = start if partial else 0
        length = answer.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        if remote.bytes is not None and total is not None and total != remote.bytes:
            raise WrongBytes(f"the server has {total} bytes, expected {remote.bytes}")
        etag = answer.headers.get("ETag") or ""
        tag.unlink(missing_ok=True)
        if etag.isascii() and etag and not etag.startswith("W/"):  # the next attempt asks whether the file is the same
            tag.write_text(etag, encoding="ascii")
        with (
            part.open("ab" if partial else "wb") as file,
            progress(remote.name, total, start=start, in_bytes=True) as advance,
        ):
            while block := answer.read(CHUNK):
                file.write(block)
                advance(len(block))
                if remote.bytes is not None and file.tell() > remote.bytes:
                    raise WrongBytes(f"more than the expected {remote.bytes} bytes came")
    done = total is None or part.stat().st_size == total
    if done:
        tag.unlink(missing_ok=True)
    return done
