"""An independent GPT-2 in NumPy, and random weights in the layout of Hugging Face."""

import numpy as np

VOCABULARY, CONTEXT, WIDTH, LAYERS, HEADS = 311, 32, 64, 2, 4  # the preset `tiny`


def random_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of the published files: kernels are (in, out), as in Conv1D."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, mean: float = 0.0) -> np.ndarray:
        return (mean + 0.2 * random.standard_normal(shape)).astype(np.float32)

    weights = {"wte.weight": normal(VOCABULARY, WIDTH), "wpe.weight": normal(CONTEXT, WIDTH)}
    for layer in range(LAYERS):
        for norm in ("ln_1", "ln_2"):
            weights[f"h.{layer}.{norm}.weight"] = normal(WIDTH, mean=1)
            weights[f"h.{layer}.{norm}.bias"] = normal(WIDTH)
        for name, into, out in (
            ("attn.c_attn", WIDTH, 3 * WIDTH),
            ("attn.c_proj", WIDTH, WIDTH),
            ("mlp.c_fc", WIDTH, 4 * WIDTH),
            ("mlp.c_proj", 4 * WIDTH, WIDTH),
        ):
            weights[f"h.{layer}.{name}.weight"] = normal(into, out)
            weights[f"h.{layer}.{name}.bias"] = normal(out)
    return weights | {"ln_f.weight": normal(WIDTH, mean=1), "ln_f.bias": normal(WIDTH)}


def logits(weights: dict[str, np.ndarray], tokens: np.ndarray) -> np.ndarray:
    """The logits of GPT-2, in float64."""
    w = {name: x.astype(np.float64) for name, x in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"] + w[f"{name}.bias"]

    rows, length = tokens.shape
    x = w["wte.weight"][tokens] + w["wpe.weight"][:length]
    for layer in range(LAYERS):
        qkv = np.split(linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn"), 3, axis=-1)
        q, k, v = (y.reshape(rows, length, HEADS, -1).swapaxes(1, 2) for y in qkv)
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(WIDTH // HEADS)
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        x = x + linear(mixed.swapaxes(1, 2).reshape(rows, length, -1), f"h.{layer}.attn.c_proj")
        h = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        h = h * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + linear(h, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T
