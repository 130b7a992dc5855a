"""Downloads from a server on this machine that stutters, lies and breaks off."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
import yaml
from shortcuts import refused
from torch import nn
from torch.nn import functional

import finetune_mile
from finetune_mile.checkpoints.cards import Card, find_card, folder_of, is_cached
from finetune_mile.checkpoints.cards import fetch_card as fetch
from finetune_mile.core import download
from finetune_mile.core.download import RemoteFile
from finetune_mile.core.problems import Problem, tell

DATA = bytes(range(256)) * 2000  # half a megabyte
SHA256 = hashlib.sha256(DATA).hexdigest()


@dataclass
class Site:
    """What the server has, and what it was asked for."""

    url: str
    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: int | None = None  # bytes per connection
    ranges: bool = True
    etag: str | None = '"one"'
    content_type: str = "application/octet-stream"
    redirect: str | None = None
    length: str | None = None  # instead of the true Content-Length
    unending: bool = False  # it does not say how long the file is
    missing: str | None = None  # what the server says of a file that it has not
    asked: list[str | None] = field(default_factory=list)  # the Range header of each request


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("FINETUNE_MILE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(download, "_PAUSE", 0.001)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            here.asked.append(self.headers.get("Range"))
            if here.redirect:
                self.send_response(302)
                self.send_header("Location", here.redirect)
                self.end_headers()
                return
            data = here.files.get(self.path)
            if data is None:
                self.send_response(404, here.missing)
                self.end_headers()
                return
            start = 0
            asked, held = self.headers.get("Range"), self.headers.get("If-Range")
            if asked and here.ranges and held in (None, here.etag):
                start = int(asked.removeprefix("bytes=").removesuffix("-"))
                if start >= len(data):
                    self.send_error(416)
                    return
            self.send_response(206 if start else 200)
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
            if here.etag:
                self.send_header("ETag", here.etag)
            self.send_header("Content-Type", here.content_type)
            if not here.unending:
                self.send_header("Content-Length", here.length or str(len(data) - start))
            self.end_headers()
            end = len(data) if here.cut_after is None else start + here.cut_after
            self.wfile.write(data[start:end])

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here = Site(url=f"http://127.0.0.1:{server.server_port}", files={"/a.pth": DATA})
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield here
    server.shutdown()
    server.server_close()
    thread.join()


def card(site: Site, **facts: object) -> Card:
    given = {"urls": (f"{site.url}/a.pth",), "file": "a.pth"} | facts
    return Card.model_validate({"name": "test", "method": "m", "arch": "resnet50"} | given)


def test_fetched_once_and_checked(site: Site) -> None:
    subject = card(site, sha256=SHA256, bytes=len(DATA))
    assert not is_cached(subject)
    path = fetch(subject)
    assert path.read_bytes() == DATA
    assert path == folder_of(subject) / "a.pth"
    assert is_cached(subject)
    fetch(subject)
    assert site.asked == [None]
    assert not list(path.parent.glob("*.part*"))


def test_goes_on_where_it_broke_off(site: Site) -> None:
    site.cut_after = 200_000
    assert fetch(card(site, sha256=SHA256)).read_bytes() == DATA
    assert site.asked == [None, "bytes=200000-", "bytes=400000-"]


def test_goes_on_with_what_an_earlier_process_left(site: Site) -> None:
    folder = folder_of(card(site))
    folder.mkdir(parents=True)
    (folder / "a.pth.part").write_bytes(DATA[:1000])
    assert fetch(card(site, sha256=SHA256)).read_bytes() == DATA
    assert site.asked == ["bytes=1000-"]


def test_starts_anew_where_the_server_cannot_resume(site: Site) -> None:
    site.ranges = False
    folder = folder_of(card(site))
    folder.mkdir(parents=True)
    (folder / "a.pth.part").write_bytes(b"old" * 1000)
    assert fetch(card(site, sha256=SHA256)).read_bytes() == DATA


def test_starts_anew_where_the_file_has_changed(site: Site) -> None:
    folder = folder_of(card(site))
    folder.mkdir(parents=True)
    (folder / "a.pth.part").write_bytes(b"old" * 1000)
    (folder / "a.pth.part.tag").write_text('"zero"')
    assert fetch(card(site, sha256=SHA256)).read_bytes() == DATA


def test_starts_anew_where_too_much_was_there(site: Site) -> None:
    folder = folder_of(card(site))
    folder.mkdir(parents=True)
    (folder / "a.pth.part").write_bytes(DATA + b"x")
    assert fetch(card(site, sha256=SHA256)).read_bytes() == DATA


@pytest.mark.parametrize("facts", [{"sha256": "0" * 64}, {"md5": "00000000"}, {"bytes": 5}])
def test_wrong_bytes_are_not_used(site: Site, facts: dict[str, object]) -> None:
    with pytest.raises(Problem, match=r"a\.pth could not be fetched .*(sha256|md5|bytes)"):
        fetch(card(site, **facts))
    assert not is_cached(card(site))
    assert not (folder_of(card(site)) / "a.pth.part").exists()


def test_published_first_digits_of_an_md5(site: Site) -> None:
    digits = hashlib.md5(DATA, usedforsecurity=False).hexdigest()[:8]
    with pytest.raises(Problem, match="md5"):
        fetch(card(site, md5=digits[::-1]))
    assert fetch(card(site, md5=digits)).read_bytes() == DATA


def test_the_next_mirror_is_tried(site: Site) -> None:
    site.files["/bad.pth"] = b"something else"
    mirrors = (f"{site.url}/none.pth", f"{site.url}/bad.pth", f"{site.url}/a.pth")
    assert fetch(card(site, urls=mirrors, sha256=SHA256)).read_bytes() == DATA


def test_first_use_is_remembered_where_no_hash_is_published(site: Site) -> None:
    path = fetch(card(site))
    assert json.loads(path.with_name("a.pth.seen.json").read_text())["sha256"] == SHA256
    path.unlink()
    site.files["/a.pth"] = DATA[::-1]
    with pytest.raises(Problem, match="at its first use it was"):
        fetch(card(site))


def test_a_damaged_file_in_the_cache_is_found(site: Site) -> None:
    path = fetch(card(site, sha256=SHA256))
    path.write_bytes(DATA[:-1] + b"!")
    with pytest.raises(Problem, match="damaged or another file"):
        fetch(card(site, sha256=SHA256))


def test_a_file_put_there_by_hand_is_used(site: Site) -> None:
    folder = folder_of(card(site))
    folder.mkdir(parents=True)
    (folder / "a.pth").write_bytes(DATA)
    assert fetch(card(site, sha256=SHA256)) == folder / "a.pth"
    assert site.asked == []


def test_offline_is_one_sentence_with_the_way_out(site: Site) -> None:
    url = "http://127.0.0.1:9/a.pth"
    with pytest.raises(Problem) as caught:
        fetch(card(site, urls=(url,)))
    (sentence,) = caught.value.sentences
    assert f"; fetch {url} elsewhere and put it at {folder_of(card(site)) / 'a.pth'}" in sentence


@pytest.mark.parametrize(
    ("content_type", "data"),
    [
        ("text/html; charset=utf-8", DATA),
        ("Text/HTML", DATA),
        ("application/octet-stream", b"<!DOCTYPE html><html><title>Sign in</title></html>"),
        ("application/octet-stream", b"\xef\xbb\xbf\n  <HTML lang=en>" + DATA),
    ],
)
def test_a_login_page_is_never_stored_as_weights(site: Site, content_type: str, data: bytes) -> None:
    site.content_type, site.files["/a.pth"] = content_type, data
    with refused("a.pth", "web page", "login") as caught:
        fetch(card(site))
    assert len(caught.value.sentences) == 1
    assert [path.name for path in folder_of(card(site)).iterdir() if path.name != ".lock"] == []


def test_a_login_page_saved_by_hand_or_by_an_older_version_is_refused(site: Site) -> None:
    path = fetch(card(site))
    page = b"<html>sign in</html>"
    path.write_bytes(page)
    stat = path.stat()
    record = path.with_name("a.pth.seen.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"bytes": len(page), "mtime_ns": stat.st_mtime_ns}))
    with refused("a.pth", "web page", "delete it"):
        fetch(card(site))


@pytest.mark.parametrize("where", ["http://example.com/a.pth", "ftp://example.com/a.pth", "file:///etc/passwd"])
def test_a_redirect_does_not_leave_https(site: Site, where: str) -> None:
    site.redirect = where
    with pytest.raises(Problem, match=r"could not be fetched"):
        fetch(card(site))
    assert len(site.asked) <= 6


@pytest.mark.parametrize(
    "lie",
    [
        {"length": "abc"},
        {"length": "9" * 5000}, {"length": "-5"}, {"length": str(len(DATA) + 1000)},
        {"redirect": "http://[::1"}, {"redirect": "//[x"},
        {"files": {}, "missing": "gone \x1b[31m away"},
    ],
    ids=str,
)  # fmt: skip
def test_f15_a_server_that_lies_is_one_sentence(
    site: Site, lie: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in lie.items():
        setattr(site, name, value)
    with refused("a.pth could not be fetched", "put it at") as caught:
        fetch(card(site))
    tell(caught.value)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.isprintable()
    assert len(line) <= 500


@pytest.mark.parametrize("record", [b"", b"[5]", b"5", b"\xff", b"[" * 100_000, b'{"sha256": 5}'])
def test_f15_a_damaged_note_of_a_download_is_made_again(site: Site, record: bytes) -> None:
    path = fetch(card(site))
    note = path.with_name("a.pth.seen.json")
    good = note.read_bytes()
    note.write_bytes(record)
    assert fetch(card(site)) == path
    assert json.loads(note.read_bytes())["sha256"] == json.loads(good)["sha256"]


def test_f15_a_damaged_tag_of_a_part_starts_anew(site: Site) -> None:
    folder = folder_of(card(site))
    folder.mkdir(parents=True)
    (folder / "a.pth.part").write_bytes(DATA[:1000])
    (folder / "a.pth.part.tag").write_bytes(b"\xff\r\n")
    assert fetch(card(site)).read_bytes() == DATA


def test_f15_a_server_that_never_ends_is_stopped(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "MOST_BYTES", 10_000)
    with refused("at most 10000", "could not be fetched"):
        fetch(card(site))
    assert not list(folder_of(card(site)).glob("*.part"))
    site.length = None
    monkeypatch.setattr(site, "unending", True)
    with refused("more than 10000 bytes came"):
        fetch(card(site))


def test_n4_a_download_on_a_full_disk_is_one_sentence(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.open

    def open_or_fail(path: Path, *how: object, **more: object) -> object:
        if path.suffix == ".part":
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path, *how, **more)

    monkeypatch.setattr(Path, "open", open_or_fail)
    with refused("a.pth.part", "the disk is full", "make room"):
        fetch(card(site))
    assert len(site.asked) == 1, "not tried again"


def test_several_files(site: Site) -> None:
    site.files |= {"/m.index": b"i" * 10, "/m.data": b"d" * 20}
    files = tuple(RemoteFile(name=n, urls=(f"{site.url}/{n}",)) for n in ("m.index", "m.data"))
    subject = card(site, urls=(), files=files, file="m.index")
    assert fetch(subject).read_bytes() == b"i" * 10
    assert (folder_of(subject) / "m.data").read_bytes() == b"d" * 20
    assert is_cached(subject)


def zipped(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return out.getvalue()


def test_a_zip_is_unpacked_flat(site: Site, tmp_path: Path) -> None:
    members = {"../../model.ckpt-1.index": b"index", "deep/model.ckpt-1.data": b"data", "readme": b"no"}
    site.files["/w.zip"] = zipped(members)
    subject = card(site, urls=(f"{site.url}/w.zip",), unpack="model.ckpt-1", file="model.ckpt-1.index")
    assert fetch(subject).read_bytes() == b"index"
    names = {p.name for p in folder_of(subject).iterdir() if not p.name.startswith(".")}
    assert names == {"w.zip", "w.zip.seen.json", "model.ckpt-1.index", "model.ckpt-1.data"}
    assert not list(tmp_path.glob("model*"))


def test_a_zip_bomb_is_not_unpacked(site: Site) -> None:
    site.files["/w.zip"] = zipped({"model.ckpt-1.index": bytes(20_000_000)})
    subject = card(site, urls=(f"{site.url}/w.zip",), unpack="model.ckpt-1", file="model.ckpt-1.index")
    with pytest.raises(Problem, match="far more"):
        fetch(subject)


def test_what_is_no_zip_is_said(site: Site) -> None:
    subject = card(site, unpack="model.ckpt-1", file="model.ckpt-1.index")
    with pytest.raises(Problem, match="not a zip file"):
        fetch(subject)


def test_two_at_once_fetch_once(site: Site) -> None:
    subject = card(site, sha256=SHA256)
    threads = [threading.Thread(target=fetch, args=(subject,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert site.asked == [None]


def test_hub_ids_that_cannot_be_reached_are_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    from finetune_mile.checkpoints.init import locate, parse_init

    def refuse(*args: object, **options: object) -> str:
        raise OSError("no network\nand a long story")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with refused("hf:owner/name", "no network"):
        locate(parse_init("hf:owner/name"))


def test_hub_folders_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import huggingface_hub

    from finetune_mile.checkpoints.init import locate, parse_init

    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "config.json").write_text('{"architecture": "resnet50"}')
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: str(tmp_path))
    located = locate(parse_init("hf:owner/name"))
    assert located.path == tmp_path / "model.safetensors"
    assert located.config == {"architecture": "resnet50"}


# -------------------------------------------------------------------- from the address to the features


@pytest.fixture(scope="module")
def dinov2() -> tuple[nn.Module, bytes, bytes]:
    """timm's own ViT-S/14 of DINOv2 with random weights; its file, and one as the authors write it."""
    torch.manual_seed(0)
    network = timm.create_model("vit_small_patch14_dinov2", num_classes=0).eval()
    for name, parameter in network.named_parameters():
        nn.init.normal_(parameter, float(name.endswith(("norm1.weight", "norm2.weight", "gamma"))), 0.05)
    authors = io.BytesIO()
    torch.save({**network.state_dict(), "mask_token": torch.zeros(1, 384)}, authors)
    return network, safetensors.torch.save(network.state_dict()), authors.getvalue()


