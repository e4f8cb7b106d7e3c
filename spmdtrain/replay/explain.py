"""Explanation of a step that is not finite: the operation, its source, and the examples."""

import dataclasses
import linecache
import math
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import partial_eval

from spmdtrain.data.sampling import MarkedRows, rows_of
from spmdtrain.document.blocks import (
    TICK_LABEL,
    ChartBlock,
    Fact,
    FactsBlock,
    LegendEntry,
    NoteBlock,
    TableBlock,
    altair,
    chart_block,
)
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import foreign, is_library
from spmdtrain.replay.interpreter import (
    Frames,
    Interpreter,
    Mark,
    Operation,
    Stage,
    frames_of,
    layer_of,
)
from spmdtrain.replay.rerun import PreparedStep, examples_table
from spmdtrain.sharding.placement import use_placement
from spmdtrain.tree import named_leaves
from spmdtrain.xla.hlo import Module
from spmdtrain.xla.jaxpr import (
    CALLS,
    backward_rule,
    equations,
    evaluate,
    inner_programs,
    is_inexact,
)

PyTree = Any
Shown = TableBlock | FactsBlock | NoteBlock
_ROW_HEIGHT = 22  # pixels
_MOST_LAYERS = 120


def explain_step(
    prepared: PreparedStep, step: int, terminal: Terminal
) -> tuple[list[Shown], TableBlock]:
    """Finds the operation because of which a step is not finite, and the examples that reach it.

    The compiled step is made once; then its operations are evaluated one by one.

    Returns:
      The explanation, and a table of the largest magnitudes of each layer.
    """
    # Compiled also if the run was not: what the compiler adds would be a fault of its own.
    prepared = dataclasses.replace(prepared, plan=dataclasses.replace(prepared.plan, jit=True))
    trainer, plan, batch = prepared.trainer, prepared.plan, prepared.batch
    program, state = plan.program(), trainer.state

    def fails(batch: PyTree) -> bool:
        _, output = program(jax.tree.map(jnp.copy, state), batch)  # the state is donated
        # The loss also if the optimizer leaves such an update out, so that the flags do not count.
        return not (np.asarray(output.finite).all() and np.isfinite(output.metrics["loss"]).all())

    def values(given: Mapping[str, PyTree]) -> PyTree:
        after, output = plan.step(given["state"], given["batch"])
        fields = ("params", "opt_state", "model_state")
        return {"loss": output.metrics["loss"]} | {x: getattr(after, x) for x in fields}

    with use_placement(trainer.placement):
        has_failed = fails(batch)
        given = {"state": state, "batch": batch}
        closed, shapes = jax.make_jaxpr(values, return_shape=True)(given)
        # Without the norms and finite flags of the step.
        is_needed = [True] * len(closed.jaxpr.outvars)
        jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, is_needed, instantiate=True)
        interpreter, arguments = Interpreter(__file__), named_leaves(given)
        with terminal.waiting("evaluating the step operation by operation"):
            cells = interpreter.run(jaxpr, closed.consts, arguments, "state/params/")
        results = dict(zip(named_leaves(shapes), cells, strict=True))
        wrong = {name: x.mark for name, x in results.items() if x.mark.origin is not None}
        entered = {name: x.mark for name, x in results.items() if x.mark.entered is not None}
        blocks: list[Shown] = []
        growth = _growth(prepared)
        if wrong:
            if not has_failed:
                blocks.append(
                    NoteBlock(
                        f"step {step} is finite if it is compiled, but not operation by operation"
                    )
                )
            blocks.append(_origin_block(step, wrong, interpreter, prepared, growth))
            if has_failed:
                blocks += _examples(prepared, fails, terminal)
        elif has_failed and entered:
            blocks.append(_constant_block(step, entered))
            blocks += _examples(prepared, fails, terminal)
        elif has_failed:
            program_of_step = jaxpr, closed.consts, list(arguments.values())
            blocks.append(_only_compiled(step, prepared, *program_of_step))
        else:
            loss = float(np.asarray(results["loss"].value).mean())
            blocks.append(
                NoteBlock(
                    f"step {step} is finite, compiled and operation by operation: loss {loss:.9g}"
                )
            )
        return blocks, _magnitudes_table(interpreter, growth)


# -- The operation -----------------------------------------------------------------------------


