"""The loss of a step's batch as a function of the parameters, for optimizers that evaluate it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from spmdtrain.sharding.layout import Layout
from spmdtrain.step.fixed_order import exist
from spmdtrain.step.gradients import Gradients
from spmdtrain.step.optimizer import Update, merge

PyTree = Any


@dataclass(frozen=True)
class BatchLoss:
    """The weighted mean loss of one global batch, at parameters that an optimizer chooses.

    Each evaluation starts from the same model state and the same random key as the step, so only
    the parameters differ. The model state after it is discarded.

    Attributes:
      model_state: The model state before the batch.
      before: Results of the step that have to be complete before an evaluation (see `_after`).
    """

    gradients: Gradients
    update: Update
    layout: Layout
    frozen: PyTree
    model_state: PyTree
    batch: PyTree
    key: jax.Array
    before: Sequence[jax.Array]

    def value(self, params: PyTree) -> jax.Array:
        """Returns the loss at these trained parameters, a scalar that can be differentiated."""
        params = self._placed(params)
        return self.gradients.mean_loss(params, self.frozen, self.model_state, self.batch, self.key)

    def grad(self, params: PyTree, _: Any = None) -> PyTree:
        """Returns the gradients at these trained parameters, computed as in the step."""
        params = self._placed(params)
        output = self.gradients(params, self.frozen, self.model_state, self.batch, self.key)
        return self.layout.gradients(output.gradients)

    def _placed(self, params: PyTree) -> PyTree:
        whole = self.layout.at_rest(merge(self._after(params), self.frozen))
        return self.update.partition(whole)[0]

    def _after(self, params: PyTree) -> PyTree:
        """Returns the parameters; on CPUs they depend on the arrays of `before`.

        Optimizers evaluate the loss in loops and branches, and XLA's CPU client does not order the
        collectives in these with those outside. Without this dependency its threads may wait in
        different collectives (see `finite.may_branch`).
        """
        device = next(iter(jax.tree.leaves(self.layout.on_device.params)[0].device_set))
        if device.platform != "cpu":
            return params
        known = exist(self.before)
        return jax.tree.map(lambda x: jnp.where(known, x, jnp.zeros_like(x)), params)
