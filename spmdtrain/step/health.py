"""Norms of a step, and checks of its loss and state for NaN and infinity."""

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import Placement
from spmdtrain.step.exact import FixedOrder
from spmdtrain.step.metrics import NORMS
from spmdtrain.tree import named_leaves
from spmdtrain.xla.jaxpr import recomputable

# -- Checks of a step's loss and state for NaN and infinity ----------------------------------------

PyTree = Any
FLAGS = ("loss", "params", "opt_state", "model_state")
"""The names of the flags that `finite_flags` returns."""


class Whole(Protocol):
    """The fields of a state, or of a parameter server's part of one."""

    @property
    def params(self) -> PyTree: ...

    @property
    def opt_state(self) -> PyTree: ...

    @property
    def model_state(self) -> PyTree: ...


def finite_flags(
    loss: jax.Array,
    before: Whole,
    after: Whole,
    places: Whole,
    *,
    is_last: jax.Array | None = None,
) -> jax.Array:
    """Returns whether each of `FLAGS` is finite after a step, bool (4,).

    `optax.apply_if_finite` checks gradients only, and skips their update; a run has to stop.

    Values that were infinite before are compared only if they may be infinite on purpose: reading
    the old parameters would prevent their update in place, a third of a small step's time.

    Within a dispatch of several steps on CPU, reading the optimizer's state takes a sixth of a
    small step's time. So its flag is computed only after the last step, because the states in
    between are never read, and after the first step whose loss or parameters are not finite.

    Args:
      loss: One or several numbers.
      places: The shardings of the state.
      is_last: A bool scalar, whether the step is the last one of a dispatch of several; None for a
        dispatch of one step.
    """

    def of_optimizer() -> jax.Array:
        return stays_finite(before.opt_state, after.opt_state, places.opt_state)

    of_loss = jnp.isfinite(loss).all()
    of_params = stays_finite(before.params, after.params, places.params)
    if is_last is not None and may_branch(places.opt_state):
        needed = is_last | ~of_loss | ~of_params
        of_state = jax.lax.cond(needed, of_optimizer, lambda: jnp.array(True))
    else:
        of_state = of_optimizer()
    of_model = stays_finite(
        before.model_state, after.model_state, places.model_state, arrays_too=True
    )
    return jnp.stack([of_loss, of_params, of_state, of_model])


def may_branch(places: PyTree | None) -> bool:
    """Returns whether a branch may reduce arrays: on CPUs, if every device has them whole.

    The reduction of split arrays needs an all-reduce. XLA's CPU client runs an all-reduce in a
    branch or loop concurrently with those outside, and not in the same order on all devices: its
    threads then wait in different all-reduces, until it aborts after 40 seconds. On GPUs a branch
    would make the host wait for the device, and XLA fuses the sums with the update.

    `places` has the shardings of all arrays; None if they are not known.
    """
    shardings = jax.tree.leaves(places)
    if not shardings or next(iter(shardings[0].device_set)).platform != "cpu":
        return False
    return all(sharding.is_fully_replicated for sharding in shardings)


def stays_finite(
    before: PyTree, after: PyTree, places: PyTree, *, arrays_too: bool = False
) -> jax.Array:
    """Returns whether no element became NaN or infinite, a bool scalar.

    A scalar that was infinite before may stay so (the best loss so far, for example); with
    `arrays_too` also elements of arrays (a mask). `places` has the shardings of the arrays.
    """
    flags, products = [], []
    for x, y, place in zip(*map(jax.tree.leaves, (before, after, places)), strict=True):
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            continue
        if arrays_too or y.ndim == 0:
            flags.append((jnp.isfinite(y) | (jnp.isinf(x) & ~jnp.isnan(y))).all())
        elif not uses_products(y, place):
            flags.append(jnp.isfinite(y).all())
        elif y.size > SMALL_ARRAY:
            rows = y.reshape(-1, y.shape[-1])
            products.append(rows @ jnp.zeros(y.shape[-1], y.dtype))
        else:
            products.append(y.ravel())
    # One reduction for all arrays: a reduction for each took most of the compile time of a model
    # with hundreds of arrays, and a fifth of its step's time.
    for dtype in dict.fromkeys(y.dtype for y in products):  # in the same order in each run
        values = jnp.concatenate([y for y in products if y.dtype == dtype])
        flags.append(jnp.isfinite(values @ jnp.zeros(values.size, dtype)))
    return jnp.array(flags).all()


