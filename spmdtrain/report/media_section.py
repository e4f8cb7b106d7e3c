"""The samples, images, histograms and tables of the runs, the newest first."""

from collections.abc import Sequence
from typing import Any

from spmdtrain.document.blocks import (
    Block,
    ChartBlock,
    GalleryBlock,
    ImageBlock,
    NoteBlock,
    Section,
    TableBlock,
    TextBlock,
    Tone,
    Width,
    altair,
    chart_block,
)
from spmdtrain.errors import UserError
from spmdtrain.record.readers import MediaItem, MediaKind, read_picture
from spmdtrain.record.storage import folder_of
from spmdtrain.report.run_data import RunData

_MOST_ITEMS = 48
_MOST_BYTES = 700_000  # of pictures and texts in a page; base64 adds a third


def media_section(runs: Sequence[RunData]) -> Section:
    """Returns the section of samples, images, histograms and tables."""
    blocks: list[Block] = []
    left_out = 0
    for run in runs:
        name = f", {run.name}" if len(runs) > 1 else ""
        shown, more = _of_run(run, name, _MOST_ITEMS // len(runs), _MOST_BYTES // len(runs))
        blocks += shown
        left_out += more
    note = f"The newest items; {left_out:,} more are in the workdir." if left_out else ""
    return Section("Samples", blocks, note)


def _of_run(run: RunData, of: str, most: int, most_bytes: int) -> tuple[list[Block], int]:
    """Returns the blocks of the newest items of a run, and the number of the others."""
    blocks: list[Block] = []
    galleries: dict[str, list[ImageBlock]] = {}
    items = run.media.newest()
    shown = 0
    for item in items:
        title = f"{item.name} ({item.split}){of}" if item.split else f"{item.name}{of}"
        if shown >= max(1, most) or most_bytes <= 0:
            break
        shown += 1
        at = f"{title} at step {item.step:,}"
        match item.kind:
            case MediaKind.IMAGE | MediaKind.FIGURE:
                try:
                    content, media_type = read_picture(folder_of(run.workdir), item.file)
                except UserError as error:
                    blocks.append(NoteBlock(f"{at}: {error}", Tone.WARNING))
                    continue
                if len(content) > most_bytes:
                    shown -= 1
                    continue
                most_bytes -= len(content)
                if item.kind is MediaKind.FIGURE:
                    blocks.append(ImageBlock(content, media_type, at))
                    continue
                if title not in galleries:
                    galleries[title] = []
                    blocks.append(GalleryBlock(galleries[title], title))
                captions = f": {', '.join(item.captions)}" if item.captions else ""
                caption = f"step {item.step:,}{captions}"
                galleries[title].append(ImageBlock(content, media_type, caption))
            case MediaKind.TEXT:
                most_bytes -= len(item.text.encode(errors="replace"))
                blocks.append(TextBlock(item.text, at))
            case MediaKind.HISTOGRAM:
                blocks.append(_histogram(item, at))
            case MediaKind.TABLE:
                block = _table(item, at)
                most_bytes -= sum(len(cell) for row in block.rows for cell in row)
                blocks.append(block)
    return blocks, run.media.dropped + len(items) - shown


def _histogram(item: MediaItem, title: str) -> ChartBlock:
    alt = altair()
    rows: list[dict[str, Any]] = [
        {"from": low, "to": high, "count": count}
        for low, high, count in zip(item.edges, item.edges[1:], item.counts, strict=False)
    ]
    chart = (
        alt.Chart(alt.NamedData("bins"))
        .mark_bar()
        .encode(
            x=alt.X("from:Q", title=None, bin="binned", axis=alt.Axis(grid=False, format="~g")),
            x2="to:Q",
            y=alt.Y("count:Q", title=None, axis=alt.Axis(tickCount=4, format="~s")),
            tooltip=["from:Q", "to:Q", "count:Q"],
        )
    )
    return chart_block(title, chart, {"bins": rows}, height=160, width=Width.THIRD)


def _table(item: MediaItem, title: str) -> TableBlock:
    if item.row_count > len(item.rows):
        title += f" (the first {len(item.rows)} of {item.row_count:,} rows)"
    return TableBlock(item.columns, item.rows, title=title)
