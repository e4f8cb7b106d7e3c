"""The folder of an exported model: its files, and a model card that says what it is."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from etils import epath

from spmdtrain.checkpoints.run_identity import Identity
from spmdtrain.errors import StorageError, UserError, foreign, is_text, version_of
from spmdtrain.record import no_follow
from spmdtrain.record.storage import failures, folder_of, in_short, is_url, storage_reason

Save = Callable[[IO[bytes]], Any]
"""Writes the content of a file."""

CARD = "README.md"
_VERSIONS = ("spmdtrain", "jax", "jaxlib", "flax", "numpy")


@dataclass(frozen=True)
class CardFacts:
    """The facts of a model card.

    Attributes:
      step: Number of updates of the exported values.
      parameters: Number of elements of all parameters.
      identity: The run that trained them; None if it is not known.
      metrics: Metrics of an evaluation of these values.
      saved_at: When the checkpoint was saved, ISO 8601; "" without one.
      license: The name of the license under which the model may be used.
    """

    step: int
    parameters: int
    identity: Identity | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    saved_at: str = ""
    license: str | None = None

    def __post_init__(self) -> None:
        name = self.license
        if name is not None and (not name.strip() or not is_text(name) or len(name.split()) > 1):
            raise UserError(
                f"license is {name!r}: it must be one word, such as apache-2.0, mit or other"
            )


def model_card(facts: CardFacts, *, library: str, use: str) -> str:
    """Returns the Markdown text of a model card, with the header that Hugging Face reads.

    Args:
      facts: The facts about the model.
      library: The library that loads the model.
      use: Markdown text that says how to use the files beside it.
    """
    config = facts.identity.config if facts.identity else {}
    trained: dict[str, Any] = {"steps": facts.step, "parameters": f"{facts.parameters:,}"}
    if facts.saved_at:
        trained["saved"] = facts.saved_at
    if facts.identity:
        names = ("global_batch_size", "learning_rate", "compute_dtype", "seed", "init_from")
        trained |= {name: config[name] for name in names if config.get(name) is not None}
        trained["optimizer"] = facts.identity.update.name or facts.identity.optimizer
    versions = facts.identity.versions if facts.identity else {}
    versions = versions or {name: version_of(name) for name in _VERSIONS}
    lines = [
        "---",
        f"license: {json.dumps(facts.license or 'unknown')}",
        f"library_name: {library}",
        "tags: [spmdtrain, jax]",
        "---",
        "",
        "# Model card",
        "",
        f"License: {facts.license or 'not stated'}",
        "",
        "## Use",
        "",
        use,
        "",
    ]
    sections = {
        "Training": trained,
        "Data": facts.identity.dataset if facts.identity else {},
        "Metrics": facts.metrics,
        "Versions": versions,
    }
    for title, values in sections.items():
        lines += [f"## {title}", "", *_table(values), ""]
    return "\n".join(lines)


def _table(values: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a Markdown table of names and values."""
    if not values:
        return ["None recorded."]

    def cell(value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        return foreign(text, 300).replace("|", "\\|")

    rows = (f"| {cell(str(name))} | {cell(value)} |" for name, value in values.items())
    return ["| | |", "|---|---|", *rows]


def check_new_folder(to: str) -> epath.Path:
    """Returns the folder of an export, which must not exist, or must be empty.

    Raises:
      UserError: If it has content, is a file, or its URL is not supported.
      StorageError: If it cannot be read.
    """
    target = folder_of(to)
    try:
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UserError(f"{to} exists and is not an empty folder: give another one")
    except failures(target) as error:
        if isinstance(error, UserError):
            raise
        raise _unwritable(to, error, "read") from error
    return target


def write_folder(to: str, files: Mapping[str, bytes | Save]) -> None:
    """Writes the files of an export, in their order, to a new folder or URL.

    Raises:
      UserError: If the folder has content.
      StorageError: If a file cannot be written.
    """
    target = check_new_folder(to)
    try:
        if not is_url(target):
            target.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            *folders, _ = name.split("/")
            if folders and not is_url(target):
                for depth in range(len(folders)):
                    no_follow.make_subfolder(target, "/".join(folders[: depth + 1]))
            no_follow.write(target, name, _saver(content))
    except failures(target) as error:
        if isinstance(error, UserError):
            raise
        raise _unwritable(to, error, "written") from error


def _saver(content: bytes | Save) -> Save:
    return (lambda file: file.write(content)) if isinstance(content, bytes) else content


def _unwritable(to: str, error: Exception, done: str) -> StorageError:
    return StorageError(f"{to} cannot be {done}: {storage_reason(error) or in_short(error)}")
