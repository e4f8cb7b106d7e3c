"""Checks of what cannot have the same bits on any number of devices."""

from typing import Any

import optax

from spmdtrain.config.run_config import RunConfig
from spmdtrain.errors import UserError
from spmdtrain.sharding.layout import Layout
from spmdtrain.sharding.placement import Placement


def check_exact(
    config: RunConfig,
    placement: Placement,
    layout: Layout,
    optimizer: optax.GradientTransformation,
    reduction: Any,
) -> None:
    pass
