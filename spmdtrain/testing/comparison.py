"""Comparison of a training loop with a `Trainer`, step by step."""

import contextlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spmdtrain.distributed import process_group
from spmdtrain.document.blocks import NoteBlock, TableBlock
from spmdtrain.document.terminal import Terminal
from spmdtrain.errors import NonFiniteError, UserError, did_you_mean, foreign
from spmdtrain.strategies import strategy
from spmdtrain.train.trainer import Trainer
from spmdtrain.tree import is_key, leaves_by_path, named_leaves

PyTree = Any
RTOL = 1e-4
_SHOWN = 10  # more steps are shown in part: around the first difference, and at both ends
_AROUND = 2
_ENDS = 3
_SMALL = 0.01  # of the root mean square of all parameters


@dataclass(frozen=True)
class LossPair:
    """The loss of one step on both sides, and its relative difference."""

    step: int
    loop: float
    trainer: float

    @property
    def relative(self) -> float:
        """The difference relative to the larger loss; infinite if only one of them is finite."""
        return _relative(np.array([self.loop]), np.array([self.trainer]))


@dataclass(frozen=True)
class FirstDifference:
    """The first array that differs: a loss, or parameters after a step.

    Attributes:
      step: The step, from 1.
      array: "loss", or the path of the parameters that differ most: "params/layers/0/kernel".
      relative: The relative difference of the array.
      arrays: The relative difference of each array that differs after the step, the largest first.
    """

    step: int
    array: str
    relative: float
    arrays: Mapping[str, float]


@dataclass(frozen=True)
class LossComparison:
    """The steps of a loop and of a trainer, compared; `print` shows them as a table.

    Attributes:
      steps: The losses of each step.
      rtol: The largest relative difference that counts as equal.
      first: The first difference; None if all steps are equal.
      compares_params: Whether the loop has yielded parameters.
      shuffles: Whether the trainer has taken the examples in another order than theirs.
      stopped: The message of the trainer's `NonFiniteError`, which ends the comparison; "" without.
    """

    steps: Sequence[LossPair]
    rtol: float
    first: FirstDifference | None
    compares_params: bool
    shuffles: bool
    stopped: str = ""

    @property
    def verdict(self) -> str:
        """The first difference in a sentence, and what causes differences of its kind."""
        found, last = self.first, self.steps[-1].step
        what = "losses and parameters" if self.compares_params else "losses"
        if found is None:
            end = f"; both end with a value that is not finite: {self.stopped}"
            largest = max(pair.relative for pair in self.steps)
            return (
                f"the {what} of {last} steps are equal to a relative difference of "
                f"{self.rtol:.0e}; the largest of a loss is {largest:.1e}"
            ) + (end if self.stopped else "")
        first = f"first difference: {found.array} of step {found.step}, {found.relative:.1e}"
        pair = self.steps[found.step - 1]
        ratio = pair.loop / pair.trainer if pair.trainer else 0.0
        if math.isfinite(ratio) and not 0.5 < ratio < 2:
            first += f" (a factor of {max(ratio, 1 / ratio if ratio else 0.0):.4g})"
        if found.array != "loss":
            first = f"first difference: {found.array} after step {found.step}, {found.relative:.1e}"
            others = len(found.arrays) - 1
            first += f" (and {others} more)" if others else ""
        if self.stopped:
            return f"{first}: the trainer stopped, {self.stopped}"
        return f"{first}: {self._cause(found)}"

    def _cause(self, found: FirstDifference) -> str:
        if found.array != "loss":
            return "its loss is equal, so its gradient or the optimizer's update differs"
        if found.step == 1:
            return (
                "the initial parameters, the batch, the random numbers (dropout) or the objective "
                "differ" + (", and the trainer shuffles: shuffle=False" if self.shuffles else "")
            )
        if self.compares_params:
            return "the parameters before it are equal, so its batch or its random numbers differ"
        return (
            f"the update of step {found.step - 1}, or the batch of step {found.step}, differs: "
            "yield (loss, params) to see which"
        )

    def blocks(self) -> tuple[TableBlock, NoteBlock]:
        """Returns the table of the losses, with a dozen steps at most, and the verdict."""
        last = self.steps[-1].step
        near = None if self.first is None else self.first.step
        rows: list[Sequence[str]] = []
        marked = set()
        for pair in self.steps:
            at_ends = pair.step <= _ENDS or pair.step > last - _ENDS
            if last > _SHOWN and not at_ends and (near is None or abs(pair.step - near) > _AROUND):
                rows += [("...",) * 4] if rows[-1:] != [("...",) * 4] else []
                continue
            if pair.step == near:
                marked.add(len(rows))
            losses = (f"{pair.loop:.9g}", f"{pair.trainer:.9g}")
            same = "equal" if pair.relative == 0 else f"{pair.relative:.1e}"
            rows.append((str(pair.step), *losses, same))
        columns = ("step", "loss of the loop", "of the trainer", "relative difference")
        table = TableBlock(columns, rows, frozenset(range(4)), frozenset(marked))
        return table, NoteBlock(self.verdict)

    def __str__(self) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as text:
            Terminal().show(*self.blocks())
        return text.getvalue().rstrip("\n")

    def _repr_html_(self) -> str:
        """Returns the table for a notebook."""
        from spmdtrain.document.notebook import as_html

        return as_html(*self.blocks())


