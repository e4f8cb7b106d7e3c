"""The HTML page of one or several plans, made from the object that `--json` prints."""

import datetime
from collections.abc import Sequence
from typing import Any

from spmdtrain.document.blocks import (
    Block,
    Fact,
    NoteBlock,
    Page,
    Section,
    StatsBlock,
    TableBlock,
    Tone,
    Width,
)
from spmdtrain.document.terminal import byte_size
from spmdtrain.optional import NOT_INSTALLED, version_of
from spmdtrain.plan.page_comparison import comparison_blocks
from spmdtrain.plan.page_links import link_blocks
from spmdtrain.plan.page_memory import memory_blocks
from spmdtrain.plan.page_parameters import parameter_blocks
from spmdtrain.plan.page_time import time_blocks
from spmdtrain.plan.phrases import (
    advice_figures,
    all_notes,
    chip_hours,
    measured_sentence,
    run_time,
    sentence,
    step_seconds,
    uses_measured_rates,
    utilization_kind,
)
from spmdtrain.step.flops import SHORT_CONVENTION

_PACKAGES = ("spmdtrain", "jax", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")
_FULL = 0.9  # fraction of the limit from which on memory is marked as scarce


def plan_page(
    results: Sequence[dict[str, Any]], changes: Sequence[str], title: str, command: str
) -> Page:
    """Returns the page of the plans for one or several topologies.

    Args:
      results: The plans as returned by `plan_as_json`; a failed one has at least `topology` and
        `error`.
      changes: The qualitative changes from each plan to the next.
    """
    plans = [result for result in results if "state" in result]
    sections = []
    if len(plans) > 1:
        sections.append(Section("Comparison", comparison_blocks(plans, changes)))
    for result in results:
        parts = _sections(result)
        if len(results) == 1:
            sections += parts
        else:  # one section for each topology, so that the navigation stays short
            blocks = [block for part in parts for block in part.blocks]
            note = parts[0].note if parts else ""
            sections.append(Section(str(result["topology"]), blocks, note))
    return Page(
        title=title,
        sections=sections,
        subtitle=command,
        badges=dict(map(_badge, results)),
        footer=_footer(),
    )


def _badge(result: dict[str, Any]) -> tuple[str, Tone]:
    name = result["topology"]
    if "state" not in result:
        return f"{name}: no plan", Tone.BAD
    text, tone = {
        True: ("fits", Tone.GOOD),
        False: ("does not fit", Tone.BAD),
        None: ("limit unknown", Tone.PLAIN),
    }[result["fits"]]
    return f"{name}: {text}", tone


def _footer() -> str:
    versions = {package: version_of(package) for package in _PACKAGES}
    installed = [f"{name} {x}" for name, x in versions.items() if x != NOT_INSTALLED]
    now = datetime.datetime.now(datetime.UTC)
    return f"{', '.join(installed)}; written {now:%Y-%m-%d %H:%M} UTC"


def _sections(result: dict[str, Any]) -> list[Section]:
    """Returns the parts of one plan, or its error."""
    errors = [NoteBlock(f"Error: {result['error']}", Tone.BAD)] if "error" in result else []
    if "state" not in result:
        return [Section("", errors)]
    chips = f"{result['chips']:,} chip" + ("s" if result["chips"] > 1 else "")
    note = (
        f"{result['topology']}: {chips}, {result['placement']}; global batch "
        f"{result['global_batch_size']:,}"
    )
    overview: list[Block] = [*errors, _stats(result)]
    if result["measured"]:
        overview.append(NoteBlock(sentence(measured_sentence(result))))
    notes = [NoteBlock(sentence(note), Tone.WARNING) for note in all_notes(result)]
    return [
        Section("", overview, note),
        Section("Advice", _advice(result)),
        Section("Step", time_blocks(result)),
        Section("Memory", memory_blocks(result)),
        Section("Communication", link_blocks(result)),
        Section("Parameters", parameter_blocks(result)),
        Section("Notes", notes),
    ]


def _stats(plan: dict[str, Any]) -> StatsBlock:
    memory, time, sent = plan["memory"], plan["time"], plan["sent"]
    tone = {True: Tone.GOOD, False: Tone.BAD, None: Tone.PLAIN}[plan["fits"]]
    if plan["fits"] and memory["peak"] > _FULL * memory["limit"]:
        tone = Tone.WARNING
    facts = [Fact("memory of a device", byte_size(memory["peak"]), _limit(plan), tone)]
    if time:
        bound = f"estimate; at least {step_seconds(time['bound'])}"
        facts.append(Fact("a step", step_seconds(time["estimate"]), bound))
        rate = f"{time['examples_per_second']:,.0f} examples/s"
        if time["tokens_per_second"]:
            facts.append(Fact("tokens/s", f"{time['tokens_per_second']:,.0f}", rate))
        else:
            facts.append(Fact("examples/s", f"{time['examples_per_second']:,.0f}"))
        on_cpu = uses_measured_rates(plan)
        if time["utilization"] is not None and not on_cpu:
            detail = f"{utilization_kind(time)}; {SHORT_CONVENTION}; mostly {time['rules']}"
            facts.append(Fact("MFU", f"{time['utilization']:.1%}", detail))
        hours = "" if on_cpu else f"{chip_hours(time)} chip-hours"
        facts.append(Fact(f"all {time['steps']:,} steps", run_time(time["run"]), hours))
    if plan["flops"]["device"] is not None:  # the step is compiled
        least = sent["least"]
        needed = "" if least is None else f"the strategy needs {byte_size(round(least))}"
        facts.append(Fact("sent by each device", byte_size(round(sent["bytes"])), needed))
    return StatsBlock(facts)


def _limit(plan: dict[str, Any]) -> str:
    memory = plan["memory"]
    if memory["limit"] is None:
        return "the limit is unknown"
    if plan["fits"]:
        left = 1 - memory["peak"] / memory["limit"]
        return f"of {byte_size(memory['limit'])}: fits, {left:.0%} left"
    least = ", without temporaries" if memory["temporaries"] is None else ""
    return f"of {byte_size(memory['limit'])}: does not fit{least}"


def _advice(plan: dict[str, Any]) -> list[Block]:
    blocks: list[Block] = []
    for each in plan["advice"]:
        if each["with_options"] is not None:
            blocks.append(NoteBlock(sentence(each["finding"]), Tone.ACTIVE))
            rows = advice_figures(each)
            blocks.append(
                TableBlock(
                    ("", "now", "with the options"),
                    rows,
                    numeric=frozenset({1, 2}),
                    width=Width.COLUMN,
                    title=f"With {each['options']}",
                )
            )
        else:
            text = f"{sentence(each['finding'])} No known option fixes it."
            blocks.append(NoteBlock(text, Tone.WARNING))
        if each["tried"]:
            tried = [text.partition(": ")[::2] for text in each["tried"]]
            title = f"{len(tried)} tried without success"
            blocks.append(TableBlock(("options", "result"), tried, title=title, folded=True))
    return blocks
