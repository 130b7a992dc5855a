"""The site of this folder: `python -m sphinx -W --keep-going docs site`. Its menu is the list of pages in index.md."""

import re
from pathlib import Path

DOCS = Path(__file__).parent

project = html_title = "finetune_mile"
extensions = ["myst_parser"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = html_show_sphinx = html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}
nitpicky = True
myst_heading_anchors = 4  # with the names that GitHub gives: a link to a heading works on both
exclude_patterns = ["examples"]


def menu(text):
    """The sections of index.md, and the pages that each has in its list."""
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        yield title.strip(), re.findall(r"^- \[[^]]+\]\(([\w/.-]+)\.md\)", body, re.M)


def for_the_site(app, name, source):
    """A page of the repository as the site has it: no file outside of docs/, no drawing that needs the network."""
    text = source[0].replace("```mermaid", "```text")

    def link(found):
        target = (app.env.doc2path(name).parent / found[2]).resolve()
        if target.is_relative_to(DOCS) or not target.exists():  # what does not exist is a warning
            return found[0]
        return f"`{target.relative_to(DOCS.parent).as_posix()}` in the repository"

    text = re.sub(r"\[([^]]+)\]\((\.\./[^)#]+)(#[^)]*)?\)", link, text)
    if name == "index":
        for title, pages in menu(text):
            text += "\n".join(("", "```{toctree}", ":hidden:", f":caption: {title}", "", *pages, "```", ""))
    source[0] = text


def setup(app):
    app.connect("source-read", for_the_site)
