"""Arrays whose dtype cannot be saved are refused before the first step; all others are saved."""

from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tensorstore

from spmdtrain import Loop, UserError
from spmdtrain.checkpoints.manifest import check_can_be_saved
from spmdtrain.document.terminal import Terminal

OWN = [name for name in dir(ml_dtypes) if name.startswith(("int", "uint", "float", "bfloat"))]


@pytest.mark.parametrize("name", ["bool", "uint8", "uint32", "float16", "complex64", *OWN])
def test_dtypes_are_refused_if_and_only_if_tensorstore_has_not_got_them(name: str) -> None:
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    state = {"a": jax.ShapeDtypeStruct((2,), dtype)}
    try:
        tensorstore.dtype(dtype)
    except (ValueError, TypeError):
        with pytest.raises(UserError, match=f"a is {name}, which checkpoints cannot store"):
            check_can_be_saved(state)
    else:
        check_can_be_saved(state)


def test_a_state_that_cannot_be_saved_is_refused_at_the_start(tmp_path: Path) -> None:
    def init(key: jax.Array) -> dict[str, object]:
        return {"params": jnp.ones(3), "model_state": {"q": jnp.ones(2, jnp.uint4)}}

    loop = Loop(steps=1, workdir=str(tmp_path), terminal=Terminal(quiet=True))
    with pytest.raises(UserError, match="model_state/q is uint4"), loop as own:
        own.start(init)
