"""Names of dims to mesh axes: what a table makes of an annotation, and refuses."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spmdtrain.errors import UserError
from spmdtrain.sharding.rules import Annotation, AxisRules, specs_of

P = PartitionSpec


def spec_of(value: Any, *table: tuple[str, Any], own: Any = ()) -> PartitionSpec:
    annotation = Annotation.of(value, own)
    assert annotation is not None
    return specs_of({"params/w": annotation}, AxisRules(table))["params/w"]


@pytest.mark.parametrize(
    ("names", "table", "expected"),
    [
        (("embed", "mlp"), [("embed", "fsdp"), ("mlp", "tensor")], P("fsdp", "tensor")),
        (("embed", "mlp"), [("embed", None), ("mlp", ("data", "fsdp"))], P(None, ("data", "fsdp"))),
        (("fsdp", None), [], P("fsdp", None)),
        (P(None, ("data", "fsdp")), [], P(None, ("data", "fsdp"))),
        (("fsdp",), [("fsdp", "tensor")], P("tensor")),
        (P(P.UNCONSTRAINED, "tensor"), [], P(None, "tensor")),
        # The first entry whose axes are free counts, in the order of the table.
        (("a", "b"), [("b", "fsdp"), ("a", "fsdp"), ("a", "tensor")], P("tensor", "fsdp")),
        (("a", "b"), [("b", "fsdp"), ("a", "fsdp"), ("a", None)], P(None, "fsdp")),
        (("a", "a"), [("a", None)], P(None, None)),
    ],
)
def test_names_become_axes(names: Any, table: list[Any], expected: PartitionSpec) -> None:
    assert spec_of(names, *table) == expected


def test_the_table_of_an_array_counts_where_the_experiment_says_nothing() -> None:
    own = [("embed", "fsdp"), ("mlp", "tensor")]
    assert spec_of(("embed", "mlp"), ("embed", None), own=own) == P(None, "tensor")
    with pytest.raises(UserError, match="params/w: the table of its annotation maps 'mlp' to 'x'"):
        spec_of(("mlp",), own=[("mlp", "x")])


def test_metadata_without_names_are_no_annotation() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",))
    assert Annotation.of(None) is None
    assert Annotation.of(()) is None
    assert Annotation.of(NamedSharding(mesh, P("fsdp"))) == Annotation(("fsdp",))


@pytest.mark.parametrize(
    ("names", "table", "message"),
    [
        (
            ("embed", "x"),
            [("embed", None)],
            r"^params/w is annotated \('embed', 'x'\): axis_rules "
            "do not map 'x', and the axes of the mesh are replica, data, fsdp, expert, "
            "context, tensor",
        ),
        (
            ("a", "b"),
            [("a", "fsdp"), ("b", "fsdp")],
            r"^params/w is annotated \('a', 'b'\): 'a' and "
            "'b' are both mapped to fsdp",
        ),
        (("a", "a"), [("a", "fsdp")], "'a' and 'a' are both mapped to fsdp"),
        (("a",), [("a", "fsbp")], "maps 'a' to 'fsbp', which is not an axis.*mean 'fsdp'"),
        (("a",), [("a", ("fsdp", "fsdp"))], "maps 'a' to an axis twice"),
        (("a",), [("a", 3)], r"has the entry \('a', 3\): it must be a name with an axis"),
        (("a",), ["ab c"], "has the entry 'ab c'"),
    ],
)
def test_what_cannot_be_mapped_is_named(names: Any, table: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        spec_of(names, *table)
    assert "\n" not in str(caught.value)


def test_an_unknown_explicit_axis_is_named() -> None:
    with pytest.raises(UserError, match="explicit axis 'tp', which is not an axis of the mesh"):
        AxisRules(explicit=("fsdp", "tp"))
