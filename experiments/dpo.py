"""Direct preference optimization: answers that are preferred, relative to a reference model.

Expected: after 60 steps, in about a minute on two CPU cores, every unseen pair has a higher reward
for the preferred answer, and the model of experiments/sft.py answers briefly.

    python -m spmdtrain.run --config experiments/sft.py --workdir runs/sft
    python experiments/dpo.py runs/sft FOLDER
    python -m spmdtrain.run --config experiments/dpo.py --data-dir FOLDER --init-from runs/sft \\
        --workdir runs/dpo
    python -m spmdtrain.run --config experiments/sft.py --init-from runs/dpo --mode predict

The second command writes pairs.npz: for each question the tokens of a brief answer, which is
preferred, and of a polite one; the weights of the answers' tokens; and their log-probabilities
under the reference, the model in runs/sft. They are computed once, and training needs no second
model. If the first command has options of the model's shape, the third has the same ones.

The reward of an answer is its log-probability minus that of the reference, times `beta`. The loss
is that of Rafailov et al. 2023 (arXiv:2305.18290).
"""

import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import sft
from etils import epath

from spmdtrain import ArrayDataset, Chat, Experiment, UserError, load_model, open_run
from spmdtrain.models import TRANSFORMER_RULES, Transformer

_COMMAND = "python experiments/dpo.py RUN FOLDER writes it"

Batch = dict[str, jax.Array]


@dataclass(frozen=True, kw_only=True)
class Config(sft.Config):
    steps: int | None = 60
    global_batch_size: int | None = 8
    learning_rate: float | None = 3e-4
    eval_every_steps: int | None = 20
    checkpoint_every_steps: int | None = 20
    beta: float = 0.1
    """Strength of the reference: the smaller, the further the model may move away from it."""


# -- data ------------------------------------------------------------------------------------------


def pair(a: int, b: int) -> list[list[sft.Message]]:
    """Returns the conversations of the preferred answer and of the other one."""
    question = {"role": "user", "content": f"{a}+{b}?"}
    answers = (style.format(a + b) for style in sft.STYLES.values())
    return [[question, {"role": "assistant", "content": answer}] for answer in answers]


def padded(chat: Chat, length: int) -> dict[str, np.ndarray]:
    """Returns tokens, int32 (N, length), and weights, f32 (N, length), padded at the end."""
    documents = chat.__getitems__(range(len(chat)))
    rows = {"tokens": np.int32, "weights": np.float32}
    found = {name: np.zeros((len(documents), length), dtype) for name, dtype in rows.items()}
    for row, document in enumerate(documents):
        for name, values in found.items():
            values[row, : len(document)] = getattr(document, name)
    return found


def log_probs(model: Any, tokens: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns the log-probability of each row's weighted tokens, (N,)."""
    losses = model.token_losses(tokens[:, :-1], tokens[:, 1:]).loss
    return -(losses * weights[:, 1:]).sum(-1)


def write_pairs(run: str, folder: Path) -> None:
    """Writes the pairs with their log-probabilities under the model of a run."""
    known = open_run(run).config
    config = Config(**{name: known[name] for name in ("layers", "width", "heads", "length")})
    numbers = np.random.default_rng(0).permutation(sft.NUMBERS**2).tolist()
    conversations = [each for n in numbers for each in pair(*divmod(n, sft.NUMBERS))]
    chat = sft.chat(config, conversations)
    rows = padded(chat, 32)
    model = load_model(partial(Transformer, sft.shape(config, chat.vocabulary_size)), run)
    reference = np.asarray(jax.jit(partial(log_probs, model))(rows["tokens"], rows["weights"]))
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {name: each.reshape(-1, 2, 32) for name, each in rows.items()}
    np.savez(folder / "pairs.npz", reference=reference.reshape(-1, 2), **arrays)


def load(config: Config) -> tuple[ArrayDataset, ArrayDataset]:
    """Returns pairs for training and, a fifth of them, for validation."""
    if config.data_dir is None:
        raise UserError(f"dpo needs --data-dir, a folder with pairs.npz: {_COMMAND}")
    path = epath.Path(config.data_dir).expanduser() / "pairs.npz"
    if not path.is_file():
        raise UserError(f"{config.data_dir}: holds no pairs.npz: {_COMMAND}")
    with path.open("rb") as file, np.load(file) as arrays:
        pairs = dict(arrays)
    count = len(pairs["reference"]) * 4 // 5
    train = {name: array[:count] for name, array in pairs.items()}
    return ArrayDataset(train), ArrayDataset({k: array[count:] for k, array in pairs.items()})


# -- training --------------------------------------------------------------------------------------


def objective(config: Config, model: Any, batch: Batch) -> dict[str, jax.Array]:
    rows = (batch[name].reshape(-1, batch[name].shape[-1]) for name in ("tokens", "weights"))
    found = log_probs(model, *rows).reshape(-1, 2)
    rewards = config.beta * (found - batch["reference"])
    margin = rewards[:, 0] - rewards[:, 1]
    return {"loss": -jax.nn.log_sigmoid(margin), "margin": margin, "accuracy": margin > 0}


def build(config: Config) -> Experiment:
    train, validation = load(config)
    assert config.learning_rate is not None
    return Experiment(
        model=partial(Transformer, sft.shape(config, 256)),
        objective=partial(objective, config),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(config.learning_rate)),
        train=train,
        validation=validation,
        rules=TRANSFORMER_RULES,
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python experiments/dpo.py RUN FOLDER")
    write_pairs(sys.argv[1], Path(sys.argv[2]))