SMALL_ARRAY = 2**14
"""The largest size of an array that takes next to no time to copy into one with many others."""


def uses_products(x: jax.Array, place: Sharding) -> bool:
    """Returns whether a product is the fastest check of an array.

    XLA:CPU compares elements one by one, which makes a step of a small network a quarter slower.
    The dot product with zeros is NaN if any element is not finite, and XLA:CPU vectorizes it.
    """
    device: Any = next(iter(place.device_set))
    whole, widths = place.is_fully_replicated, (jnp.float32, jnp.float64)
    return device.platform == "cpu" and whole and x.dtype in widths


def first_non_finite(tree: PyTree) -> str | None:
    """Returns the path of the first array that holds NaN or infinity; None if there is none."""
    for name, leaf in named_leaves(tree).items():
        if jnp.issubdtype(leaf.dtype, jnp.inexact) and not bool(jnp.isfinite(leaf).all()):
            return name
    return None


# -- L2 norms of the parameters, the gradients and the updates of a step ---------------------------

Changes = Callable[[], tuple[PyTree, PyTree]]
"""Returns the gradients of the mean loss and the optimizer's updates.

Both have None in place of frozen parameters.
"""
_SMALL = 2**26  # bytes of gradients
_FEW = 32  # arrays


def has_norms(step: Any, every: int) -> Any:
    """Returns whether a step has norms: the first, and each `every`-th.

    `step` is counted from 1; an integer or an array.
    """
    return (step == 1) | (step % every == 0)


def recomputes_changes(params: PyTree, layout: Layout) -> bool:
    """Returns whether the norms of gradients and updates are computed in a branch: on one CPU.

    The branch computes the updates again (`recomputable`), because otherwise XLA would write them
    to memory in every step. The gradients of all layers stay in memory until then, so networks have
    to be small. On several devices a branch that uses reduced gradients changes last bits of the
    update. Shapes of the parameters suffice.
    """
    places = layout.on_device.params
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
    single = all(len(place.device_set) == 1 for place in jax.tree.leaves(places))
    return single and size <= _SMALL and may_branch(places)


def global_norm(tree: PyTree, places: PyTree | None, *, by_rows: bool = False) -> jax.Array:
    """Returns the L2 norm of all elements of a tree, a float32 scalar.

    Sums are in float32, also those of 16-bit arrays. Leaves of integers do not count.
    `optax.global_norm` adds up a 16-bit leaf in 16 bits, and reduces element by element on CPUs.

    Args:
      tree: Arrays; None in place of those that do not count.
      places: The shardings of all arrays; None if they are not known.
      by_rows: Whether to add up the squares of whole arrays on a CPU by a product with ones. That
        takes half the time if the elements have yet to be computed.
    """

    def leaves_of(tree: PyTree) -> list[Any]:
        return jax.tree.leaves(tree, is_leaf=lambda x: x is None)

    leaves = leaves_of(tree)
    known = [None] * len(leaves) if places is None else leaves_of(places)
    pairs = [
        ((jnp.abs(x) if jnp.iscomplexobj(x) else x).astype(jnp.float32), place)
        for x, place in zip(leaves, known, strict=True)
        if x is not None and jnp.issubdtype(x.dtype, jnp.inexact)
    ]
    # Many small arrays are added up as one: with a product for each of some hundred, their
    # compilation took most of the time until the first step.
    small, apart, squares = [], [], []
    for x, place in pairs:
        if x.size <= SMALL_ARRAY and _uses_products(x, place):
            small.append(x.ravel())
        else:
            apart.append((x, place))
    if len(small) > _FEW:
        joined = jnp.concatenate(small)
        pairs, squares = apart, [joined @ joined]
    squares += [_square(x, place, by_rows=by_rows) for x, place in pairs]
    return jnp.sqrt(sum(squares, start=jnp.zeros((), jnp.float32)))


def _uses_products(x: jax.Array, place: Sharding | None) -> bool:
    """Returns whether the squares of an array are added up by a product."""
    return place is not None and uses_products(x, place)  # of a split array it would need all


