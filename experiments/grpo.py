"""Reinforcement learning from verifiable rewards: a transformer learns to sort digits by GRPO.

Expected: after 300 steps, in about two minutes on two CPU cores, 95 % of the digits of the
evaluation prompts are right (17 % at the start), and of 86 % of these prompts all of them.

    python -m spmdtrain.run --config experiments/grpo.py

In each step the model answers some prompts, each of them several times, by cached generation. A
Python function computes the reward of each answer, and the answers that are better than the others
to the same prompt become more probable (group relative policy optimization, Shao et al. 2024,
arXiv:2402.03300). The start is random: nothing is pretrained.

The log-probabilities of the answers in the step are those of generation, to the bit: the metric
`ratio_error`, the largest difference of their ratio to 1, is 0. Another task is another
`make_prompt` and `reward`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spmdtrain import (
    Loop,
    Mode,
    RunConfig,
    TrainState,
    UserError,
    Variables,
    as_adapter,
    weighted_mean,
)
from spmdtrain.models import (
    TRANSFORMER_RULES,
    GenerationOptions,
    Transformer,
    TransformerConfig,
    completion_log_probs,
    stream,
)

Batch = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    steps: int | None = 300
    global_batch_size: int | None = 256
    learning_rate: float | None = 1e-3
    log_every: int = 20
    eval_every_steps: int | None = 100
    checkpoint_every_steps: int | None = 100
    best_metric: str = "reward"
    best_mode: str = "max"
    answers: int = 16
    """Answers to each prompt; the batch size is a multiple of it."""
    digits: int = 3
    """Digits of a prompt."""
    symbols: int = 6
    """Different digits."""
    clip: float = 0.2
    """Largest change of a probability ratio that is rewarded."""
    layers: int = 2
    """Blocks of attention and MLP."""
    width: int = 64
    """Width of the residual stream."""
    heads: int = 4
    """Attention heads, which share the width."""


def make_prompt(config: Config, draw: np.random.Generator) -> list[int]:
    """Returns the digits to sort, and the token that ends them."""
    return [*draw.integers(config.symbols, size=config.digits).tolist(), config.symbols]


def reward(prompt: Sequence[int], answer: Sequence[int]) -> float:
    """Returns the share of the digits that are where a sorted list has them."""
    expected = sorted(prompt[:-1])
    return sum(a == b for a, b in zip(expected, answer, strict=True)) / len(expected)


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Returns how much better each answer is than the others to its prompt, both (P, answers)."""
    centered = rewards - rewards.mean(axis=1, keepdims=True)
    spread = rewards.std(axis=1, keepdims=True)
    return np.asarray(centered / (spread + 1e-4), np.float32)


def answer(
    model: Any, prompts: Sequence[Sequence[int]], options: GenerationOptions
) -> tuple[np.ndarray, np.ndarray]:
    """Returns an answer to each prompt, and the log-probabilities of its tokens, both (B, C)."""
    tokens: list[list[int]] = [[] for _ in prompts]
    log_probs: list[list[float]] = [[] for _ in prompts]
    for piece in stream(model, prompts, options):
        tokens[piece.row] += piece.tokens.tolist()
        log_probs[piece.row] += piece.log_probs.tolist()
    return np.array(tokens, np.int32), np.array(log_probs, np.float32)


def train(config: Config, loop: Loop) -> None:
    """Trains; the run command calls it."""
    batch_size = loop.config.resolved_batch_size
    if config.answers < 2 or batch_size % config.answers:
        raise UserError(
            f"answers is {config.answers}: it must be 2 or more, and the batch size "
            f"{batch_size} a multiple of it"
        )
    shape = TransformerConfig(
        vocabulary=config.symbols + 1,
        rows=8 * -(-(config.symbols + 1) // 8),
        layers=config.layers,
        width=config.width,
        heads=config.heads,
        hidden=4 * config.width,
        context=2 * config.digits + 1,
    )
    policy = as_adapter(partial(Transformer, shape))
    assert loop.config.learning_rate is not None
    # Without steps, `start` refuses the run: epochs need a dataset.
    schedule = optax.cosine_decay_schedule(loop.config.learning_rate, config.steps or 1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    def init(key: jax.Array) -> dict[str, Any]:
        params = policy.init(policy.given, key).params
        return {"params": params, "opt_state": optimizer.init(params)}

    def loss(params: Any, batch: Batch, key: jax.Array) -> tuple[jax.Array, jax.Array]:
        lengths = jnp.full(len(batch["prompts"]), batch["prompts"].shape[1])
        log_probs, _ = policy.run(
            lambda model, batch: completion_log_probs(
                model, batch["prompts"], lengths, batch["answers"]
            ),
            Variables(params, {}),
            batch,
            key,
            Mode.TRAIN,
        )
        ratio = jnp.exp(log_probs - batch["log_probs"])
        clipped = jnp.clip(ratio, 1 - config.clip, 1 + config.clip)
        gain = batch["advantages"][:, None]
        return -weighted_mean(jnp.minimum(ratio * gain, clipped * gain)), ratio

    def step(state: TrainState, batch: Batch, key: jax.Array) -> tuple[TrainState, Any]:
        gradient = jax.value_and_grad(loss, has_aux=True)
        (value, ratio), gradients = gradient(state.params, batch, key)
        updates, opt_state = optimizer.update(gradients, state.opt_state)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": value,
            "reward": weighted_mean(batch["rewards"]),
            "ratio_error": jnp.abs(ratio - 1).max(),
        }
        return replace(state, params=params, opt_state=opt_state), metrics

    options = GenerationOptions(max_new_tokens=config.digits)
    state = loop.start(init, rules=TRANSFORMER_RULES)
    compiled = loop.compile_step(step)
    prompts_to_evaluate = [
        make_prompt(config, np.random.default_rng((config.seed, i))) for i in range(256)
    ]
    for number in loop.steps():
        # Drawn from the number of the step, so that a resumed run has the same prompts and answers.
        draw = np.random.default_rng((config.seed, number, 1))
        prompts = [make_prompt(config, draw) for _ in range(batch_size // config.answers)]
        repeated = [prompt for prompt in prompts for _ in range(config.answers)]
        model = policy.merge(Variables(state.params, {}))
        answers, log_probs = answer(
            model, repeated, replace(options, seed=int(draw.integers(2**31)))
        )
        pairs = zip(repeated, answers.tolist(), strict=True)
        rewards = np.array([reward(*pair) for pair in pairs], np.float32)
        batch = {
            "prompts": np.array(repeated, np.int32),
            "answers": answers,
            "log_probs": log_probs,
            "rewards": rewards,
            "advantages": advantages(rewards.reshape(-1, config.answers)).ravel(),
        }
        state, output = compiled(state, loop.shard_batch(batch))
        loop.end_step(state, output)
        if loop.should_evaluate():
            model = policy.merge(Variables(state.params, {}))
            best, _ = answer(model, prompts_to_evaluate, replace(options, temperature=0.0))
            found = [reward(*pair) for pair in zip(prompts_to_evaluate, best.tolist(), strict=True)]
            loop.log_evaluation({"reward": np.mean(found), "solved": np.mean(np.equal(found, 1))})
