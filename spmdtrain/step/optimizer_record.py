"""The record of an optimizer in checkpoints, by which a resume recognizes the same optimizer.

An optimizer's state does not identify it: the states of adam, yogi and nadam have the same arrays.
The record is made from the jaxpr of the update, in which numbers are kept apart from operations.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain.step.optimizer import (
    ExtraArguments,
    closure_of,
    reachable_functions,
    update_with,
)
from spmdtrain.tree import named_leaves, path_name
from spmdtrain.xla.jaxpr import inner_programs

PyTree = Any
_MOST_NUMBERS = 500  # places of numbers, and named numbers, in one record
_LARGEST_TABLE = 8  # elements of an array that is recorded as numbers
_CALLS = ("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "remat2", "checkpoint")
_PER_DEVICE = ("shard_map", "xla_pmap")  # whose programs depend on the number of devices
# Parameters of operations that do not say what is computed, or repeat the shape of the result.
_LEFT_OUT = re.compile(
    "shard|mesh|layout|donate|compiler|context|^(shape|new_sizes|name|length|unroll)$"
)


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer, as far as it is known. Stored in checkpoints as JSON."""

    name: str = ""
    """The names of its transformations in optax, such as `chain(scale_by_adam, scale)`."""
    kind: str = ""
    """Digest of the operations on gradients, parameters and arrays of the state, whatever
    the shapes and the devices."""
    schedule: str = ""
    """Digest of the operations on counters alone: schedules, bias corrections."""
    numbers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """The constants of the operations, by a digest of their place in the update."""
    constants: str = ""
    """Digest of the operations with their constants, parameter by parameter."""
    named: Mapping[str, str] = field(default_factory=dict)
    """The arguments of the transformations as far as their functions hold them, such as
    `scale_by_adam.b1`."""


@runtime_checkable
class NamesArguments(Protocol):
    """An object that has an optimizer's update as a method, and is identified by its arguments."""

    def known_arguments(self) -> tuple[str, Mapping[str, Any]] | None:
        """Returns the optimizer's name and arguments; None if the arguments are not all of it."""
        ...


def record_optimizer(optimizer: optax.GradientTransformation, params: PyTree) -> OptimizerRecord:
    """Returns the record of an optimizer.

    Of parameters whose paths differ in numbers only, such as the parameters of equal layers, the
    first and the last represent all: a trace of all takes half a second for GPT-2's. `params` has
    None in place of frozen parameters; shapes suffice.
    """
    owner = getattr(optimizer.update, "__self__", None)
    if isinstance(owner, NamesArguments) and (arguments := owner.known_arguments()) is not None:
        return _of_arguments(*arguments)
    found = None
    for shapes in (_representatives(params), params):
        try:
            found = _trace(optimizer, shapes)
            break
        except Exception:  # it may need all parameters; the step names a fault
            continue
    name = name_of(optimizer)
    if found is None:
        return OptimizerRecord(name)
    return OptimizerRecord(
        name,
        found.kind,
        found.schedule,
        found.numbers,
        found.constants,
        _named(optimizer),
    )


def changed_arguments(saved: OptimizerRecord, now: OptimizerRecord) -> list[str]:
    """Returns the differences of the arguments of two optimizers, `name: before -> after`."""
    found = [
        f"{name}: {before} -> {now.named[name]}"
        for name, before in saved.named.items()
        if now.named.get(name, before) != before
    ]
    before, here = ({name.split(".")[0]: None for name in x.named} for x in (saved, now))
    gone, new = (", ".join(x for x in a if x not in b) for a, b in ((before, here), (here, before)))
    return found + ([f"{gone or 'none'} -> {new or 'none'}"] if gone or new else [])