def compare_losses(
    loop: Iterable[Any],
    trainer: Trainer,
    steps: int,
    *,
    train: Any,
    rtol: float = RTOL,
    global_batch_size: int | None = None,
    batch_size_per_device: int | None = None,
) -> LossComparison:
    """Runs a training loop and a trainer step by step, and finds the first step that differs.

    Both must begin with the same parameters and use the same batches, for example with
    `shuffle=False`. The loop makes each step before the trainer. The trainer calls `fit` for each
    step, which gives the bits of a single `fit`; its callbacks and trackers see as many fits.

    Example::

        def loop(params):
            opt_state = optimizer.init(params)
            for batch in batches:
                params, opt_state, loss = train_step(params, opt_state, batch)
                yield loss, params

        print(compare_losses(loop(params), trainer, 20, train=(x, y), global_batch_size=32))

    Args:
      loop: Yields after each of its steps the loss, (loss, params), or a mapping with "loss" and,
        optionally, "params". The loss is that of the step's batch before the update, the parameters
        are those after it: a pytree with the paths of the trainer's parameters.
      trainer: A trainer that has made no step, without a workdir.
      steps: The number of steps to compare.
      train: The training data, as for `Trainer.fit`.
      rtol: The largest relative difference that counts as equal: of losses, and of the L2 norm of
        the difference of two arrays to the larger of their norms, or to a hundredth of what is
        usual in the model, if that is larger.
      global_batch_size: As for `Trainer.fit`.
      batch_size_per_device: As for `Trainer.fit`.

    Returns:
      The comparison. After a `NonFiniteError` of the trainer it ends with that step.

    Raises:
      UserError: If the trainer would not make the steps of a new run, or the loop ends early or
        yields something else.
    """
    _check(loop, trainer, steps, rtol)
    pairs: list[LossPair] = []
    first, compares_params, stopped = None, False, ""
    made = _steps_of(loop, steps)
    with _without_output(trainer):
        for step, (loss, params) in enumerate(made, 1):
            found: dict[str, float] = {}
            try:
                result = trainer.fit(
                    train,
                    steps=step,
                    global_batch_size=global_batch_size,
                    batch_size_per_device=batch_size_per_device,
                )
                if trainer.step != step:
                    raise UserError(f"a callback has stopped the trainer before step {step}")
                pairs.append(LossPair(step, loss, result.train["loss"]))
            except NonFiniteError as error:
                stopped = str(error)
                pairs.append(LossPair(step, loss, math.nan if error.loss is None else error.loss))
            if pairs[-1].relative > rtol:
                found = {"loss": pairs[-1].relative}
            elif params is not None and not stopped:
                assert trainer.state is not None
                compares_params, own = True, _as_arrays(trainer.state.params)
                same, scale = _matched(params, own, step), _scale(own)
                relative = {f"params/{n}": _relative(same[n], own[n], scale) for n in own}
                found = {name: x for name, x in relative.items() if x > rtol}
            if found and first is None:
                array = max(found, key=found.__getitem__)
                ordered = dict(sorted(found.items(), key=lambda item: -item[1]))
                first = FirstDifference(step, array, found[array], ordered)
            if stopped:
                break
    return LossComparison(pairs, rtol, first, compares_params, trainer.config.shuffle, stopped)


def _check(loop: Any, trainer: Trainer, steps: int, rtol: float) -> None:
    """Raises `UserError` if the trainer would not make the steps from 1 of a new run."""
    if not isinstance(trainer, Trainer):
        raise UserError(
            f"trainer is a {type(trainer).__name__}: compare_losses calls the fit of a Trainer; a "
            "Loop yields its losses to your own code, which can compare them"
        )
    config = trainer.config
    if not isinstance(steps, int) or steps < 1:
        raise UserError(f"steps is {steps!r}: it must be a whole number above 0")
    if not isinstance(rtol, (int, float)) or not rtol >= 0:
        raise UserError(f"rtol is {rtol!r}: it must be a number, 0 or more")
    if trainer.writes_into_model:
        raise UserError(
            "the trainer is of from_keras, which writes the trained values into the model after "
            "each fit, and a loop with this model would continue from them: give compare_losses a "
            "Trainer(model=KerasModel(model), ...), and the loop another model"
        )
    if not isinstance(loop, Iterable):
        hint = ": call it, compare_losses(loop(), ...)" if callable(loop) else ""
        raise UserError(
            f"loop is a {type(loop).__name__}, and it must be an iterator that yields the loss of "
            f"each step{hint}"
        )
    if strategy(config.strategy).is_asynchronous:
        raise UserError(
            f"strategy is {config.strategy}, whose steps depend on the order in which workers send "
            "gradients: compare with another strategy"
        )
    if process_group.count() > 1:
        raise UserError(
            f"compare_losses runs in one process, and this job has {process_group.count()}: the "
            "losses do not depend on the number of processes"
        )
    for name in ("workdir", "fork_from"):
        if (value := getattr(config, name)) is not None:
            raise UserError(
                f"the trainer has {name}={value!r}, from whose checkpoints it would continue: give "
                "compare_losses a Trainer without it"
            )
    if trainer.step:
        raise UserError(
            f"the trainer is at step {trainer.step}, and the comparison begins with step 1: give "
            "compare_losses a new Trainer"
        )


