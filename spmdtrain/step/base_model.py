"""The frozen base model of a run that trains low-rank factors."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from spmdtrain.adapters.base import Adapter, ExtendsBase, Variables
from spmdtrain.step.optimizer import matches_any, merge
from spmdtrain.step.state import TrainState
from spmdtrain.tree import path_name

PyTree = Any


@dataclass(frozen=True)
class BaseModel:
    """The variables of the state that belong to a frozen base model.

    Checkpoints leave them out if `init_from` gives their values, because a resume reads them there.

    Attributes:
      patterns: Regular expressions of their paths in the model.
      alpha: The scale of the low-rank factors.
      added: Paths in the model of the parameters that a file of the base model does not have.
      is_saved: Whether checkpoints contain the base model.
    """

    patterns: Sequence[str]
    alpha: float
    added: frozenset[str]
    is_saved: bool

    @classmethod
    def of(cls, adapter: Adapter, *, is_saved: bool) -> "BaseModel | None":
        """Returns the base model of an adapter whose `init` was traced; None if it has none."""
        if not isinstance(adapter, ExtendsBase):
            return None
        added = frozenset(name.partition("/")[2] for name in adapter.derived)
        return cls(tuple(adapter.frozen), adapter.alpha, added, is_saved)

    def saved_part(self, state: TrainState) -> TrainState:
        """Returns a state with None in place of the leaves that checkpoints leave out."""
        return state if self.is_saved else self.without_base(state)

    def without_base(self, state: TrainState) -> TrainState:
        """Returns a state, or its shapes or shardings, with None in place of the base model."""
        return dataclasses.replace(
            state,
            params=self._part(state.params, base=False),
            averaged=self._part(state.averaged, base=False),
            model_state=self._part(state.model_state, base=False),
        )

    def values(self, variables: Variables) -> Variables:
        """Returns variables with None in place of all that are not of the base model."""
        return Variables(*(self._part(tree, base=True) for tree in variables))

    def _part(self, tree: PyTree, *, base: bool) -> PyTree:
        return jax.tree_util.tree_map_with_path(
            lambda path, x: x if matches_any(self.patterns, path_name(path)) == base else None, tree
        )


def with_base(variables: Variables, base: Variables) -> Variables:
    """Joins the variables of a checkpoint without base model with those of the base model."""

    def joined(own: PyTree, of_base: PyTree) -> PyTree:
        return merge(own, of_base) if jax.tree.leaves(own) else of_base

    return Variables(*map(joined, variables, base))
