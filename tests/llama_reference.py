"""An independent Llama in NumPy, from arrays with the names and shapes of Hugging Face."""

import math

import numpy as np


def rotary_speeds(head_width: int, base: float, factor: float | None) -> np.ndarray:
    """With a factor, those of Llama 3.1, case by case as its authors write them."""
    speeds = []
    for i in range(0, head_width, 2):
        speed = base ** (-i / head_width)
        wavelength = 2 * math.pi / speed
        if factor is not None and wavelength > 8192 / 1:
            speed = speed / factor
        elif factor is not None and wavelength > 8192 / 4:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            speed = (1 - smooth) * speed / factor + smooth * speed
        speeds.append(speed)
    return np.array(speeds)


MLP = ("gate", "up", "down")


def swiglu(x: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    gated = x @ gate.T
    out: np.ndarray = (gated / (1 + np.exp(-gated)) * (x @ up.T)) @ down.T
    return out


def experts(w: dict[str, np.ndarray], at: str, x: np.ndarray, top_k: int) -> np.ndarray:
    """Token by token: the experts of the largest logits, by a softmax over these logits."""
    out = np.zeros_like(x)
    for place in np.ndindex(x.shape[:-1]):
        scores = x[place] @ w[f"{at}.gate.weight"].T
        chosen = np.argsort(scores)[-top_k:]
        shares = np.exp(scores[chosen]) / np.exp(scores[chosen]).sum()
        for share, expert in zip(shares, chosen, strict=True):
            names = (f"{at}.experts.{expert}.{name}.weight" for name in ("w1", "w3", "w2"))
            out[place] += share * swiglu(x[place], *(w[name] for name in names))
    return out


def logits(
    weights: dict[str, np.ndarray],
    tokens: np.ndarray,
    *,
    heads: int,
    kv_heads: int,
    base: float,
    factor: float | None,
    top_k: int = 0,
) -> np.ndarray:
    """The logits in float64; with `top_k`, of a Mixtral with so many experts for each token."""
    w = {name.removeprefix("model."): x.astype(np.float64) for name, x in weights.items()}
    length = tokens.shape[1]
    width = w["norm.weight"].size // heads
    angles = np.outer(np.arange(length), rotary_speeds(width, base, factor))
    turns = np.exp(1j * angles)  # a pair of values is a complex number

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        root = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
        scaled: np.ndarray = x / root * w[f"{name}.weight"]
        return scaled

    def split(x: np.ndarray) -> list[np.ndarray]:
        """(B, T, width) of each head."""
        return np.split(x, x.shape[-1] // width, axis=-1)

    def turned(x: np.ndarray) -> np.ndarray:
        pairs = (x[..., : width // 2] + 1j * x[..., width // 2 :]) * turns
        return np.concatenate([pairs.real, pairs.imag], axis=-1)

    x = w["embed_tokens.weight"][tokens]
    for layer in range(sum(name.endswith("input_layernorm.weight") for name in w)):
        at = f"layers.{layer}"
        y = norm(x, f"{at}.input_layernorm")
        q, k, v = (split(y @ w[f"{at}.self_attn.{name}_proj.weight"].T) for name in "qkv")
        mixed = []
        for head in range(heads):
            shared = head * kv_heads // heads
            scores = turned(q[head]) @ turned(k[shared]).swapaxes(1, 2) / np.sqrt(width)
            scores[:, ~np.tri(length, dtype=bool)] = -np.inf
            shares = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(shares / shares.sum(-1, keepdims=True) @ v[shared])
        x = x + np.concatenate(mixed, axis=-1) @ w[f"{at}.self_attn.o_proj.weight"].T
        y = norm(x, f"{at}.post_attention_layernorm")
        if top_k:
            x = x + experts(w, f"{at}.block_sparse_moe", y, top_k)
        else:
            x = x + swiglu(y, *(w[f"{at}.mlp.{name}_proj.weight"] for name in MLP))
    head_weight = w.get("lm_head.weight", w["embed_tokens.weight"])
    return norm(x, "norm") @ head_weight.T
