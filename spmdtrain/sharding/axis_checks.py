"""The check that rules name each mesh axis over which only rules split."""

from collections.abc import Sequence

from spmdtrain.errors import UserError
from spmdtrain.sharding.describe import axes_of_spec
from spmdtrain.sharding.mesh import EXPERT, GATHER_AXES
from spmdtrain.sharding.placement import Placement
from spmdtrain.sharding.rules import Rule
from spmdtrain.strategies import AXES


def check_axes_used(placement: Placement, rules: Sequence[Rule], annotated: Sequence[Rule]) -> None:
    """Raises `UserError` if no rule names an axis over which only rules split.

    The devices of such an axis would repeat each other's work. `annotated` are the rules of the
    model's annotations.
    """
    named = {axis for rule in (*rules, *annotated) for axis in axes_of_spec(rule.spec)}
    used = {*named, *GATHER_AXES, "context"}  # attention uses the last: `check_context_used`
    for axis in [axis for axis in AXES if axis not in used]:
        size, needed = placement.size(axis), axis == "tensor" and placement.strategy.needs_rules
        if size == 1 and not needed:
            continue
        or_annotations = f" and {len(annotated)} annotations" if annotated else ""
        effect, instead = (
            "its devices would repeat each other's work",
            "choose another strategy" if needed else f"remove mesh.{axis}",
        )
        if axis == EXPERT:
            effect, instead = "every device would hold all parameters", "use mesh.data"
        raise UserError(
            f"mesh axis {axis}={size} is not used: under strategy {placement.name} only "
            f"sharding rules split over {axis}, and none of the {len(rules)} rules"
            f"{or_annotations} names it, so {effect}. Give rules that name {axis} or {instead}"
        )
