"""A real browser for tests of pages: headless Chromium, without network, through selenium."""

import json
import shutil
import time

import pytest

FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND",
)  # fmt: skip
PATIENCE = 60  # seconds
HEIGHTS = {390: 844}  # of a window of this width; else 900
VIEWS = ((1280, False), (1280, True), (390, True), (390, False))  # width, dark
MARKUP = "<img src=x onerror=hacked=1>"  # of a class, and of a file
MOST = 400_000  # bytes of a page beside its photos
FAINT = """
const rgb = (text) => { const n = text.match(/[\\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
const light = (c) => {
  const [r, g, b] = c.map((v) => (v / 255 <= .04045 ? v / 3294.6 : ((v / 255 + .055) / 1.055) ** 2.4));
  return .2126 * r + .7152 * g + .0722 * b; };
const behind = (e) => { if (!e) return [255, 255, 255];
  const [r, g, b, a] = rgb(getComputedStyle(e).backgroundColor), under = a < 1 ? behind(e.parentElement) : [0, 0, 0];
  return [r, g, b].map((v, i) => a * v + (1 - a) * under[i]); };
return [...document.querySelectorAll("body *")].filter((e) => {
  const text = [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  if (!e.checkVisibility() || e.disabled || !text) return false;
  const [a, b] = [light(rgb(getComputedStyle(e).color).slice(0, 3)), light(behind(e))].sort((x, y) => y - x);
  return (a + .05) / (b + .05) < 4.5;
}).map((e) => e.tagName + " " + e.className + ": " + e.textContent.trim().slice(0, 40));
"""  # elements whose text has less contrast than WCAG AA asks for


class Browser:
    """Chromium, and what it said about the pages that it has opened."""

    def __init__(self, folder):
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.downloads = folder / "downloads"
        self.downloads.mkdir()
        behaviour = {"behavior": "allow", "downloadPath": str(self.downloads)}
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", behaviour)
        self._errors, self._requests = [], []

    def open(self, path, *, width=1280, dark=False):
        """Open a file as file://; what was said before is forgotten. A width of 390 is a phone's."""
        size = {"width": width, "height": HEIGHTS.get(width, 900), "deviceScaleFactor": 1, "mobile": width < 600}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.listen()
        self._errors, self._requests = [], []
        self.driver.get(path.resolve().as_uri())
        return self.driver

    def listen(self):
        """Take what the browser has logged since the last call."""
        self._errors += [line["message"] for line in self.driver.get_log("browser") if line["level"] == "SEVERE"]
        for line in self.driver.get_log("performance"):
            event = json.loads(line["message"])["message"]
            if event["method"] == "Network.requestWillBeSent":
                self._requests.append(event["params"]["request"]["url"])

    @property
    def errors(self):
        """Messages of the console that are errors, exceptions of scripts and missing files included."""
        self.listen()
        return self._errors

    @property
    def outside(self):
        """Requests that are for no file: there should be none. `chrome:` are the browser's own, of its first tab."""
        self.listen()
        return [url for url in self._requests if not url.startswith(("file:", "data:", "blob:", "chrome:"))]

    def run(self, script, *values):
        """What a script returns; `values` are its `arguments`."""
        return self.driver.execute_script(script, *values)

    def find(self, selector):
        """All elements of a CSS selector."""
        return self.driver.find_elements("css selector", selector)

    def wait(self, wanted, what="the page"):
        """Wait until `wanted()` is true, and return it."""
        end = time.monotonic() + PATIENCE
        while not (found := wanted()):
            assert time.monotonic() < end, f"{what}: waited {PATIENCE} s in vain"
            time.sleep(0.05)
        return found

    def download(self, click):
        """The path of the file that `click()` makes the browser save."""
        before = set(self.downloads.iterdir())

        def arrived():
            return [path for path in set(self.downloads.iterdir()) - before if path.suffix != ".crdownload"]

        click()
        return self.wait(arrived, "the download")[0]

    def fits(self):
        """No part of the page is wider than the window."""
        return self.run("return document.documentElement.scrollWidth <= document.documentElement.clientWidth")

    def is_sound(self):
        """Nothing failed, nothing was asked for outside, and no name of a class or file ran as markup."""
        assert not self.errors, self._errors
        assert not self.outside, self._requests
        assert self.run("return window.hacked === undefined && !document.querySelector('img[src=x]')")

    def is_sound_everywhere(self, page):
        """The page is sound and fits on a screen and a phone, light and dark, and is small beside its photos."""
        papers = set()
        for width, dark in VIEWS:
            self.open(page, width=width, dark=dark)
            assert self.fits(), f"{page} at {width}"
            self.is_sound()
            faint = self.run(FAINT)
            assert not faint, f"{'dark' if dark else 'light'}: {faint}"
            papers.add((dark, self.run("return getComputedStyle(document.body).backgroundColor")))
        assert len({paper for _, paper in papers}) == len(papers) == 2, "a light and a dark one"
        html = self.run("return document.documentElement.outerHTML.replace(/data:image[^\"]*/g, '')")
        assert len(html.encode()) < MOST

    def shot(self, path):
        """A picture of what the window shows."""
        self.driver.save_screenshot(str(path))


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    """Headless Chromium with an empty profile, or a skip."""
    pytest.importorskip("selenium", reason="needs selenium: pip install -e '.[dev]'")
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        pytest.skip("needs Debian's chromium and chromium-driver (CONTRIBUTING.md)")
    one = Browser(tmp_path_factory.mktemp("browser"))
    yield one
    one.driver.quit()
