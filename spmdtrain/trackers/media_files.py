"""The files `media.jsonl` and `media/` of a workdir."""

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import Any

from etils import epath

from spmdtrain.record import no_follow
from spmdtrain.record.run_files import MEDIA_LINES
from spmdtrain.record.validation import LARGEST_LOG, Malformed, parse_object, read_bytes
from spmdtrain.trackers.base import RunInfo, Tracker
from spmdtrain.trackers.media import Figure, Histogram, Image, Table, Text
from spmdtrain.trackers.png import encode_png

_FOLDER = "media"
_FILE = re.compile(r"media/[A-Za-z0-9_-][A-Za-z0-9._-]*\.(png|svg)")


class MediaFiles(Tracker):
    """Writes a line of `media.jsonl` for each item, and a file for each image and figure."""

    name = "media"
    _folder: Path

    def start(self, run: RunInfo) -> None:
        """Removes the media of steps after the one from which the run resumes."""
        assert run.folder is not None
        self._folder = run.folder
        self.rewind(run.step)

    def rewind(self, step: int) -> None:
        """Removes the media of steps after `step`, and lines that are not valid."""
        try:
            content = read_bytes(epath.Path(self._folder / MEDIA_LINES), LARGEST_LOG)
        except FileNotFoundError:
            return
        kept: list[bytes] = []
        files: set[str] = set()
        stale: set[str] = set()
        for text in content.split(b"\n"):
            line = _parse(text)
            if line is None:
                continue
            file = line.get("file")
            of_line = {file} if isinstance(file, str) and _FILE.fullmatch(file) else set()
            if line["step"] <= step:
                kept.append(text + b"\n")
                files |= of_line
            else:
                stale |= of_line
        whole = b"".join(kept)
        if whole == content:
            return
        no_follow.write(self._folder, MEDIA_LINES, lambda file: file.write(whole))
        for name in sorted(stale - files):
            if (self._folder / name).is_file():
                no_follow.remove(self._folder, name)

    def image(self, step: int, tag: str, image: Image) -> None:
        """Writes the images as one PNG file."""
        number, height, width, _ = image.array.shape
        content = {"file": self._save(step, tag, encode_png(image.grid()), "png")}
        sizes = {"count": number, "width": width, "height": height}
        captions = {"captions": list(image.captions)} if image.captions else {}
        self._append(step, tag, image.kind, content | sizes | captions)

    def text(self, step: int, tag: str, text: Text) -> None:
        self._append(step, tag, text.kind, {"text": text.joined()})

    def histogram(self, step: int, tag: str, histogram: Histogram) -> None:
        edges, counts = histogram.edges.tolist(), histogram.counts.tolist()
        self._append(step, tag, histogram.kind, {"edges": edges, "counts": counts})

    def table(self, step: int, tag: str, table: Table) -> None:
        """Writes the rows; numbers that are not finite are null."""
        rows = [[_json_cell(cell) for cell in row] for row in table.rows()]
        self._append(step, tag, table.kind, {"columns": list(table.columns), "rows": rows})

    def figure(self, step: int, tag: str, figure: Figure) -> None:
        """Writes the figure as a file."""
        file = self._save(step, tag, figure.content, figure.format)
        self._append(step, tag, figure.kind, {"file": file})

    def _save(self, step: int, tag: str, content: bytes, extension: str) -> str:
        """Writes a file of an item; returns its path in the workdir."""
        plain = re.sub(r"[^A-Za-z0-9_-]", "-", tag)
        if plain != tag.replace("/", "-", 1):  # other names could become the same
            plain += "-" + hashlib.blake2b(tag.encode(), digest_size=4).hexdigest()
        name = f"{_FOLDER}/{plain}-{step:08}.{extension}"
        no_follow.make_subfolder(self._folder, _FOLDER)
        no_follow.write(self._folder, name, lambda file: file.write(content))
        return name

    def _append(self, step: int, tag: str, kind: str, content: dict[str, Any]) -> None:
        split, _, name = tag.partition("/")
        line = {"step": step, "split": split, "name": name, "kind": kind} | content
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with os.fdopen(no_follow.open_file(self._folder, MEDIA_LINES, flags), "ab") as file:
            file.write(json.dumps(line).encode() + b"\n")


def _parse(line: bytes) -> dict[str, Any] | None:
    """Parses a line with a step; None if it is not valid."""
    try:
        content = parse_object(line)
    except Malformed:
        return None
    return content if type(content.get("step")) is int else None


def _json_cell(cell: Any) -> Any:
    return None if isinstance(cell, float) and not math.isfinite(cell) else cell
