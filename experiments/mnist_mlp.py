"""The multi-layer perceptron 784-256-256-10 on MNIST: relu, Adam, batch 32, cross-entropy.

Expected: on the full MNIST, test accuracy 0.975 to 0.983 after 5 epochs; on the 10,000 images of
the t10k files alone (8,000 of them for training), 0.935 to 0.96, in about 10 seconds on two cores.

    python -m spmdtrain.run --config experiments/mnist_mlp.py --data-dir FOLDER

FOLDER holds the IDX files, gzipped or not. With all four of them the last 5,000 training images
validate and t10k is the test; with the t10k files alone their first 8,000 train, the next 1,000
validate and the last 1,000 are the test.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from spmdtrain import (
    ArrayDataset,
    Experiment,
    RunConfig,
    Subset,
    SumMetric,
    UserError,
    confusion_counts,
    confusion_table,
    find_idx,
    macro_f1,
    read_idx,
)
from spmdtrain.models import MLP, mlp_rules


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    epochs: int | None = 5
    global_batch_size: int | None = 32
    learning_rate: float | None = 1e-3
    hidden: tuple[int, ...] = (256, 256)
    """Widths of the hidden layers."""


def pixels(model: MLP, batch: dict[str, jax.Array]) -> jax.Array:
    """Scales bytes to [0, 1], in the dtype of the model's parameters."""
    # Scaled on the device, so that a quarter of the bytes of floats is transferred.
    return batch["image"].astype(model.layers[0].kernel.dtype) / 255


def objective(model: MLP, batch: dict[str, jax.Array]) -> dict[str, Any]:
    logits = model(pixels(model, batch))
    logits = logits.astype(jnp.float32)  # in f32 for any compute dtype
    predicted = logits.argmax(-1)
    counts = confusion_counts(batch["label"], predicted, 10)
    return {
        "loss": optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]),
        "accuracy": predicted == batch["label"],
        # Evaluations compute these from the counts of all examples.
        "macro_f1": SumMetric(counts, macro_f1),
        "confusion": SumMetric(counts, confusion_table),
    }


def predict(model: MLP, batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the logits (B, 10)."""
    return model(pixels(model, batch))


def load_part(folder: epath.Path, part: str) -> ArrayDataset | None:
    """Returns the images and labels of `train` or `t10k`; None if both files are missing."""
    names = f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"
    files = [find_idx(folder, name) for name in names]
    if files == [None, None]:
        return None
    for name, file in zip(names, files, strict=True):
        if file is None:
            raise UserError(f"{folder}: {name} (with or without .gz) is missing")
    images, labels = (read_idx(file) for file in files if file is not None)
    if images.shape[1:] != (28, 28):
        raise UserError(f"{files[0]}: images of shape {images.shape[1:]}, MNIST's are (28, 28)")
    if (
        labels.dtype.kind not in "iu"
        or labels.ndim != 1
        or not 0 <= labels.min() <= labels.max() < 10
    ):
        raise UserError(
            f"{files[1]}: labels of shape {labels.shape} and {labels.dtype} from {labels.min()} to "
            f"{labels.max()}: MNIST's are one integer from 0 to 9 for each image"
        )
    return ArrayDataset({"image": images, "label": labels.astype(np.int32)})


def load_mnist(data_dir: str | None) -> tuple[Subset, Subset, Subset]:
    """Returns the training, validation and test examples."""
    if data_dir is None:
        raise UserError("mnist_mlp needs --data-dir, the folder that holds MNIST's IDX files")
    folder = epath.Path(data_dir).expanduser()
    test, full = load_part(folder, "t10k"), load_part(folder, "train")
    if test is None:
        raise UserError(
            f"{data_dir}: holds no t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (with or "
            "without .gz), which MNIST's web page and its mirrors offer"
        )
    if full is not None:
        if len(full) <= 5000:
            raise UserError(f"{data_dir}: {len(full)} training images leave none to validate")
        train, validation = np.split(np.arange(len(full)), [len(full) - 5000])
        return Subset(full, train), Subset(full, validation), Subset(test, np.arange(len(test)))
    if len(test) != 10_000:
        raise UserError(f"{data_dir}: t10k holds {len(test)} images, and MNIST's has 10,000")
    parts = np.split(np.arange(10_000), [8000, 9000])
    return Subset(test, parts[0]), Subset(test, parts[1]), Subset(test, parts[2])


def build(config: Config) -> Experiment:
    train, validation, test = load_mnist(config.data_dir)
    assert config.learning_rate is not None
    return Experiment(
        model=partial(MLP, 784, config.hidden, 10),
        objective=objective,
        predict=predict,
        optimizer=optax.adam(config.learning_rate),
        rules=mlp_rules(len(config.hidden) + 1),
        train=train,
        validation=validation,
        test=test,
    )
