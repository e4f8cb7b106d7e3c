"""MobileNetV2 on photographs of flowers: Adam, batch 32, cross-entropy, from random weights.

Expected: with 200 photographs, 165 of them for training, 2 epochs take about 3 minutes on two busy
CPU cores, most of it compilation, and the loss is that of random guesses (1.6 to 1.8). On 8 virtual
devices compilation takes more than twice as long: use --cpu-devices 1 for a first run. With
--epochs 30 the training loss reaches about 1.4 (accuracy 0.4) and the test accuracy 0.3: so few
photographs are not enough to train from random weights.

    python -m spmdtrain.run --config experiments/flowers_mobilenet.py --data-dir FOLDER

FOLDER holds the folders of the classes (daisy, dandelion, ...), as in
http://download.tensorflow.org/example_images/flower_photos.tgz; any folder with one folder of
images for each class works. A hash of its name assigns each file to training (80 %), validation
(10 %) or test (10 %). `--preset published` is the model as published, for accelerators.
`--mode predict` prints the classes of the test images. Needs Pillow:
pip install 'spmdtrain[images]'.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from etils import epath

from spmdtrain import Experiment, RunConfig, UserError
from spmdtrain.data.images import ImageFolder
from spmdtrain.errors import printable
from spmdtrain.models import MobileNetV2

URL = "http://download.tensorflow.org/example_images/flower_photos.tgz"
CACHE = "~/.cache/spmdtrain/images"

Batch = dict[str, jax.Array]
Example = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    epochs: int | None = 2
    global_batch_size: int | None = 32
    learning_rate: float | None = 1e-3
    data_threads: int = 2
    image_size: int = 96
    """Pixels of each side that images are resized to."""
    width_multiplier: float = 0.35
    """Channels of each layer, as a fraction of the published model's."""
    dropout: float = 0.2
    """Fraction of the values dropped before the classifier."""
    batch_norm_momentum: float = 0.9
    """Decay of the averages of the batch statistics, which evaluation normalizes with."""
    shift: float = 0.1
    """Largest random shift of training images, as a fraction of their side."""
    cache: Literal["none", "memory", "disk"] = "memory"
    """Where decoded images are kept, so that each is decoded only once."""
    cache_dir: str | None = None
    """The folder for cache=disk, ~/.cache/spmdtrain/images by default; it may be deleted at any
    time."""
    broken: Literal["error", "skip"] = "error"
    """Whether a file that cannot be decoded ends the run or is left out."""


PRESETS = {
    "published": Config(
        epochs=5,
        global_batch_size=None,
        batch_size_per_device=64,
        data_threads=4,
        image_size=224,
        width_multiplier=1.0,
    )
}


# -- images ----------------------------------------------------------------------------------------


def load(config: Config) -> dict[str, ImageFolder]:
    """Returns the images by split."""
    if config.data_dir is None:
        raise UserError(
            f"flowers_mobilenet needs --data-dir, the folder that holds the classes' folders: {URL}"
        )
    if not epath.Path(config.data_dir).expanduser().is_dir():
        raise UserError(f"{config.data_dir}: no such folder; {URL} holds the flowers")
    cache_dir = config.cache_dir
    if config.cache == "disk" and cache_dir is None:
        cache_dir = CACHE
    return {
        split: ImageFolder(
            config.data_dir,
            config.image_size,
            split=split,
            broken=config.broken,
            cache=config.cache,
            cache_dir=cache_dir,
        )
        for split in ("train", "validation", "test")
    }


def augment(example: Example, generator: np.random.Generator, *, shift: float) -> Example:
    """Randomly mirrors an image and shifts it by up to `shift` of its sides.

    The image is reflected at its edges.
    """
    image = example["image"]
    rows, columns = (shifted(size, shift, generator) for size in image.shape[:2])
    if generator.random() < 0.5:
        columns = columns[::-1]
    # One dim after the other: three times as fast as both at once.
    return {**example, "image": image.take(rows, axis=0).take(columns, axis=1)}


def shifted(size: int, shift: float, generator: np.random.Generator) -> np.ndarray:
    """Returns the source index of each of `size` pixels."""
    most = int(shift * size)
    places = np.abs(np.arange(size) + generator.integers(-most, most, endpoint=True))
    return size - 1 - np.abs(size - 1 - places)


# -- training --------------------------------------------------------------------------------------


def logits(model: MobileNetV2, batch: Batch) -> jax.Array:
    """Returns logits (B, classes), in f32 for any compute dtype."""
    # Scaled on the device, so that a quarter of the bytes of floats is transferred.
    pixels = batch["image"].astype(model.classifier.kernel.dtype) / 255
    return model(pixels).astype(jnp.float32)


def objective(model: MobileNetV2, batch: Batch) -> dict[str, jax.Array]:
    outputs = logits(model, batch)
    return {
        "loss": optax.softmax_cross_entropy_with_integer_labels(outputs, batch["label"]),
        "accuracy": outputs.argmax(-1) == batch["label"],
    }


def format_predictions(
    classes: Sequence[str], files: Sequence[str], predictions: np.ndarray
) -> Iterator[str]:
    """Yields each file with its most probable class and the probability."""
    odds = np.exp(predictions - predictions.max(-1, keepdims=True))
    probabilities = odds / odds.sum(-1, keepdims=True)
    for file, row in zip(files, probabilities, strict=True):
        yield f"{printable(file)}: {printable(classes[row.argmax()])} ({row.max():.0%})"


def check_ranges(config: Config) -> None:
    """Checks that a shift leaves a part of the image."""
    if not 0 <= config.shift < 1:
        raise UserError(f"shift is {config.shift}: it must be at least 0 and below 1")


def build(config: Config) -> Experiment:
    check_ranges(config)
    assert config.learning_rate is not None
    images = load(config)
    classes, test = images["train"].classes, images["test"]
    return Experiment(
        model=partial(
            MobileNetV2,
            len(classes),
            width_multiplier=config.width_multiplier,
            dropout=config.dropout,
            momentum=config.batch_norm_momentum,
        ),
        objective=objective,
        predict=logits,
        optimizer=optax.adam(config.learning_rate),
        train=images["train"],
        validation=images["validation"],
        test=test,
        augment=partial(augment, shift=config.shift),
        format_predictions=partial(format_predictions, classes, test.files),
    )