def changed_constants(saved: OptimizerRecord, now: OptimizerRecord) -> list[str]:
    """Returns the differences of constants that no changed argument explains.

    Both optimizers have the same operations.
    """
    pairs = {pair for n, x in saved.named.items() for pair in _related(x, now.named.get(n, x))}
    explained = {(a, b) for a, b in pairs if a != b}
    found: dict[str, None] = {}
    for place, texts in saved.numbers.items():
        before, here = list(texts), list(now.numbers.get(place, ()))
        if len(before) == len(here):
            differing = [pair for pair in zip(before, here, strict=True) if len({*pair}) > 1]
            found |= {f"{a} -> {b}": None for a, b in differing if (a, b) not in explained}
        elif not {*before} ^ {*here} <= {x for pair in explained for x in pair}:
            found[f"{', '.join(before)} -> {', '.join(here) or 'none'}"] = None
    if not found and not explained and saved.constants != now.constants:
        return ["constants: those of some parameters have changed"]
    return [f"constant {text}" for text in found]


def _related(before: str, here: str) -> set[tuple[str, str]]:
    """Returns the pairs of constants that a changed number x may cause: x, -x, 1 - x, x - 1."""
    try:
        a, b = float(before), float(here)
    except ValueError:
        return set()
    pairs = (a, b), (-a, -b), (1 - a, 1 - b), (a - 1, b - 1)
    return {(_text(np.float32(x)), _text(np.float32(y))) for x, y in pairs}


# -- names -------------------------------------------------------------------------------------


def parts_of(optimizer: optax.GradientTransformation) -> Sequence[optax.GradientTransformation]:
    """Returns the transformations of an `optax.chain` in order, or the optimizer alone."""
    inits = closure_of(optimizer.init).get("init_fns")
    updates = closure_of(optimizer.update).get("update_fns")
    if not (inits and updates and len(inits) == len(updates)):
        return [optimizer]
    return [
        optax.GradientTransformationExtraArgs(init, update)
        for init, update in zip(inits, updates, strict=True)
    ]


def name_of(optimizer: optax.GradientTransformation) -> str:
    """Returns the name of a transformation in optax, such as `chain(scale_by_adam, scale)`."""
    if len(parts := parts_of(optimizer)) > 1:
        return f"chain({', '.join(map(name_of, parts))})"
    update: Any = optimizer.update
    inner = closure_of(update).get("tx")
    if inner is not None:
        update = inner.update
    return str(getattr(update, "__qualname__", type(optimizer).__name__)).split(".")[0]


def _named(optimizer: optax.GradientTransformation) -> dict[str, str]:
    """Returns the numbers, flags and texts in the closures of an optimizer's functions."""

    def follows(function: Any) -> bool:  # injected hyperparameters are in the optimizer's state
        return "inner_factory" not in closure_of(function)

    found: dict[str, str] = {}
    seen: set[int] = set()  # `init` and `update` share variables
    for function in reachable_functions((optimizer.init, optimizer.update), follows=follows):
        cells = getattr(function, "__closure__", None) or ()
        owner = str(getattr(function, "__qualname__", "")).split(".")[0]
        values = closure_of(function) if follows(function) else {}
        for (name, value), cell in zip(values.items(), cells, strict=False):
            is_plain = isinstance(value, (bool, int, float, str))
            if id(cell) in seen or not is_plain or len(found) >= _MOST_NUMBERS:
                continue
            seen.add(id(cell))
            number = 1 + sum(known.split(" ")[0] == f"{owner}.{name}" for known in found)
            text = value[:60] if isinstance(value, str) else _text(value)
            found[f"{owner}.{name}" + (f" ({number})" if number > 1 else "")] = text
    return found


def _of_arguments(name: str, arguments: Mapping[str, Any]) -> OptimizerRecord:
    """Returns the record of an optimizer of Keras: its class, and the numbers of its arguments."""
    rate = {n: x for n, x in arguments.items() if n.startswith("learning_rate.")}
    rest = {n: x for n, x in arguments.items() if n not in rate}

    def structure(values: Mapping[str, Any]) -> str:
        kinds = {n: "number" if _is_number(x) else repr(x) for n, x in values.items()}
        return _digest("keras", *(f"{n}={x}" for n, x in sorted(kinds.items())))

    named = {n: _text(x) if _is_number(x) else str(x) for n, x in arguments.items()}
    schedule = structure(rate) if rate else ""
    return OptimizerRecord(name, _digest(name, structure(rest)), schedule, named=named)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) and not isinstance(value, bool)


# -- the update --------------------------------------------------------------------------------


