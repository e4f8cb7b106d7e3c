"""MobileNetV2 on photographs of flowers: Adam, batch 32, cross-entropy, from random weights.

Expected: with 200 photographs, of which 165 train, 2 epochs end in about 3 minutes on two busy
CPU cores, most of them compilation, where guessing would be (loss 1.6 to 1.8). On 8 virtual devices
compilation takes more than twice as long: give --cpu-devices 1 for a first try. With --epochs 30
the training loss comes to about 1.4 (accuracy 0.4) and the test's accuracy to 0.3: from random
weights so few pictures teach little.

    python -m spmdtrain.run --config experiments/flowers_mobilenet.py --data-dir FOLDER

FOLDER directly holds the folders of the classes (daisy, dandelion, ...), as
http://download.tensorflow.org/example_images/flower_photos.tgz has them; any folder of folders of
images will do. By their names 80 % of the files train, 10 % validate and 10 % are the test.
`--preset published` has the model as published, for accelerators. `--mode predict` names the
classes of the test's pictures. Needs Pillow: pip install 'spmdtrain[images]'.
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
from spmdtrain.data.image_folder import ImageFolder
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
    """Pixels to a side that pictures are resized to."""
    width_multiplier: float = 0.35
    """Channels of each layer, as a fraction of those published."""
    dropout: float = 0.2
    """Fraction of the values dropped before the classifier."""
    batch_norm_momentum: float = 0.9
    """What the averages that evaluation normalizes with keep at each step of what they were."""
    shift: float = 0.1
    """How far training pictures are moved at most, as a fraction of their side."""
    cache: Literal["none", "memory", "disk"] = "memory"
    """Where decoded pictures are kept, so that each is decoded but once."""
    cache_dir: str | None = None
    """The folder for cache=disk, ~/.cache/spmdtrain/images by default; it may be deleted at any
    time."""
    broken: Literal["error", "skip"] = "error"
    """Whether a file that cannot be decoded ends the run, or is left out."""


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


# -- pictures --------------------------------------------------------------------------------------


def load(config: Config) -> dict[str, ImageFolder]:
    """The pictures by split."""
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
    """The picture mirrored or not, and moved by up to `shift` of its sides.

    What comes in at the edges is the picture itself, reflected there.
    """
    image = example["image"]
    rows, columns = (moved(size, shift, generator) for size in image.shape[:2])
    if generator.random() < 0.5:
        columns = columns[::-1]
    # Along one dim after the other: three times as fast as both at once.
    return {**example, "image": image.take(rows, axis=0).take(columns, axis=1)}


def moved(size: int, shift: float, generator: np.random.Generator) -> np.ndarray:
    """Where each of `size` pixels in a row comes from."""
    most = int(shift * size)
    places = np.abs(np.arange(size) + generator.integers(-most, most, endpoint=True))
    return size - 1 - np.abs(size - 1 - places)


# -- training --------------------------------------------------------------------------------------


def logits(model: MobileNetV2, batch: Batch) -> jax.Array:
    """(B, classes), f32 whatever the model computes in."""
    # Scaled on the device: a quarter of what floats would take on the way.
    pixels = batch["image"].astype(model.classifier.kernel.dtype) / 255
    return model(pixels).astype(jnp.float32)


def objective(model: MobileNetV2, batch: Batch) -> dict[str, jax.Array]:
    found = logits(model, batch)
    return {
        "loss": optax.softmax_cross_entropy_with_integer_labels(found, batch["label"]),
        "accuracy": found.argmax(-1) == batch["label"],
    }


def present(classes: Sequence[str], files: Sequence[str], predictions: np.ndarray) -> Iterator[str]:
    """Each file with the class that is likeliest, and how likely it is."""
    odds = np.exp(predictions - predictions.max(-1, keepdims=True))
    likely = odds / odds.sum(-1, keepdims=True)
    for file, row in zip(files, likely, strict=True):
        yield f"{printable(file)}: {printable(classes[row.argmax()])} ({row.max():.0%})"


def check_ranges(config: Config) -> None:
    """Raise `UserError` for a shift that leaves nothing of a picture."""
    if not 0 <= config.shift < 1:
        raise UserError(f"shift is {config.shift}: it must be at least 0 and below 1")


def build(config: Config) -> Experiment:
    check_ranges(config)
    assert config.learning_rate is not None
    pictures = load(config)
    classes, test = pictures["train"].classes, pictures["test"]
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
        train=pictures["train"],
        validation=pictures["validation"],
        test=test,
        augment=partial(augment, shift=config.shift),
        format_predictions=partial(present, classes, test.files),
    )