def _origin_block(
    step: int,
    wrong: Mapping[str, Mark],
    interpreter: Interpreter,
    prepared: PreparedStep,
    growth: Mapping[str, tuple[float, float]],
) -> FactsBlock:
    """Returns the facts about the first operation whose result is not finite."""
    origins = [mark.origin for mark in wrong.values() if mark.origin is not None]
    origin = min(origins, key=lambda origin: origin.number)
    facts = _facts_of(origin) if origin.primitive else _facts_of_input(origin)
    if rule := _rule_of(origin, prepared):
        facts.append(Fact("rule of a custom_vjp", rule))
    became = interpreter.became_nan.get(origin.number)
    if became is not None:
        facts.append(Fact("becomes NaN in", f"{became.primitive}, {became.stage}", _line(became)))
    facts.append(_reached(wrong))
    if interpreter.not_entered:
        facts.append(Fact("evaluated as one", ", ".join(sorted(interpreter.not_entered))))
    if grown := _grown(growth):
        name, (before, now) = grown
        detail = "a learning rate that is too high does this"
        facts.append(Fact("grew most", f"{name}: from {before:.4g} to {now:.4g}", detail))
    title = f"step {step}: the first operation whose result is not finite"
    if not origin.primitive:
        title = f"step {step}: what the step was given is not finite"
    return FactsBlock(facts, title=title)


def _constant_block(step: int, entered: Mapping[str, Mark]) -> FactsBlock:
    """Returns the facts about a constant that is not finite and reaches the results."""
    operations = [mark.entered for mark in entered.values() if mark.entered is not None]
    first = min(operations, key=lambda operation: operation.number)
    title = f"step {step}: a constant that is not finite reaches the results"
    return FactsBlock([*_facts_of(first), _reached(entered)], title=title)


def _reached(results: Mapping[str, Mark]) -> Fact:
    names = list(results)
    more = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return Fact("reaches", ", ".join(names[:4]) + more)


def _facts_of(origin: Operation) -> list[Fact]:
    facts = [Fact("operation", origin.primitive), Fact("line", _line(origin))]
    if text := _text_of_line(origin):
        facts.append(Fact("source", text))
    if origin.modules:
        facts.append(Fact("module", origin.modules))
    if origin.parameter:
        facts.append(Fact("parameter", origin.parameter.removeprefix("state/")))
    facts.append(Fact("part", origin.stage.value))
    if origin.within:
        facts.append(Fact("within", ", ".join(origin.within)))
    facts += [
        Fact(f"operand {n}" if len(origin.operands) > 1 else "operand", text.replace("state/", ""))
        for n, text in enumerate(origin.operands, 1)
    ]
    return [*facts, Fact("result", origin.result)]


def _rule_of(origin: Operation, prepared: PreparedStep) -> str:
    """Returns the rule of a `custom_vjp` that has the line of an operation of a backward pass.

    JAX gives all operations of a rule the line where its function is called.
    """
    if origin.stage is not Stage.BACKWARD:
        return ""
    rows = jax.eval_shape(lambda batch: rows_of(batch), prepared.batch)
    forward = prepared.trainer.functions.checks.forward_program(rows)
    place = _frame(origin.frames)
    rules = (backward_rule(x) for x in equations(forward) if _frame(frames_of(x, "")) == place)
    return next(filter(None, rules), "")


def _facts_of_input(origin: Operation) -> list[Fact]:
    return [Fact("array", origin.parameter), Fact("values", origin.result)]


def _frame(frames: Frames) -> tuple[str, int, str] | None:
    """Returns the innermost frame outside of libraries, else the innermost one."""
    users = [frame for frame in frames if not is_library(frame[0])]
    return next(iter([*users, *frames]), None)


def _line(origin: Operation) -> str:
    if (frame := _frame(origin.frames)) is None:
        return "not known: JAX derived the operation"
    file, line, function = frame
    inner = origin.frames[0]
    called = "" if inner == frame else f", which calls {inner[2]} ({inner[0]}:{inner[1]})"
    return f"{file}:{line} in {function}{called}"


def _text_of_line(origin: Operation) -> str:
    frame = _frame(origin.frames)
    return "" if frame is None else foreign(linecache.getline(frame[0], frame[1]).strip(), 200)


# -- The examples ----------------------------------------------------------------------------------

_TRIED = 8  # examples of which one has to be finite alone
_SHOWN = 16  # examples


def failing_rows(fails: Callable[[Sequence[int]], bool], size: int) -> list[int] | None:
    """Returns the rows of a batch because of which it fails, at most 16 of them.

    Rows are replaced by another one that does not fail, in ever smaller groups.

    Args:
      fails: Returns whether a batch fails that has these rows of the batch instead of its own.
      size: Number of rows.

    Returns:
      The rows; none if only their combination fails; None if the batch fails whatever its rows.
    """
    tried = range(min(size, _TRIED))
    good = next((row for row in tried if not fails([row] * size)), None)
    if good is None:
        return None
    found: list[int] = []

    def search(rows: range) -> None:
        if len(found) >= _SHOWN:
            return
        if not fails([row if row in rows else good for row in range(size)]):
            return
        if len(rows) == 1:
            found.extend(rows)
            return
        middle = len(rows) // 2
        search(rows[:middle])
        search(rows[middle:])

    search(range(size))
    return found


