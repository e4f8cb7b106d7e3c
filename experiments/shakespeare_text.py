"""A language model on shards of Shakespeare's text: packed speeches from two sources.

Expected: a validation loss of about 1.73 nats a byte, after 3 minutes on two CPU cores.

    python experiments/shakespeare_text.py input.txt FOLDER
    python -m spmdtrain.run --config experiments/shakespeare_text.py --data-dir FOLDER

The first command writes the shards, once. input.txt, 1,115,394 bytes, is that of
https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt.
Its 7,222 speeches are the documents. The last tenth, validation-*.parquet, is for validation; of
the others each second one is in train-*.parquet, and the rest in train-*.arrayrecord.

Text is tokenized and packed when it is read: a row has `length` tokens of several speeches, and
each speech is predicted from its own beginning alone. `--tokenizer FILE` takes a file of Hugging
Face's tokenizers or a SentencePiece model instead of bytes; the loss is in nats a token. Training
mixes the two kinds of shards by `parquet_weight` and `arrayrecord_weight`. Needs the extras
`parquet` and `arrayrecord`.
"""

import math
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from etils import epath

from spmdtrain import (
    ArrayRecordSource,
    Experiment,
    Mixture,
    Packed,
    ParquetSource,
    RunConfig,
    Tokenized,
    UserError,
)
from spmdtrain.models import TRANSFORMER_RULES, Transformer, TransformerConfig

_ROUND = 64  # rows of the embedding are a multiple of it, so that they divide over devices
_SHARDS = 2  # files of each kind for training
_COMMAND = "python experiments/shakespeare_text.py input.txt FOLDER writes the shards"

