"""An independent vision transformer in NumPy, from arrays as Hugging Face names them."""

import math

import numpy as np

erf = np.vectorize(math.erf)


def logits(weights: dict[str, np.ndarray], images: np.ndarray, *, heads: int) -> np.ndarray:
    """The logits of images (B, H, W, C), in float64."""
    w = {name.removeprefix("vit."): x.astype(np.float64) for name, x in weights.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-12)
        return x * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    kernel = w["embeddings.patch_embeddings.projection.weight"]  # (width, C, P, P)
    patch, side = kernel.shape[-1], images.shape[1]
    tokens = [np.repeat(w["embeddings.cls_token"][0], len(images), axis=0)]
    for top in range(0, side, patch):
        for left in range(0, side, patch):
            part = images[:, top : top + patch, left : left + patch]
            values = np.einsum("bpqc,dcpq->bd", part, kernel)
            tokens.append(values + w["embeddings.patch_embeddings.projection.bias"])
    x = np.stack(tokens, axis=1) + w["embeddings.position_embeddings"]
    rows, length, width = x.shape
    for layer in range(sum(name.endswith("layernorm_before.weight") for name in w)):
        at = f"encoder.layer.{layer}"
        y = norm(x, f"{at}.layernorm_before")
        q, k, v = (
            linear(y, f"{at}.attention.attention.{name}")
            .reshape(rows, length, heads, -1)
            .swapaxes(1, 2)
            for name in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(-1, -2) / np.sqrt(width // heads)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        mixed = mixed.swapaxes(1, 2).reshape(rows, length, width)
        x = x + linear(mixed, f"{at}.attention.output.dense")
        hidden = linear(norm(x, f"{at}.layernorm_after"), f"{at}.intermediate.dense")
        hidden = hidden * 0.5 * (1 + erf(hidden / math.sqrt(2)))
        x = x + linear(hidden, f"{at}.output.dense")
    return linear(norm(x, "layernorm")[:, 0], "classifier")
