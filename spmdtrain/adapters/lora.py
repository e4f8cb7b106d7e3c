"""Low-rank adaptation (LoRA) of a model of any library."""

import copy
import math
import re
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.adapters.as_adapter import as_adapter
from spmdtrain.adapters.base import (
    Adapter,
    FreezesState,
    Function,
    HasModes,
    Mode,
    Variables,
    annotations_of,
)
from spmdtrain.errors import UserError
from spmdtrain.sharding.rules import Annotation, DimsOf
from spmdtrain.tree import named_leaves, path_name, promoted

PyTree = Any

FACTORS = "lora"
"""The name under which the parameters contain the factors of all kernels."""
_TRAINED = "(?!.*(?:{}))"  # after `^`: not the paths that a pattern matches


@dataclass(frozen=True)
class LoraRule:
    """The kernels that get low-rank factors, and which of their dims are the input.

    The dims of a kernel are `stacked` dims, `inputs` dims, and output dims, in this order.
    A dense kernel (in, out) has one input dim. A convolution (height, width, in, out) has three. A
    kernel (layers, in, heads, size) of stacked layers has one, behind one stacked dim: each layer
    gets factors of its own.

    Attributes:
      pattern: A regular expression that may match anywhere in a parameter's path. Parameters of
        fewer than 2 dims, such as biases, are left out.
      inputs: Number of input dims; needed for kernels of more than 2 dims.
      stacked: Number of leading dims of stacked layers.

    Raises:
      UserError: If the pattern or a number is not valid.
    """

    pattern: str
    inputs: int | None = None
    stacked: int = 0

    def __post_init__(self) -> None:
        _check_pattern(self.pattern)
        valid = _is_count(self.stacked, least=0)
        if not valid or not (self.inputs is None or _is_count(self.inputs)):
            raise UserError(
                f"LoRA: {self.pattern!r} has inputs={self.inputs!r} and stacked={self.stacked!r}: "
                "a kernel has at least 1 input dim, and 0 or more stacked dims"
            )

    def input_dims(self, name: str, shape: Sequence[int]) -> range:
        """Returns the input dims of a kernel.

        Args:
          name: Its path.
          shape: Its shape.

        Raises:
          UserError: If the rule does not say which dims they are, or leaves none to the output.
        """
        if self.inputs is None and len(shape) > 2:
            raise UserError(
                f"LoRA: {name} has shape {tuple(shape)}, {len(shape)} dims: say which of them are "
                f"the input, LoraRule({self.pattern!r}, inputs=..., stacked=...)"
            )
        end = self.stacked + (self.inputs or 1)
        if end >= len(shape):
            raise UserError(
                f"LoRA: {name} has shape {tuple(shape)}, and {self.stacked} stacked and "
                f"{self.inputs or 1} input dims leave none for the output: change the rule "
                f"{self.pattern!r}"
            )
        return range(self.stacked, end)