Batch = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 600
    global_batch_size: int | None = 8
    learning_rate: float | None = 3e-3
    eval_every_steps: int | None = 200
    tokenizer: str = "bytes"
    """The tokenizer: "bytes", a file of Hugging Face's tokenizers, or a SentencePiece model."""
    end_of_document: str | None = None
    """Name or number of the token after each document; by default 256 with bytes, else none."""
    length: int = 256
    """Tokens of a row, and the most tokens that a prediction depends on."""
    window: int = 4096
    """Documents that are packed together."""
    parquet_weight: float = 1.0
    """Weight of the Parquet shards in training; 0 leaves them out."""
    arrayrecord_weight: float = 1.0
    """Weight of the ArrayRecord shards in training; 0 leaves them out."""
    layers: int = 4
    """Blocks of attention and MLP."""
    width: int = 160
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads, which share the width."""
    unroll: bool | None = None
    """Compile every layer separately: faster steps, longer compilation; by default up to 12."""
    weight_decay: float = 0.1
    """AdamW's weight decay, for all parameters but the norms' scales."""
    clip_norm: float = 1.0
    """The norm to which larger gradients are scaled down."""


PRESETS = {
    "tiny": Config(
        steps=60, learning_rate=1e-2, eval_every_steps=60, length=64, layers=2, width=64
    ),
}


# -- data ------------------------------------------------------------------------------------------


def write_shards(file: Path, folder: Path) -> None:
    """Writes the speeches of a text as shards."""
    import pyarrow as pa
    import pyarrow.parquet as parquet
    from array_record.python.array_record_module import ArrayRecordWriter

    speeches = [speech for speech in file.read_text("utf-8").split("\n\n") if speech.strip()]
    train, validation = speeches[: len(speeches) * 9 // 10], speeches[len(speeches) * 9 // 10 :]
    folder.mkdir(parents=True, exist_ok=True)

    def write_parquet(name: str, texts: list[str]) -> None:
        parquet.write_table(pa.table({"text": texts}), folder / name, row_group_size=512)

    write_parquet("validation-0.parquet", validation)
    for shard in range(_SHARDS):
        write_parquet(f"train-{shard}.parquet", train[::2][shard::_SHARDS])
        writer = ArrayRecordWriter(str(folder / f"train-{shard}.arrayrecord"), "group_size:1")
        for speech in train[1::2][shard::_SHARDS]:
            writer.write(speech.encode())
        writer.close()


def documents(config: Config, pattern: str) -> Tokenized:
    """Returns the tokenized documents of some shards."""
    if config.data_dir is None:
        raise UserError(f"shakespeare_text needs --data-dir, a folder of shards: {_COMMAND}")
    folder = epath.Path(config.data_dir).expanduser()
    files = [str(path) for path in sorted(folder.glob(pattern))]
    if not files:
        raise UserError(f"{config.data_dir}: holds no {pattern}: {_COMMAND}")
    source: ArrayRecordSource | ParquetSource
    if pattern.endswith(".parquet"):
        source = ParquetSource(files, columns=["text"])
    else:
        source = ArrayRecordSource(files)
    end: str | int | None = config.end_of_document
    if end is None and config.tokenizer == "bytes":
        end = 256
    elif config.end_of_document and config.end_of_document.isdecimal():
        end = int(config.end_of_document)
    return Tokenized(source, config.tokenizer, append=end)


def packed(config: Config, pattern: str) -> Packed:
    """Returns the packed documents of some shards."""
    return Packed(documents(config, pattern), config.length, config.window)


def training(config: Config) -> Mixture:
    """Returns the mixture of both kinds of shards."""
    weights = {"parquet": config.parquet_weight, "arrayrecord": config.arrayrecord_weight}
    for name, weight in weights.items():
        if not (weight >= 0 and math.isfinite(weight)):
            raise UserError(f"{name}_weight is {weight}: it must be 0 or more")
    if not any(weights.values()):
        raise UserError("parquet_weight and arrayrecord_weight are 0: nothing is left to train on")
    return Mixture(
        {
            name: (packed(config, f"train-*.{name}"), weight)
            for name, weight in weights.items()
            if weight
        }
    )


# -- training --------------------------------------------------------------------------------------


def objective(model: Any, batch: Batch) -> dict[str, tuple[jax.Array, jax.Array]]:
    tokens, after = batch["tokens"], ((0, 0), (0, 1))
    # Nothing follows the last token of a row, so its weight is 0.
    targets = jnp.pad(tokens[:, 1:], after)
    weights = jnp.pad(batch["weights"][:, 1:], after)
    losses = model.token_losses(tokens, targets, batch["segments"], batch["positions"])
    return {"loss": (losses.loss, weights), "accuracy": (losses.correct, weights)}


def make_optimizer(config: Config, total_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with gradient clipping, and a learning rate with warm-up and cosine decay."""
    assert config.learning_rate is not None
    peak = config.learning_rate
    schedule = optax.warmup_cosine_decay_schedule(
        peak / 10, peak, min(100, total_steps // 10), max(2, total_steps), peak / 20
    )
    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(schedule, b2=0.99, weight_decay=config.weight_decay, mask=_is_decayed),
    )


def _is_decayed(params: Any) -> Any:
    """Selects all but the norms' scales, by name: with stacked layers these are matrices, too."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: jax.tree_util.keystr(path[-1:], simple=True) != "norm", params
    )


def build(config: Config) -> Experiment:
    train, validation = training(config), packed(config, "validation-*.parquet")
    vocabulary = validation.documents.vocabulary_size
    shape = TransformerConfig(
        vocabulary=vocabulary,
        rows=-(-vocabulary // _ROUND) * _ROUND,
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        hidden=4 * config.width,
        context=config.length,
        unroll=config.unroll,
    )
    return Experiment(
        model=partial(Transformer, shape),
        objective=objective,
        optimizer=make_optimizer(config, config.total_steps(len(train))),
        train=train,
        validation=validation,
        rules=TRANSFORMER_RULES,
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python experiments/shakespeare_text.py input.txt FOLDER")
    write_shards(Path(sys.argv[1]), Path(sys.argv[2]))
