"""The site of the documentation: pages and links that its build adds. `make docs` builds it."""

import re
import runpy

import pytest
from helpers import REPOSITORY

import spmdtrain
import spmdtrain.models
import spmdtrain.testing

SITE = runpy.run_path(str(REPOSITORY / ".ci" / "site.py"))


def test_the_reference_shows_every_public_name_once() -> None:
    shown = re.findall(r"^::: (\S+)$", "\n".join(SITE["reference"]().values()), re.M)
    public = [f"spmdtrain.{name}" for name in spmdtrain.__all__]
    for package in (spmdtrain.models, spmdtrain.testing):
        public += [f"{package.__name__}.{name}" for name in package.__all__]
    assert sorted(shown) == sorted(public)


def test_a_name_from_a_folder_without_a_page_stops_the_build(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(SITE["REFERENCE"], "errors")
    with pytest.raises(ValueError, match=r"REFERENCE .* \['errors'\]"):
        SITE["reference"]()


@pytest.mark.parametrize(
    ("source", "page", "link", "expected"),
    [
        ("README.md", "index.md", "docs/data.md#mixtures", "data.md#mixtures"),
        ("README.md", "index.md", "docs/images/terminal.svg", "images/terminal.svg"),
        ("README.md", "index.md", "CHANGELOG.md", "changelog.md"),
        ("README.md", "index.md", "launch", "URL/tree/main/launch"),
        ("docs/data.md", "data.md", "python.md#models", "python.md#models"),
        ("docs/data.md", "data.md", "../launch/tfjob.yaml", "URL/blob/main/launch/tfjob.yaml"),
        ("docs/data.md", "data.md", "../README.md", "index.md"),
        ("docs/data.md", "data.md", "notebooks/local.ipynb", "notebooks/local.md"),
        ("docs/data.md", "data.md", "#own", "#own"),
        ("docs/data.md", "data.md", "https://example.com/a.md", "https://example.com/a.md"),
        ("docs/data.md", "data.md", "nowhere.md", "nowhere.md"),  # for the build to report
        ("docs/notebooks/local.ipynb", "notebooks/local.md", "../data.md", "../data.md"),
    ],
)
def test_a_link_leads_to_a_page_or_to_the_repository(
    source: str, page: str, link: str, expected: str
) -> None:
    text = f"See [this]({link}).\n```text\n[this](data.md)\n```\n"
    url = SITE["PROJECT"]["urls"]["Repository"]
    wanted = text.replace(f"]({link}).", f"]({expected.replace('URL', url)}).")
    assert SITE["links_of_site"](text, source, page) == wanted


@pytest.mark.parametrize(
    ("tag", "is_external"),
    [
        ('<script src="https://cdn.example.com/a.js"></script>', True),
        ('<link rel="stylesheet" href="//fonts.example.com/a.css">', True),
        ('<img alt="" src="http://example.com/badge.svg">', True),
        ('<script src="assets/a.js"></script><a href="https://example.com">x</a>', False),
    ],
)
def test_a_page_may_link_to_other_hosts_but_load_nothing_from_them(
    tag: str, is_external: bool
) -> None:
    assert bool(SITE["EXTERNAL"].search(tag)) == is_external
