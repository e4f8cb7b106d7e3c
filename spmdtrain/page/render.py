"""Rendering of a page as one HTML file without network requests."""

import base64
import functools
import hashlib
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

from spmdtrain.errors import foreign
from spmdtrain.optional import import_extra
from spmdtrain.page.blocks import Page
from spmdtrain.page.charts import ChartBlock

_LONGEST_TEXT = 4000


def render_page(page: Page, *, follow: str | None = None) -> str:
    """Returns a page as HTML. All text of the page is escaped.

    Args:
      follow: The version of the page, if a server offers newer ones; see `local_server`.

    Raises:
      UserError: If a library of the extra `report` is not installed.
    """
    content = page_content(page)
    charts = any(content["charts"])
    scripts = [_script_safe(_vega())] if charts else []
    scripts.append(_script_safe(_asset("page.js")))
    connect = "'none'" if follow is None else "'self'"
    hashes = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; "
        f"img-src data:; connect-src {connect}; base-uri 'none'; form-action 'none'"
    )
    html: str = (
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            policy=policy,
            style=_asset("page.css"),
            scripts=scripts,
            main=content["main"],
            data=_json_in_script({"charts": content["charts"], "version": follow}),
        )
    )
    return html


def page_content(page: Page) -> dict[str, Any]:
    """Returns the parts of a followed page that change.

    They are a JSON object: `title`, the HTML of the `main` element, and `charts` by their ids.
    """
    sections = [section for section in page.sections if section.blocks]
    charts: dict[str, Mapping[str, Any]] = {}
    ids: dict[int, str] = {}
    for section in sections:
        for block in section.blocks:
            if isinstance(block, ChartBlock):
                # The same chart keeps its id while others appear, so that it is not drawn again.
                label = hashlib.sha256(f"{section.title}\0{block.title}".encode()).hexdigest()[:10]
                name = f"chart-{label}"
                while name in charts:
                    name += "-"
                ids[id(block)] = name
                charts[name] = {"spec": block.spec, "data": block.data, "hover": block.hover}
    template = _environment().get_template("main.html")
    main = template.render(
        page=page, sections=sections, chart_ids=lambda block: ids[id(block)], anchor=_anchor
    )
    return {"title": foreign(page.title, 200), "main": main, "charts": charts}


def _anchor(title: str) -> str:
    return re.sub("[^a-z0-9]+", "-", title.lower()).strip("-") or "section"


@functools.cache
def _environment() -> Any:
    jinja2 = import_extra("jinja2", "report", "HTML pages")
    return jinja2.Environment(
        loader=jinja2.FunctionLoader(_asset),
        autoescape=True,
        finalize=_one_line,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _one_line(value: Any) -> Any:
    """Returns a text without control characters, any other argument of the template as it is."""
    return foreign(value, _LONGEST_TEXT) if type(value) is str else value


@functools.cache
def _asset(name: str) -> str:
    return resources.files("spmdtrain.page").joinpath("assets", name).read_text("utf-8")


@functools.cache
def _vega() -> str:
    """Returns the libraries Vega, Vega-Lite and Vega-Embed as one script."""
    bundle: str = import_extra("vl_convert", "report", "charts").javascript_bundle()
    return bundle


def _script_safe(code: str) -> str:
    """Returns JavaScript that may stand in a script element; only string literals in it change."""
    return re.sub("<(?=/script|!--)", r"\\x3c", code, flags=re.IGNORECASE)


def _json_in_script(content: Any) -> str:
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return re.sub("[<>&]", lambda match: f"\\u{ord(match[0]):04x}", text)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