@pytest.mark.parametrize("place", ["authors", "timm"])
def test_from_an_address_to_features_in_one_word(
    place: str, dinov2: tuple[nn.Module, bytes, bytes], site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The card of DINOv2, fetched over a connection that breaks off; timm's copy where the authors' file is gone."""
    network, timms, authors = dinov2
    site.files = {"/model.safetensors": timms} | ({"/vits14.pth": authors} if place == "authors" else {})
    site.cut_after = 40_000_000
    published = find_card("dinov2-s")
    facts = published.model_dump(mode="json", exclude_defaults=True) | {"name": "here", "aliases": []}
    facts |= {"urls": [f"{site.url}/vits14.pth"], "sha256": None, "bytes": None}
    facts["instead"] = {"name": "model.safetensors", "urls": [f"{site.url}/model.safetensors"]}
    monkeypatch.setenv("FINETUNE_MILE_CONFIG", str(tmp_path / "config"))
    (tmp_path / "config" / "weights").mkdir(parents=True)
    (tmp_path / "config" / "weights" / "here.yaml").write_text(yaml.safe_dump(facts))
    found = finetune_mile.load("here")
    assert site.asked[-2:] == ["bytes=40000000-", "bytes=80000000-"]
    here = find_card("here")
    file = folder_of(here) / ("dinov2_vits14_pretrain.pth" if place == "authors" else "model.safetensors")
    kept = json.loads(file.with_name(f"{file.name}.seen.json").read_text())
    assert kept["sha256"] == hashlib.sha256(authors if place == "authors" else timms).hexdigest()
    assert is_cached(here)
    # features at 224: the positions of 37 x 37 resized as the authors do, in a network of timm's for 224 pixels
    grid = network.get_parameter("pos_embed")[:, 1:].unflatten(1, (37, 37)).permute(0, 3, 1, 2)
    grid = functional.interpolate(grid, scale_factor=(16.1 / 37, 16.1 / 37), mode="bicubic").flatten(2).mT
    small = timm.create_model("vit_small_patch14_dinov2", num_classes=0, img_size=224).eval()
    state = network.state_dict()
    small.load_state_dict(state | {"pos_embed": torch.cat([state["pos_embed"][:, :1], grid], dim=1)})
    size = found.card.preprocess.size
    assert size == 224
    images = torch.rand(1, 3, size, size)
    with torch.inference_mode():
        expected = small(images)
        assert float((found(images) - expected).abs().max() / expected.abs().max()) < 1e-4
        asked = len(site.asked)
        assert torch.equal(finetune_mile.load("here")(images), found(images))
    assert len(site.asked) == asked  # from the cache
    if place == "timm":  # gone as well: the way out is said in one sentence
        file.unlink()
        site.files = {}
        with refused("put it at", "model.safetensors"):
            finetune_mile.load("here")
