"""Hooks of MkDocs: pages from outside docs/, the API reference, links to files of the repository.

The pages of docs/ and the README are written for GitHub: their links are relative paths of files in
the repository. Here, a link to a file that is a page of the site becomes a link to that page, and
any other one a link to the file in the repository. A link to a file that does not exist stays as it
is, and the strict build reports it.
"""

import importlib
import json
import posixpath
import re
import runpy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

import spmdtrain

REPOSITORY = Path(__file__).parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
URL = PROJECT["urls"]["Repository"]

# Files of the repository that become pages, by the path of the page below docs/.
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security-policy.md": "SECURITY.md",
    "notebooks/local.md": "docs/notebooks/local.ipynb",
    "notebooks/tpu_vm.md": "docs/notebooks/tpu_vm.ipynb",
}

# The pages of the reference: title, and the folders of the package whose exported names they show.
# A folder that exports a name and is missing here is an error of the build; a page without names is
# left out.
REFERENCE = {
    "training": ("Training", ["train"]),
    "models": ("Models and objectives", ["adapters", "keras", "models", "kernels"]),
    "data": ("Data", ["data"]),
    "sharding": ("Strategies and sharding", ["sharding"]),
    "step": ("The train step", ["step"]),
    "configuration": ("Configuration", ["config"]),
    "checkpoints": ("Checkpoints", ["checkpoints", "record"]),
    "logs": ("Trackers, pages and sweeps", ["trackers", "document", "report", "plan", "sweep"]),
    "distributed": ("Several processes", ["distributed", "parameter_server"]),
    "errors": ("Errors", ["errors"]),
    "testing": ("Tests of your own code", ["testing"]),
}
ALL_OPTIONS = (
    "The fields of `RunConfig`: keywords of `Trainer` and, unless its step decides them, of "
    "`Loop`; on a command line `--keep-latest 3` or `--mesh.fsdp 8`. Limits, what a resume does "
    "with another value, and options that exclude each other are in "
    "[running.md](../running.md#all-options)."
)
# Folders whose own names are public: they are imported as spmdtrain.testing.NAME.
PACKAGES = ("models", "testing")

# What a browser would load from elsewhere when it shows a page.
EXTERNAL = re.compile(
    r"<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
)

LINK = re.compile(r"(!?\[[^\]\n]*\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def names_of(folders: list[str]) -> list[str]:
    """Returns the names that the package exports from folders, in full."""
    names = []
    for folder in folders:
        if folder in PACKAGES:
            module = importlib.import_module(f"spmdtrain.{folder}")
            names += [f"{module.__name__}.{name}" for name in module.__all__]
        else:
            homes = spmdtrain._HOMES
            of_folder = [x for x in spmdtrain.__all__ if homes[x].split(".")[0] == folder]
            names += [f"spmdtrain.{name}" for name in of_folder]
    return names


def pages_of_reference() -> list[tuple[str, str, list[str]]]:
    """Returns name, title and public names of each page of the reference."""
    pages = [(page, title, names_of(folders)) for page, (title, folders) in REFERENCE.items()]
    return [(page, title, names) for page, title, names in pages if names]


def reference() -> dict[str, str]:
    """Returns the pages of the API reference, by path below docs/.

    Raises:
      ValueError: If the package exports names from a folder that no page shows.
    """
    shown = {folder for _, folders in REFERENCE.values() for folder in folders}
    homes = {home.split(".")[0] for home in spmdtrain._HOMES.values()}
    if missing := sorted(homes - shown):
        raise ValueError(f"no page of REFERENCE in .ci/site.py shows the folders {missing}")
    pages = {}
    for page, title, names in pages_of_reference():
        blocks = [f"# {title}", *(f"::: {name}" for name in names)]
        if page == "configuration":
            table = runpy.run_path(str(REPOSITORY / ".ci" / "options.py"))["reference"]()
            blocks[1:1] = ["## All options", ALL_OPTIONS, table]
        pages[f"reference/{page}.md"] = "\n\n".join(blocks) + "\n"
    rows = [
        f"| [{title}]({page}.md) | "
        + ", ".join(f"[`{x.rpartition('.')[2]}`]({page}.md#{x})" for x in names)
        + " |"
        for page, title, names in pages_of_reference()
    ]
    pages["reference/index.md"] = (
        "# Reference\n\nWhat `import spmdtrain` exports, and the packages `spmdtrain.models` and "
        "`spmdtrain.testing`.\n\n| | |\n|---|---|\n" + "\n".join(rows) + "\n"
    )
    return pages


def markdown_of(path: Path) -> str:
    """Returns a file as Markdown; of a notebook its text and code, without outputs."""
    if path.suffix != ".ipynb":
        return path.read_text()
    cells = json.loads(path.read_text())["cells"]
    texts = ("".join(cell["source"]) for cell in cells)
    blocks = [
        text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```"
        for cell, text in zip(cells, texts, strict=True)
    ]
    note = f"\nThis page is [a notebook]({URL}/blob/main/{path.relative_to(REPOSITORY)}).\n"
    return "\n\n".join([*blocks[:1], note, *blocks[1:]])


def links_of_site(text: str, source: str, page: str) -> str:
    """Returns a page's text with links for the site.

    Args:
      text: Markdown whose links are relative to `source`.
      source: The path of the file in the repository.
      page: The path of the page below docs/.
    """
    page_of = {file: name for name, file in PAGES.items()}

    def rewritten(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        file = REPOSITORY / target
        if (name := page_of.get(target)) is None and target.startswith("docs/") and file.is_file():
            name = target.removeprefix("docs/")
        if name is not None:
            return match[1] + posixpath.relpath(name, posixpath.dirname(page) or ".") + match[3]
        if not file.exists():
            return match[0]
        return f"{match[1]}{URL}/{'tree' if file.is_dir() else 'blob'}/main/{target}{match[3]}"

    code = False
    lines = []
    for line in text.split("\n"):
        code ^= line.lstrip().startswith("```")
        lines.append(line if code else LINK.sub(rewritten, line))
    return "\n".join(lines)


def nav_of_reference() -> Iterator[dict[str, str]]:
    """Yields the entries of the reference for the navigation."""
    yield {"Overview": "reference/index.md"}
    for page, title, _ in pages_of_reference():
        yield {title: f"reference/{page}.md"}


# -- called by MkDocs ------------------------------------------------------------------------------


def on_config(config: Any) -> None:
    """Puts the pages of the reference into the navigation."""
    for entry in config.nav:
        if entry.get("Reference"):
            entry["Reference"] = [*nav_of_reference()]


def on_files(files: Files, config: Any) -> Files:
    """Adds the generated pages; the files of notebooks themselves are not part of the site."""
    for file in [file for file in files if file.src_uri.endswith(".ipynb")]:
        files.remove(file)
    pages = {name: markdown_of(REPOSITORY / source) for name, source in PAGES.items()}
    for name, text in (pages | reference()).items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrites the links of a page."""
    name = page.file.src_uri
    if name.startswith("reference/"):
        return markdown
    return links_of_site(markdown, PAGES.get(name, f"docs/{name}"), name)


def on_post_page(output: str, page: Any, config: Any) -> None:
    """Checks that a page loads nothing from other hosts.

    Raises:
      PluginError: If it does.
    """
    if found := EXTERNAL.search(output):
        raise PluginError(f"{page.file.src_uri} would load from another host: {found[0]}")