def _examples(
    prepared: PreparedStep, fails: Callable[[PyTree], bool], terminal: Terminal
) -> Iterator[Shown]:
    """Yields the examples that make the step fail."""
    size = prepared.trainer.config.resolved_batch_size

    def with_rows(source: Sequence[int]) -> PyTree:
        def taken(x: Any) -> Any:
            rows = np.asarray(x)
            padding = [source[-1]] * (len(rows) - size)  # as the loader repeats the last row
            return jax.device_put(rows[np.array([*source, *padding])], x.sharding)

        batch, rows = prepared.batch, jax.tree.map(taken, rows_of(prepared.batch))
        return dataclasses.replace(batch, rows=rows) if isinstance(batch, MarkedRows) else rows

    with terminal.waiting("searching the examples"):
        rows = failing_rows(lambda source: fails(with_rows(source)), size)
    if rows is None:
        yield NoteBlock("no example in particular: the step is not finite with any of them")
    elif not rows:
        yield NoteBlock("no example alone: the step is not finite with all of them together")
    else:
        every = enumerate(prepared.examples())
        title = f"{len(rows)} of {size} examples reach it"
        if len(rows) >= _SHOWN:
            title = f"the first {len(rows)} of the examples that reach it"
        yield examples_table(((row, x) for row, x in every if row in rows), title)


# -- The largest magnitudes of each layer ----------------------------------------------------------

_GROWTH = 100  # from which on a parameter is named


def _growth(prepared: PreparedStep) -> dict[str, tuple[float, float]]:
    """Returns the largest magnitudes of each parameter initially and before the step, by path.

    The first one is NaN if the run did not begin with initial values of its own.
    """
    trainer = prepared.trainer
    state = trainer.state
    assert state is not None
    now = _largest(state.params)
    before = dict.fromkeys(now, math.nan)
    if prepared.begins_new:
        before = _largest(trainer.functions.init(trainer.config.seed).params)
    return {f"params/{name}": (before[name], now[name]) for name in now}


def _largest(params: PyTree) -> dict[str, float]:
    sizes = jax.jit(lambda tree: jax.tree.map(lambda x: jnp.abs(x).max(initial=0), tree))(params)
    return {name: float(x) for name, x in named_leaves(sizes).items()}


def _grown(
    growth: Mapping[str, tuple[float, float]],
) -> tuple[str, tuple[float, float]] | None:
    """Returns the parameter that has grown most, if one has grown by far."""
    usual = max((before for before, _ in growth.values()), default=math.nan)

    def factor(name: str) -> float:
        before, now = growth[name]
        return now / (before or usual or 1.0)

    known = [name for name in growth if factor(name) >= _GROWTH]
    name = max(known, key=factor, default=None)
    return None if name is None else (name, growth[name])


def _magnitudes_table(
    interpreter: Interpreter, growth: Mapping[str, tuple[float, float]]
) -> TableBlock:
    """Returns the table of the largest magnitudes, layer by layer."""
    of_layers: dict[str, list[tuple[float, float]]] = {}
    for name, both in growth.items():
        of_layers.setdefault(layer_of(name), []).append(both)
    peaks = {(layer.removeprefix("state/"), x): p for (layer, x), p in interpreter.peaks.items()}
    layers = list(dict.fromkeys([*(layer for layer, _ in peaks), *of_layers]))
    rows = []
    for layer in layers:
        sizes = of_layers.get(layer, [])
        cells = [_number(max((x[n] for x in sizes), default=math.nan)) for n in (0, 1)]
        for stage in (Stage.FORWARD, Stage.BACKWARD):
            peak = peaks.get((layer, stage))
            cells += ["", ""] if peak is None else [_number(peak.size), peak.primitive]
        rows.append((foreign(layer, 200), *cells))
    columns = (
        *("layer", "initial parameters", "parameters", "forward", "operation"),
        *("backward", "operation"),
    )
    return TableBlock(
        columns,
        rows,
        frozenset({1, 2, 3, 5}),
        title="largest finite magnitudes",
        optional=frozenset({4, 6}),
    )