def _square(x: jax.Array, place: Sharding | None, *, by_rows: bool) -> jax.Array:
    """Returns the sum of the squares of the elements, a float32 scalar."""
    if _uses_products(x, place):
        if by_rows and x.ndim and x.size:
            rows = jnp.square(x).reshape(-1, x.shape[-1])
            return (rows @ jnp.ones(x.shape[-1], x.dtype)).sum()
        flat = x.ravel()
        return flat @ flat
    return jnp.square(x).sum()


# -- Norms and finite flags of a step in the same pass as the optimizer's update, on TPUs ----------
#
# A pass over the parameters for each norm and each flag takes as long as the update itself: for
# GPT-2 small on v5e, the compiler estimates 14 ms for update, norms and flags, and 5 ms for the
# update alone. XLA fuses up to three sums of numbers into the pass of the update, if they are
# computed beside it (see `recomputable`), and no reduction of truth values. So a flag is a sum of
# products with 0, which is NaN if an element is not finite.


class Found(Protocol):
    """The first result of an update."""

    @property
    def state(self) -> Any: ...


Watched = TypeVar("Watched", bound=Found)


@dataclass(frozen=True)
class FusedChecks:
    """The norms of a step, and sums that show whether its state is finite.

    Attributes:
      norms: The norms of `metrics.NORMS`, float32 (3,).
      of_params: NaN if a parameter is not finite.
      of_optimizer: NaN if an array of the optimizer's state that has the shape of its parameter is
        not finite.
      others: Names of the other leaves of the optimizer's state.
    """

    norms: jax.Array
    of_params: jax.Array
    of_optimizer: jax.Array
    others: frozenset[str]

    def flags(self, loss: jax.Array, before: Whole, after: Whole, places: Whole) -> jax.Array:
        """Returns whether each of `FLAGS` is finite; arguments as of `finite_flags`."""

        def selected(tree: PyTree) -> list[Any]:
            return [x for name, x in named_leaves(tree).items() if name in self.others]

        states = (before.opt_state, after.opt_state, places.opt_state)
        of_others = stays_finite(*map(selected, states))
        of_model = stays_finite(
            before.model_state, after.model_state, places.model_state, arrays_too=True
        )
        of_state = ~jnp.isnan(self.of_optimizer) & of_others
        flags = [jnp.isfinite(loss).all(), ~jnp.isnan(self.of_params), of_state, of_model]
        return jnp.stack(flags)


def fused_evaluation(
    updated: Callable[..., tuple[Watched, tuple[PyTree, PyTree]]], *args: PyTree
) -> tuple[Watched, FusedChecks]:
    """Returns the result of an update, and its checks.

    `updated(*args)` returns an object with the new `state`, and (gradients, updates), which hold
    None in place of frozen parameters.
    """

    def extended(*args: PyTree) -> tuple[Any, PyTree]:
        found, (gradients, updates) = updated(*args)
        state = found.state
        return (found, gradients), (state.params, state.opt_state, updates)

    (found, gradients), again = recomputable(extended, *args, beside=True)
    params, opt_state, updates = again()
    of_params, of_updates = named_leaves(params), named_leaves(updates)
    of_state = {n: x for n, x in named_leaves(opt_state).items() if _is_checked(x)}
    owners = {name: _owner(name, x, of_params) for name, x in of_state.items()}
    zero = jnp.zeros((), jnp.float32)
    squares, changes, states = zero, zero, zero
    for name, value in of_params.items():
        if not _is_checked(value):
            continue
        wide = _wide(value)
        squares += jnp.square(wide).sum()
        update = of_updates.get(name)
        change = 0 * wide if update is None else jnp.square(_wide(update)) + 0 * wide
        changes += change.sum()
        if own := [_wide(x) for other, x in of_state.items() if owners[other] == name]:
            states += sum((0 * x for x in own), start=jnp.zeros_like(own[0])).sum()
    norms = jnp.stack([jnp.sqrt(squares), global_norm(gradients, None), jnp.sqrt(changes)])
    others = {name for name in named_leaves(opt_state) if owners.get(name) is None}
    return found, FusedChecks(norms, changes, states, frozenset(others))


def _is_checked(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _owner(name: str, x: Any, params: dict[str, Any]) -> str | None:
    """Returns the parameter of the shape of `x` whose path ends the path `name`, if any."""
    parts = name.split("/")
    ends = ("/".join(parts[start:]) for start in range(len(parts)))
    return next((end for end in ends if end in params and params[end].shape == x.shape), None)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)