@contextlib.contextmanager
def _without_output(trainer: Trainer) -> Iterator[None]:
    """Leaves out what each `fit` prints."""
    terminal, trainer.terminal = trainer.terminal, Terminal(quiet=True)
    try:
        yield
    finally:
        trainer.terminal = terminal


def _steps_of(
    loop: Iterable[Any], steps: int
) -> Iterator[tuple[float, Mapping[str, np.ndarray] | None]]:
    """Yields the loss of each step and, if the loop yields them, the parameters by path."""
    given = iter(loop)
    for step in range(1, steps + 1):
        try:
            value = next(given)
        except StopIteration:
            raise UserError(
                f"the loop ended after {step - 1} of {steps} steps: it must yield after each of "
                f"its steps, or give steps={step - 1}"
            ) from None
        params = None
        if isinstance(value, Mapping):
            if "loss" not in value:
                raise UserError(
                    f"the loop yields a mapping without 'loss' after step {step}."
                    + did_you_mean("loss", value)
                )
            loss, params = value["loss"], value.get("params")
        elif isinstance(value, tuple) and len(value) == 2:
            loss, params = value
        else:
            loss = value
        try:
            number = np.asarray(loss).astype(np.float64)
        except (TypeError, ValueError):
            number = np.empty(0)
        if number.size != 1:
            raise UserError(
                f"the loop yields {_described(loss)} as the loss of step {step}: it must yield "
                'a number, (number, params) or {"loss": number, "params": params}'
            )
        # Copied before the next step of the loop, which may donate them.
        yield number.item(), None if params is None else _as_arrays(params)


def _described(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return type(value).__name__ if shape is None else f"an array of shape {tuple(shape)}"


def _as_arrays(tree: PyTree) -> dict[str, np.ndarray]:
    """Returns copies of the arrays of a pytree by path, on the host."""
    leaves = named_leaves(tree)  # those of an Equinox module may be functions
    arrays = {n: x for n, x in leaves.items() if hasattr(x, "dtype") and not is_key(x)}
    return {name: np.array(leaf) for name, leaf in arrays.items()}


def _matched(
    params: Mapping[str, np.ndarray], own: Mapping[str, np.ndarray], step: int
) -> dict[str, np.ndarray]:
    """Returns the loop's parameters by the trainer's paths."""
    found = dict(leaves_by_path(params, own))
    missing, more = ([n for n in a if n not in b] for a, b in ((own, found), (found, own)))
    if missing or more:
        facts = [
            f"{what} {foreign(', '.join(names[:3]), 200)}{', ...' if len(names) > 3 else ''}"
            for what, names in (("it lacks", missing), ("it has also", more))
            if names
        ]
        raise UserError(
            f"the loop yields {len(found)} arrays as parameters after step {step}, and the trainer "
            f"has {len(own)}: {'; '.join(facts)}. They are compared by path: yield the parameters "
            "alone (of an nnx module, nnx.state(model, nnx.Param)), with the trainer's names"
        )
    for name, array in found.items():
        if array.shape != own[name].shape:
            raise UserError(
                f"params/{name} has shape {array.shape} in the loop and {own[name].shape} in the "
                f"trainer after step {step}: both must train the same model"
            )
    return found


def _scale(arrays: Mapping[str, np.ndarray]) -> float:
    """Returns the size below which an array is compared as if it were of this size.

    A bias before a normalization has no gradient but rounding: all of its digits differ.
    """
    squares = sum(float((np.abs(x.astype(np.float64)) ** 2).sum()) for x in arrays.values())
    return _SMALL * math.sqrt(squares / max(1, sum(x.size for x in arrays.values())))


def _relative(first: np.ndarray, second: np.ndarray, scale: float = 0.0) -> float:
    """Returns the norm of the difference relative to the larger norm; NaN equals NaN.

    `scale` is the root mean square that the larger one has at least.
    """
    if np.array_equal(first, second, equal_nan=True):
        return 0.0
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        return math.inf
    kind = np.complex128 if np.iscomplexobj(first) or np.iscomplexobj(second) else np.float64
    a, b = first.astype(kind), second.astype(kind)
    norms = float(np.linalg.norm(a)), float(np.linalg.norm(b)), scale * math.sqrt(a.size)
    return float(np.linalg.norm(a - b)) / max(norms)