def magnitudes_chart(table: TableBlock) -> ChartBlock:
    """Returns the chart of the table of largest magnitudes: a row of marks for each layer."""
    alt = altair()
    kinds = [table.columns[number] for number in sorted(table.numeric)]
    rows = [
        {"layer": row[0], "kind": kind, "size": float(row[number])}
        for row in table.rows[:_MOST_LAYERS]
        for number, kind in zip(sorted(table.numeric), kinds, strict=True)
        if row[number] and float(row[number]) > 0
    ]
    layers = list(dict.fromkeys(row["layer"] for row in rows))
    axis = alt.Axis(labelExpr=TICK_LABEL, tickCount=6)
    chart = (
        alt.Chart(alt.NamedData("magnitudes"))
        .mark_point(filled=True, size=60, opacity=0.9)
        .encode(
            x=alt.X("size:Q", title=None, scale=alt.Scale(type="log"), axis=axis),
            y=alt.Y("layer:N", sort=None, axis=alt.Axis(title=None, labelLimit=320, grid=True)),
            color=alt.Color("kind:N", legend=None, scale=alt.Scale(domain=kinds)),
            tooltip=["layer:N", "kind:N", alt.Tooltip("size:Q", format=".4g")],
        )
    )
    hidden = len(table.rows) - _MOST_LAYERS
    return chart_block(
        "largest finite magnitudes of each layer",
        chart,
        {"magnitudes": rows},
        height=max(1, len(layers)) * _ROW_HEIGHT,
        note=f"{hidden:,} more layers are in the table" if hidden > 0 else "",
        legend=[LegendEntry(kind, color) for color, kind in enumerate(kinds)],
    )


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4g}"


# -- A step that is not finite only if it is compiled ----------------------------------------------


def _only_compiled(
    step: int,
    prepared: PreparedStep,
    jaxpr: Any,
    constants: Sequence[Any],
    arguments: Sequence[Any],
) -> FactsBlock:
    """Names the operation and the fusion whose result is not finite in the compiled program alone.

    The compiled program returns for each operation whether its result is finite, and is compared
    with the same operations one by one.
    """
    found: list[Any] = []

    def flags(*given: Any) -> jax.Array:
        found.clear()
        finite: list[jax.Array] = []

        def walk(jaxpr: Any, constants: Sequence[Any], values: Sequence[Any]) -> list[Any]:
            known = dict(zip(jaxpr.constvars, constants, strict=True))
            known |= dict(zip(jaxpr.invars, values, strict=True))

            def read(atom: Any) -> Any:
                return atom.val if hasattr(atom, "val") else known[atom]

            for equation in jaxpr.eqns:
                if equation.primitive.name in CALLS:
                    ((inner, own),) = inner_programs(equation)
                    results = walk(inner, own, [read(x) for x in equation.invars])
                else:
                    results = evaluate(jaxpr, equation, read)
                    checked = [jnp.isfinite(x).all() for x in results if is_inexact(x)]
                    if checked:
                        finite.append(jnp.stack(checked).all())
                        found.append(equation)
                known.update(zip(equation.outvars, results, strict=True))
            return [read(x) for x in jaxpr.outvars]

        walk(jaxpr, constants, given)
        return jnp.stack(finite)

    alone = np.asarray(flags(*arguments))
    compiled = np.asarray(jax.jit(flags)(*arguments))
    different = np.flatnonzero(alone & ~compiled)
    title = (
        f"step {step}: only the compiled program is not finite; operation by operation, all is "
        "finite"
    )
    if not different.size:
        advice = "jit off (--no-jit) makes the step as it is here, operation by operation"
        return FactsBlock([Fact("fusion", "not found", advice)], title=title)
    equation = found[int(different[0])]
    frames = frames_of(equation, __file__)
    operation = Operation(1, equation.primitive.name, Stage.FORWARD, frames)
    facts = [Fact("operation", operation.primitive), Fact("line", _line(operation))]
    if text := _text_of_line(operation):
        facts.append(Fact("source", text))
    facts.append(Fact("fusion", _fusion_of(_program_text(prepared), operation) or "not found"))
    return FactsBlock(facts, title=title)


def _program_text(prepared: PreparedStep) -> str:
    """Returns the compiled program of the step, with the lines that the source has now."""

    def step(state: PyTree, batch: PyTree) -> Any:
        return prepared.plan.step(state, batch)

    # The cache of compiled programs ignores lines, but not the name.
    step.__name__ = f"step_{uuid.uuid4().hex}"
    program = dataclasses.replace(prepared.plan, step=step).program()
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
        (prepared.trainer.state, prepared.batch),
    )
    return program.lower(*shapes).compile().as_text() or ""


def _fusion_of(program: str, operation: Operation) -> str:
    """Returns the fusion that computes an operation, or its own instruction; "" if neither is."""
    module = Module(program)
    frame = _frame(operation.frames)
    place = "" if frame is None else f"{frame[0]}:{frame[1]}"
    for name, computation in module.computations.items():
        for instruction in computation.instructions.values():
            is_same = instruction.op_name.endswith(f"/{operation.primitive}")
            if not (is_same and module.line_of(instruction).partition(" ")[0] == place):
                continue
            for outer in module.computations.values():
                for caller in outer.instructions.values():
                    if any(called == name for _, called in caller.called):
                        return f"{caller.name} ({caller.opcode})"
            return f"{instruction.name} ({instruction.opcode})"
    return ""