class LoraModel:
    """A model with frozen parameters, and trained low-rank factors for some of its kernels.

    The model computes with `W + alpha / rank * A @ B` in place of a kernel W. `A` is normal with
    variance 1 / inputs and `B` is 0, so that training starts from the loss of the base model
    (Hu et al. 2021, https://arxiv.org/abs/2106.09685). The parameters are the base model's, under
    their own paths, and `lora/PATH/a` and `lora/PATH/b` for each kernel PATH. A dim that a factor
    shares with its kernel is sharded like the kernel's. Batch statistics are frozen as well.

    Args:
      model: The base model: what a `Trainer` takes. `init_from` gives its values.
      kernels: The kernels with factors: regular expressions, or `LoraRule`.
      rank: The size of the dim between A and B.
      alpha: The product is multiplied by `alpha / rank`.
      train: One or several regular expressions of parameters that are trained themselves (a new
        head).

    Attributes:
      frozen: Regular expressions of the variables that are not trained.
      derived: The dims that each factor shares with its kernel, by path in the state; known after
        `init`.
      annotations: The annotations of the base model by path in the state; known after `init`.
      modes: The modes of the base model's layers (see `HasModes`).

    Raises:
      UserError: If an argument is wrong.
    """

    def __init__(
        self,
        model: Any,
        kernels: str | LoraRule | Sequence[str | LoraRule],
        *,
        rank: int = 8,
        alpha: float = 16.0,
        train: str | Sequence[str] = (),
    ) -> None:
        if not _is_count(rank):
            raise UserError(f"LoRA: rank is {rank!r}: it must be an integer above 0")
        if not _is_number(alpha) or not 0 < alpha < math.inf:
            raise UserError(f"LoRA: alpha is {alpha!r}: it must be a finite number above 0")
        self.base: Adapter = as_adapter(model)
        self.given: PyTree = self.base.given
        self.rules = tuple(
            rule if isinstance(rule, LoraRule) else LoraRule(rule)
            for rule in _several("kernels", kernels, (str, LoraRule))
        )
        if not self.rules:
            raise UserError("LoRA: kernels is empty: give a regular expression of kernels' paths")
        self._train = _several("train", train, (str,))
        for pattern in self._train:
            _check_pattern(pattern, _TRAINED)
        self.rank, self.alpha = int(rank), float(alpha)
        others = "".join(map(_TRAINED.format, self._train))
        self.frozen: Sequence[str] = (f"^(?!{FACTORS}/){others}",)
        self.derived: dict[str, DimsOf] = {}
        self.annotations: Mapping[str, Annotation] = {}
        self.modes: Mapping[str, bool] = {}

    def init(self, given: PyTree, key: jax.Array) -> Variables:
        params, model_state = self.base.init(given, key)
        self.annotations = annotations_of(self.base)
        self.modes = self.base.modes if isinstance(self.base, HasModes) else {}
        if not isinstance(params, Mapping) or FACTORS in params:
            raise UserError(
                "LoRA: the base model's parameters must be a dictionary without the name "
                f"{FACTORS!r}, and are {_shown(params)}"
            )
        leaves = named_leaves(params)
        for pattern in self._train:
            if not any(re.search(pattern, name) for name in leaves):
                raise UserError(
                    f"LoRA: train={pattern!r} matches no parameter's path: {list(leaves)}"
                )
        factors: dict[str, Any] = {}
        derived: dict[str, DimsOf] = {}
        for name, (kernel, inputs) in self._kernels(leaves).items():
            end, dims = inputs.stop, tuple(range(kernel.ndim))
            dtype = promoted(kernel.dtype, jnp.float32)
            own = jax.random.fold_in(key, zlib.crc32(name.encode()))
            a = jax.random.normal(own, (*kernel.shape[:end], self.rank), dtype)
            a = a / math.sqrt(math.prod(kernel.shape[d] for d in inputs))
            stacked = kernel.shape[: inputs.start]
            b = jnp.zeros((*stacked, self.rank, *kernel.shape[end:]), dtype)
            place = factors
            for part in name.split("/"):
                place = place.setdefault(part, {})
            place |= {"a": a, "b": b}
            at = f"params/{FACTORS}/{name}"
            derived[f"{at}/a"] = DimsOf(f"params/{name}", (*dims[:end], None))
            derived[f"{at}/b"] = DimsOf(
                f"params/{name}", (*dims[: inputs.start], None, *dims[end:])
            )
        # At once: another thread may trace a step meanwhile, which asks `is_operand`.
        self.derived = derived
        return Variables({**params, FACTORS: factors}, model_state)

    def _kernels(self, leaves: Mapping[str, Any]) -> dict[str, tuple[Any, range]]:
        """Returns the kernels with factors and their input dims, by path."""
        found: dict[str, tuple[Any, range]] = {}
        for rule in self.rules:
            matches = [
                name
                for name, leaf in leaves.items()
                if re.search(rule.pattern, name)
                and leaf.ndim > rule.stacked + 1
                and jnp.issubdtype(leaf.dtype, jnp.floating)
            ]
            if not matches:
                raise UserError(
                    f"LoRA: {rule.pattern!r} matches no kernel of 2 or more dims among "
                    f"{list(leaves)}"
                )
            for name in matches:
                inputs = rule.input_dims(name, leaves[name].shape)
                found.setdefault(name, (leaves[name], inputs))
        return found

    def run(
        self, function: Function, variables: Variables, batch: PyTree, key: jax.Array, mode: Mode
    ) -> tuple[PyTree, PyTree]:
        params = self.base_params(variables.params)
        return self.base.run(function, variables._replace(params=params), batch, key, mode)

    def merge(self, variables: Variables) -> Any:
        return self.base.merge(variables._replace(params=self.base_params(variables.params)))

    def is_operand(self, name: str) -> bool:
        """Returns whether a parameter is a factor, or a kernel with factors.

        Args:
          name: Its path.
        """
        return f"params/{name}" in self.derived or f"params/{FACTORS}/{name}/a" in self.derived

    def base_params(self, params: PyTree) -> PyTree:
        """Returns the parameters of the base model, with the products added to their kernels.

        Args:
          params: The parameters; None in place of all operands or of all others.
        """
        # The default precision of a GPU would round the product to fewer bits than a merged export.
        einsum = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
        return merge_factors(params, self.alpha, einsum)

    def layer_path(self, name: str) -> str:
        """Returns the path in the model's layers of a leaf of the model state.

        Args:
          name: The path of the leaf in the model state.
        """
        return self.base.layer_path(name) if isinstance(self.base, FreezesState) else name

    def with_frozen_state(self, names: Collection[str]) -> "LoraModel":
        """Returns a copy whose batch normalizations use their stored statistics in training.

        Args:
          names: Paths in the model state of the statistics that are frozen.
        """
        frozen = copy.copy(self)
        if isinstance(self.base, FreezesState):
            frozen.base = self.base.with_frozen_state(names)
        return frozen


