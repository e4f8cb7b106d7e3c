"""Paths of pytree leaves, and leaves as NumPy arrays."""

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the path of a leaf, such as `params/hidden/0/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns the leaves by path, in the order of `jax.tree.leaves`."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}


def leaves_by_path(tree: Any, paths: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of a tree of any library with the paths that a model has for them.

    A tree may have its parameters below `params`, and Flax's boxes and variables hold arrays below
    `value`. A leaf whose path is not among `paths` has its own.
    """
    known = frozenset(paths)
    for name, leaf in named_leaves(tree).items():
        inner = name.removeprefix("params/").removeprefix("model_state/")
        ways = (name, inner, *(way.removesuffix("/value") for way in (name, inner)))
        yield next((way for way in ways if way in known), name), leaf


def with_own_containers(tree: Any) -> Any:
    """Returns the leaves in new containers: a user's function may change those it is given."""
    return jax.tree.map(lambda leaf: leaf, tree)


def is_key(leaf: Any) -> bool:
    """Returns whether a leaf is an array of typed random keys, which have no ordinary dtype."""
    return hasattr(leaf, "dtype") and bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def in_dtype_of(leaf: Any, like: Any) -> Any:
    """Returns a leaf in the dtype of another one; a random key, which has only one, as it is."""
    return leaf if is_key(like) else leaf.astype(like.dtype)


def promoted(first: Any, second: Any) -> np.dtype[Any]:
    """Returns the dtype that holds values of both dtypes, for any `jax_numpy_dtype_promotion`."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(jnp.promote_types(first, second))


def as_numpy(x: np.ndarray) -> np.ndarray:
    """Returns an array in a dtype that `.npy` files support: float32 instead of bfloat16 etc."""
    return x if x.dtype.isbuiltin == 1 else x.astype(np.float32)