def _representatives(params: PyTree) -> PyTree:
    """Returns the first and the last of the parameters whose paths differ in numbers only.

    The others are None.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, leaf in named_leaves(params).items():
        groups.setdefault((re.sub(r"\d+", "#", name), leaf.shape, str(leaf.dtype)), []).append(name)
    kept = {name for group in groups.values() for name in (group[0], group[-1])}
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if path_name(path) in kept else None, params
    )


def _trace(optimizer: optax.GradientTransformation, params: PyTree) -> "_Reader":
    """Traces an update of these parameters, and reads its jaxpr."""
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    state = jax.eval_shape(optimizer.init, params)

    def update(gradients: PyTree, state: PyTree, params: PyTree, value: jax.Array) -> PyTree:
        def loss(params: PyTree) -> jax.Array:
            return sum((x.sum() for x in jax.tree.leaves(params)), jnp.zeros_like(value))

        extra = ExtraArguments(value, gradients, loss, lambda params, _: params)
        return update_with(optimizer, gradients, state, params, extra)

    value = jax.ShapeDtypeStruct((), np.float32)
    jaxpr, shapes = jax.make_jaxpr(update, return_shape=True)(params, state, params, value)
    names = set(named_leaves(params))
    inputs = [_Value.given("gradient", True)] * len(names)
    inputs += [_state_value(name, x, names) for name, x in named_leaves(state).items()]
    inputs += [_Value.given("parameter", True)] * len(names) + [_Value.given("loss", True)]
    reader = _Reader()
    reader.read(jaxpr.jaxpr, jaxpr.consts, inputs, list(named_leaves(shapes)))
    return reader


class _Value(NamedTuple):
    """A value of an update.

    Attributes:
      digest: The digest of how it is computed, whatever the constants and shapes.
      is_update: Whether it is computed from gradients, parameters or arrays of the state, as
        opposed to counters and constants.
      exact: The digest with the constants.
    """

    digest: str
    is_update: bool
    exact: str

    @classmethod
    def given(cls, name: str, is_update: bool) -> "_Value":
        return cls(name, is_update, name)

    @classmethod
    def constant(cls, dtype: Any, number: Any) -> "_Value":
        return cls(f"constant {dtype}", False, _text(number))


def _state_value(name: str, leaf: Any, params: Iterable[str]) -> _Value:
    """Returns the value of an array of the optimizer's state, without its parameter's path."""
    parts = name.split("/")
    tails = ("/".join(parts[start:]) for start in range(len(parts)))
    owner = next((tail for tail in tails if tail in params), None)
    slot = name if owner is None else name.removesuffix(owner)
    return _Value.given(f"state {slot} {leaf.dtype}", owner is not None or leaf.ndim > 0)


class _Reader:
    """A reader of the jaxpr of an update; `numbers` and `constants` are as in `OptimizerRecord`."""

    def __init__(self) -> None:
        self.numbers: dict[str, list[str]] = {}
        self.constants = ""
        self._results: set[str] = set()
        self._counted: set[str] = set()
        self._tables = 0

    @property
    def kind(self) -> str:
        """Digest of the values that the update computes."""
        return _digest(*sorted(self._results))

    @property
    def schedule(self) -> str:
        """Digest of the values that the update uses and that are computed from counters."""
        return _digest(*sorted(self._counted))

    def read(
        self,
        jaxpr: Any,
        constants: Sequence[Any],
        inputs: Sequence[_Value],
        outputs: Sequence[str],
    ) -> None:
        """Reads the whole update, whose results have the paths `outputs`."""
        results = dict(zip(outputs, self._values(jaxpr, constants, inputs), strict=True))
        self._results = {f"{name} {x.digest}" for name, x in results.items() if x.is_update}
        self.constants = _digest(*sorted(f"{name} {x.exact}" for name, x in results.items()))

    def _values(
        self, jaxpr: Any, constants: Sequence[Any], inputs: Sequence[_Value]
    ) -> list[_Value]:
        """Returns the values of the results of a jaxpr."""
        known: dict[Any, _Value] = dict(zip(jaxpr.invars, inputs, strict=True))
        for variable, constant in zip(jaxpr.constvars, constants, strict=True):
            self._tables += 1
            known[variable] = _Value.constant(variable.aval.dtype, constant)
            self._add(f"table {self._tables}", constant)

        def value(atom: Any) -> _Value:
            if hasattr(atom, "val"):
                return _Value.constant(atom.aval.dtype, atom.val)
            return known[atom]

        for equation in jaxpr.eqns:
            operands = [value(atom) for atom in equation.invars]
            literals = {n: x.val for n, x in enumerate(equation.invars) if hasattr(x, "val")}
            known.update(
                zip(equation.outvars, self._apply(equation, operands, literals), strict=True)
            )
        return [value(atom) for atom in jaxpr.outvars]

    def _apply(
        self, equation: Any, operands: Sequence[_Value], literals: Mapping[int, Any]
    ) -> list[_Value]:
        """Returns the values of the results of an equation."""
        name = equation.primitive.name
        is_update = any(x.is_update for x in operands)
        shown = [x.digest if x.is_update or not is_update else "counted" for x in operands]
        if is_update:
            self._counted |= {
                x.digest for n, x in enumerate(operands) if not x.is_update and n not in literals
            }
        operation = _digest(name, _parameters(equation.params))
        place = _digest(operation, *shown)
        for number, literal in literals.items():
            self._add(f"{place} {number}", literal)
        inner = list(inner_programs(equation))
        if name in _CALLS and len(inner[0][0].invars) == len(operands):
            return self._values(*inner[0], operands)
        parts = [place]
        exact = [operation, str(equation.params.get("length", "")), *(x.exact for x in operands)]
        if "length" in equation.params:
            self._add(f"{place} length", equation.params["length"])
        for program in () if name in _PER_DEVICE else inner:
            given: Sequence[_Value] = operands[1:]
            if name != "cond":
                count = len(program[0].invars)
                given = [_Value.given(f"{name} {n}", is_update) for n in range(count)]
            results = self._values(*program, given)
            is_update |= any(x.is_update for x in results)
            parts += [x.digest for x in results]
            exact += [x.exact for x in results]
        whole, with_constants = _digest(*parts), _digest(*exact)
        return [
            _Value(
                _digest(whole, f"{n} {getattr(x.aval, 'dtype', '')}"),
                is_update,
                f"{with_constants} {n}",
            )
            for n, x in enumerate(equation.outvars)
        ]

    def _add(self, place: str, number: Any) -> None:
        if place in self.numbers or len(self.numbers) < _MOST_NUMBERS:
            texts = self.numbers.setdefault(place, [])
            if (text := _text(number)) not in texts:
                texts.append(text)


def _parameters(parameters: Mapping[str, Any]) -> str:
    """Returns the text of the parameters of an operation that say what it computes."""
    return " ".join(
        f"{name}={_plain(value)}"
        for name, value in sorted(parameters.items())
        if not _LEFT_OUT.search(name)
    )


def _plain(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"({','.join(map(_plain, value))})"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    return str(value) if isinstance(value, np.dtype) else type(value).__name__


def _text(number: Any) -> str:
    """Returns a number with the digits of its precision; the digest of a large array."""
    if isinstance(number, bool):
        return str(number)
    if not isinstance(number, (int, float)):
        if not getattr(number, "is_fully_addressable", True) or not hasattr(number, "dtype"):
            return type(number).__name__
        if jnp.issubdtype(number.dtype, jax.dtypes.extended):
            return str(number.dtype)
        array = np.asarray(number)
        if array.size > _LARGEST_TABLE:
            return f"{array.dtype}{list(array.shape)} {_digest(array.tobytes())}"
        if array.ndim:
            return f"[{', '.join(map(_text, array.ravel()))}]"
        number = array.item() if array.dtype != np.float32 else np.float32(array)
    if isinstance(number, (int, np.integer)):
        return str(int(number))  # of JAX' own class of literals, too
    return f"{float(number):.7g}" if isinstance(number, (float, np.floating)) else str(number)


def _digest(*parts: str | bytes) -> str:
    content = hashlib.blake2b(digest_size=6)
    for part in parts:
        content.update(part.encode() if isinstance(part, str) else part)
        content.update(b"\0")
    return content.hexdigest()