def merge_factors(params: Mapping[str, Any], alpha: float, einsum: Callable[..., Any]) -> Any:
    """Returns the parameters of the base model with `alpha / rank * A @ B` added to its kernels.

    They have the paths of the base model and their dtypes.

    Args:
      params: The parameters of a `LoraModel`, JAX or NumPy arrays.
      einsum: `jnp.einsum` or `np.einsum`.
    """
    factors = named_leaves(params[FACTORS])

    def merged(path: tuple[Any, ...], kernel: Any) -> Any:
        name = path_name(path)
        if (a := factors.get(f"{name}/a")) is None:
            return kernel
        b = factors[f"{name}/b"]
        stacked = a.ndim + b.ndim - 2 - kernel.ndim
        letters = "abcdefghijklmnopqrstuvwxy"[: kernel.ndim]
        end = a.ndim - 1
        product = einsum(f"{letters[:end]}z,{letters[:stacked]}z{letters[end:]}->{letters}", a, b)
        product = alpha / a.shape[-1] * product
        return (kernel.astype(product.dtype) + product).astype(kernel.dtype)

    base = {name: tree for name, tree in params.items() if name != FACTORS}
    return jax.tree_util.tree_map_with_path(merged, base)


def _several(what: str, given: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    """Returns the patterns or rules of an argument that may be a single one."""
    if isinstance(given, kinds):
        return (given,)
    names = " or ".join(kind.__name__ for kind in kinds)
    if not isinstance(given, Sequence) or not all(isinstance(x, kinds) for x in given):
        raise UserError(f"LoRA: {what} is {given!r}: it must be a {names}, or a list of them")
    return tuple(given)


def _check_pattern(pattern: Any, form: str = "{}") -> None:
    """Raises `UserError` if a pattern, inserted into `form`, is not a regular expression."""
    if not isinstance(pattern, str):
        raise UserError(f"LoRA: {pattern!r} is a {type(pattern).__name__}: give a str")
    try:
        re.compile(form.format(pattern))
    except re.error as error:
        raise UserError(f"LoRA: {pattern!r} is not a regular expression: {error}") from error


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _is_count(value: Any, *, least: int = 1) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def _shown(params: PyTree) -> str:
    names = sorted(params) if isinstance(params, Mapping) else None
    return f"a {type(params).__name__}" + (f" of {names}" if names else "")
