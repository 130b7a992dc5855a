"""The browser of the other tests sees what it should: else a page with errors would pass."""

PAGE = """<!doctype html><meta name="viewport" content="width=device-width"><title>page</title>
<p id="wide" style="width: WIDEpx">text</p><a id="save" download="a.csv">save</a><script>SCRIPT</script>"""


def write(folder, script="", wide=100):
    path = folder / "a page.html"
    path.write_text(PAGE.replace("SCRIPT", script).replace("WIDE", str(wide)))
    return path


def test_a_good_page_has_no_errors_and_no_requests(browser, tmp_path):
    browser.open(write(tmp_path), width=390)
    assert (browser.errors, browser.outside, browser.fits()) == ([], [], True)
    assert browser.driver.title == "page"


def test_what_is_wrong_with_a_page_is_seen(browser, tmp_path):
    browser.open(write(tmp_path, "new Image().src = 'http://example.org/a.png'; throw Error('oh')", 700), width=390)
    browser.wait(lambda: browser.outside)
    assert browser.outside == ["http://example.org/a.png"]
    assert any("oh" in message for message in browser.errors)
    assert not browser.fits()
    browser.open(write(tmp_path))
    assert browser.errors == [], "what an earlier page said is forgotten"


def test_dark_and_downloads(browser, tmp_path):
    dark = "return matchMedia('(prefers-color-scheme: dark)').matches"
    browser.open(write(tmp_path), dark=True)
    assert browser.run(dark)
    browser.open(write(tmp_path, "save.href = URL.createObjectURL(new Blob(['a,b']))"))
    assert not browser.run(dark)
    assert browser.download(browser.find("#save")[0].click).read_text() == "a,b"