# -- The health of a step: its finite flags and norms, where the platform computes them fastest ----


class NormsPass(enum.Enum):
    """The place in a step where the norms of its gradients and updates are computed."""

    AFTER = "after the update"
    IN_BRANCH = "in a branch of the logged steps, which computes the updates again"
    IN_UPDATE = "in the pass of the update"


@dataclass(frozen=True)
class Health:
    """The finite flags and the norms of a step.

    Attributes:
      log_every: The cadence of the log. On CPUs, where a pass over all parameters is a tenth of the
        step of a small network, steps that are not logged skip the norms (see `may_branch`).
      order: The order of the sums of norms; None if it may depend on the devices.
      is_traced: Whether the step may be traced again. Without `jit` the user's code sees values.
    """

    layout: Layout
    log_every: int
    norms_pass: NormsPass = NormsPass.AFTER
    order: FixedOrder | None = None
    is_traced: bool = True

    @classmethod
    def choose(
        cls,
        layout: Layout,
        placement: Placement,
        params: PyTree,
        log_every: int,
        *,
        order: FixedOrder | None,
        jit: bool,
    ) -> "Health":
        """Returns the fastest way for abstract parameters."""
        norms_pass = NormsPass.AFTER
        if order is None and recomputes_changes(params, layout):
            norms_pass = NormsPass.IN_BRANCH
        elif order is None and jit and placement.devices[0].platform == "tpu":
            is_complex = any(jnp.iscomplexobj(x) for x in jax.tree.leaves(params))
            norms_pass = NormsPass.AFTER if is_complex else NormsPass.IN_UPDATE
        return cls(layout, log_every, norms_pass, order, is_traced=jit)

    def watched(
        self, update: Callable[[Any, PyTree], tuple[Watched, tuple[PyTree, PyTree]]]
    ) -> Callable[[Any, PyTree], tuple[Watched, Any]]:
        """Returns an update whose second result is what `of_step` needs to know its changes.

        `update` is a function (state, batch) -> (result, (gradients, updates)); the last two hold
        None in place of frozen parameters.
        """
        if self.norms_pass is NormsPass.IN_UPDATE:
            return partial(fused_evaluation, update)
        if self.norms_pass is NormsPass.IN_BRANCH and self.is_traced:
            return partial(recomputable, update)
        return update

    def of_step(
        self,
        before: Any,
        after: Any,
        loss: jax.Array,
        changes: Any = None,
        is_last: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the finite flags and the norms of a step.

        The norms are those of `NORMS`, float32 (3,), or (1,) without `changes`.

        Args:
          before: The state before the update; other arguments as of `finite_flags`.
          changes: The second result of the watched update; None if it is not known.
        """
        places = self.layout.shardings
        if isinstance(changes, FusedChecks):
            return changes.flags(loss, before, after, places), changes.norms
        flags = finite_flags(loss, before, after, places, is_last=is_last)
        known = changes if changes is None or callable(changes) else lambda: changes
        return flags, self._norms(after.params, after.step, known)

    def _norms(self, params: PyTree, step: jax.Array, changes: Changes | None) -> jax.Array:
        if self.order is not None:
            order, trees = self.order, (params, *(() if changes is None else changes()))
            return jnp.stack([order.evaluate(lambda x: global_norm(x, None), x) for x in trees])
        places = self.layout.on_device.params
        places_of_changes = None if self.layout.splits_gradients else places
        needed = has_norms(step, self.log_every)

        def of_params() -> jax.Array:
            return global_norm(params, places)

        def of_changes(*, by_rows: bool = False) -> list[jax.Array]:
            trees = () if changes is None else changes()
            return [global_norm(tree, places_of_changes, by_rows=by_rows) for tree in trees]

        def in_branch() -> jax.Array:
            return jnp.stack([of_params(), *of_changes(by_rows=True)])

        if self.norms_pass is NormsPass.IN_BRANCH:
            return jax.lax.cond(needed, in_branch, lambda: jnp.zeros(len(NORMS), jnp.float32))
        if may_branch(places):
            norm = jax.lax.cond(needed, of_params, lambda: jnp.zeros((), jnp.float32))
        else:
            norm = of_params()
        return jnp.stack([norm, *of_changes()])
