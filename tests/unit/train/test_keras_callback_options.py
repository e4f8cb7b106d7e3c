"""Constructor options of Keras callbacks: each has its effect or is refused by name."""

import inspect
import os
import sys
from typing import Any

import pytest

from spmdtrain import UserError
from spmdtrain.keras.callbacks import MAPPED_CALLBACKS, KerasCallbacks, callback_kind
from spmdtrain.train.callbacks import CallbackStates

os.environ.setdefault("KERAS_BACKEND", "jax")  # read when Keras is first imported
keras = pytest.importorskip("keras", reason="Keras is an extra")


@pytest.mark.parametrize("kind", MAPPED_CALLBACKS)
def test_each_option_is_mapped_or_refused(kind: str) -> None:
    parameters = inspect.signature(getattr(keras.callbacks, kind)).parameters.values()
    names = [p.name for p in parameters if p.kind is not p.VAR_KEYWORD]
    mapped = MAPPED_CALLBACKS[kind]
    assert sorted([*mapped.options, *mapped.refused]) == sorted(names)


OTHER_VALUES: dict[str, dict[str, Any]] = {
    "LambdaCallback": {"on_train_batch_begin": print, "on_train_batch_end": print},
    "TensorBoard": {
        "histogram_freq": 1,
        "write_images": True,
        "write_steps_per_second": True,
        "update_freq": "batch",
        "profile_batch": 2,
        "embeddings_freq": 1,
        "embeddings_metadata": {"embedding": "words.tsv"},
    },
}


def test_refused_options_are_errors_that_name_them() -> None:
    refused = {kind: mapped.refused for kind, mapped in MAPPED_CALLBACKS.items() if mapped.refused}
    assert {k: set(v) for k, v in refused.items()} == {k: set(v) for k, v in OTHER_VALUES.items()}
    for kind, options in OTHER_VALUES.items():
        assert callback_kind(getattr(keras.callbacks, kind)()) == kind
        for name, value in options.items():
            if name == "profile_batch" and sys.version_info < (3, 12):
                continue  # Keras itself ignores it there, and warns
            callback = getattr(keras.callbacks, kind)(**{name: value})
            with pytest.raises(UserError, match=rf"{kind}: {name}.* cannot be used"):
                callback_kind(callback)


@pytest.mark.parametrize(
    "options", [{"filepath": "{loss}.keras"}, {"filepath": "x.keras", "save_best_only": True}]
)
def test_a_file_of_every_n_steps_has_no_metrics(options: dict[str, Any]) -> None:
    callback = keras.callbacks.ModelCheckpoint(**options, save_freq=4)
    with pytest.raises(UserError, match="save_freq=4 saves between the ends of epochs"):
        callback_kind(callback)
    callback = keras.callbacks.ModelCheckpoint("{epoch}-{batch}.keras", save_freq=4)
    assert callback_kind(callback) == "ModelCheckpoint"


def test_a_saved_state_that_lacks_a_field_is_refused_by_name() -> None:
    callbacks = KerasCallbacks(None, None, [keras.callbacks.EarlyStopping("loss")], {})
    states = CallbackStates([callbacks])
    saved = states.to_json()
    states.restore(saved, print)
    for name in saved["keras"]:
        lacking = {"keras": {n: x for n, x in saved["keras"].items() if n != name}}
        message = f"callback keras cannot use its state in the checkpoint: KeyError: '{name}'"
        with pytest.raises(UserError, match=message):
            states.restore(lacking, print)
