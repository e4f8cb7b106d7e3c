"""The vision transformer (Dosovitskiy et al. 2021, arXiv:2010.11929).

Its arrays are annotated with logical names, which an `AxisRules` maps to axes of the mesh.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.config.options import check_values
from spmdtrain.errors import UserError
from spmdtrain.kernels.attention import attention
from spmdtrain.models.layers import (
    AXIS_RULES,
    annotated_param,
    layer_norm,
    normal_param,
    project_qkv,
    split_residual,
)
from spmdtrain.sharding.placement import constrain_sharding
from spmdtrain.step.layer_loop import scan_layers

VIT_AXIS_RULES = AXIS_RULES

_EPSILON = 1e-12  # of the published models


@dataclass(frozen=True, kw_only=True)
class ViTConfig:
    """The shape of a vision transformer.

    Attributes:
      classes: Number of classes.
      image_size: Pixels of each side of the images.
      patch_size: Pixels of each side of a patch.
      channels: Values of a pixel.
      layers: Number of blocks.
      width: Width of the residual stream.
      heads: Number of attention heads.
      hidden: Width inside each block's MLP.
      pooling: The values from which the logits are computed: the values of a class token before
        the patches, or the mean of the patches, without such a token.
      unroll: Whether to compile every layer separately: faster steps, but a compile time
        proportional to the number of layers. By default up to 12 layers.

    Raises:
      UserError: If a value is invalid.
    """

    classes: int
    image_size: int
    patch_size: int
    channels: int = 3
    layers: int
    width: int
    heads: int
    hidden: int
    pooling: Literal["class_token", "mean"] = "class_token"
    unroll: bool | None = None

    def __post_init__(self) -> None:
        check_values(self, ViTConfig)
        for name in (
            *("classes", "image_size", "patch_size", "channels"),
            *("layers", "width", "heads", "hidden"),
        ):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}: it must be 1 or more")
        if self.image_size % self.patch_size:
            raise UserError(
                f"image_size {self.image_size} does not divide into patches of {self.patch_size} "
                "pixels"
            )
        if self.width % self.heads:
            raise UserError(f"width {self.width} does not divide over {self.heads} heads")

    @property
    def head_width(self) -> int:
        """The width of each head."""
        return self.width // self.heads

    def huggingface(self) -> dict[str, Any]:
        """Returns the JSON files of Hugging Face's `ViTForImageClassification` by name.

        Its image processor takes images of integers from 0 to 255.

        Raises:
          UserError: If the model has no class token, which the published models have.
        """
        if self.pooling != "class_token":
            raise UserError(f"pooling is {self.pooling}: Hugging Face's layout has a class token")
        return {
            "config.json": {
                "architectures": ["ViTForImageClassification"],
                "model_type": "vit",
                "hidden_size": self.width,
                "num_hidden_layers": self.layers,
                "num_attention_heads": self.heads,
                "intermediate_size": self.hidden,
                "image_size": self.image_size,
                "patch_size": self.patch_size,
                "num_channels": self.channels,
                "hidden_act": "gelu",
                "layer_norm_eps": _EPSILON,
                "qkv_bias": True,
                "id2label": {str(label): f"LABEL_{label}" for label in range(self.classes)},
                "label2id": {f"LABEL_{label}": label for label in range(self.classes)},
            },
            "preprocessor_config.json": {
                "image_processor_type": "ViTImageProcessor",
                "do_resize": True,
                "size": {"height": self.image_size, "width": self.image_size},
                "do_rescale": True,
                "rescale_factor": 1 / 255,
                "do_normalize": True,
                "image_mean": [0.5] * self.channels,
                "image_std": [0.5] * self.channels,
            },
        }

    @property
    def tokens(self) -> int:
        """Number of patches of an image, plus 1 for the class token if there is one."""
        return (self.image_size // self.patch_size) ** 2 + (self.pooling == "class_token")


class ViT(nnx.Module):
    """A vision transformer, from images (B, H, W, channels) to logits (B, `classes`), f32.

    With the class token and the parameters of Hugging Face's `ViTForImageClassification`, it has
    the same logits; the published models expect values from -1 to 1. It computes in the dtype of
    its parameters; norms, softmax and logits are f32.

    Args:
      config: The shape.
      rngs: Random streams of the initialization.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        layers, width, hidden = config.layers, config.width, config.hidden
        heads, patch = (config.heads, config.head_width), config.patch_size

        def zeros(*shape: int, names: tuple[str | None, ...]) -> nnx.Param[jax.Array]:
            return annotated_param(jnp.zeros(shape, jnp.float32), names)

        def norm(*leading: int) -> dict[str, nnx.Param[jax.Array]]:
            shape = (*leading, width)
            return {
                "norm": nnx.Param(jnp.ones(shape, jnp.float32)),
                "norm_bias": nnx.Param(jnp.zeros(shape, jnp.float32)),
            }

        # With this scale, the sum of the blocks is as large for any number.
        back = (2 * layers) ** -0.5
        self.patches = nnx.Dict(
            kernel=normal_param(
                rngs,
                (patch, patch, config.channels, width),
                std=(patch * patch * config.channels) ** -0.5,
                names=(None, None, None, "embed"),
            ),
            bias=nnx.Param(jnp.zeros(width, jnp.float32)),
        )
        if config.pooling == "class_token":
            self.class_token = nnx.Param(jnp.zeros(width, jnp.float32))
        # Nearly as large as the embedded patches: if they are much smaller (0.02 in the paper), a
        # model takes many times as many steps until it uses them.
        self.positions = normal_param(rngs, (config.tokens, width), std=0.5, names=(None, "embed"))

        def matrix(
            *shape: int, inputs: int, scale: float = 1.0, names: tuple[str | None, ...]
        ) -> nnx.Param[jax.Array]:
            std = scale * inputs**-0.5
            return normal_param(rngs, (layers, *shape), std=std, names=(None, *names))

        self.blocks = nnx.Dict(
            attention=nnx.Dict(
                **norm(layers),
                qkv=matrix(width, 3, *heads, inputs=width, names=("embed", None, "heads", None)),
                qkv_bias=zeros(layers, 3, *heads, names=(None, None, "heads", None)),
                out=matrix(*heads, width, inputs=width, scale=back, names=("heads", None, "embed")),
                out_bias=nnx.Param(jnp.zeros((layers, width), jnp.float32)),
            ),
            mlp=nnx.Dict(
                **norm(layers),
                up=matrix(width, hidden, inputs=width, names=("embed", "mlp")),
                up_bias=zeros(layers, hidden, names=(None, "mlp")),
                down=matrix(hidden, width, inputs=hidden, scale=back, names=("mlp", "embed")),
                down_bias=nnx.Param(jnp.zeros((layers, width), jnp.float32)),
            ),
        )
        self.norm = nnx.Dict(
            scale=nnx.Param(jnp.ones(width, jnp.float32)),
            bias=nnx.Param(jnp.zeros(width, jnp.float32)),
        )
        # Zeros as in the paper's fine-tuning: the first loss is that of equally probable classes.
        self.head = nnx.Dict(
            kernel=zeros(width, config.classes, names=("embed", None)),
            bias=nnx.Param(jnp.zeros(config.classes, jnp.float32)),
        )

    def __call__(self, images: jax.Array) -> jax.Array:
        """Computes the logits of the classes.

        Args:
          images: (B, `image_size`, `image_size`, `channels`), floats.

        Returns:
          f32 (B, `classes`).

        Raises:
          UserError: If the images have another shape.
        """
        config = self.config
        x = self._embed(images)

        def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
            x = x + _attention(weights["attention"], x)
            x = split_residual(x)
            return split_residual(x + _mlp(weights["mlp"], x)), None

        weights = nnx.to_pure_dict(nnx.state(self.blocks))
        x, _ = scan_layers(block, x, weights, config.unroll)
        x = layer_norm(x, self.norm["scale"][...], self.norm["bias"][...], _EPSILON)
        pooled = x[:, 0] if config.pooling == "class_token" else x.mean(axis=1)
        kernel, bias = self.head["kernel"][...], self.head["bias"][...]
        logits = jnp.einsum("bd,dc->bc", pooled, kernel, preferred_element_type=jnp.float32)
        return logits + bias.astype(jnp.float32)[None]

    def _embed(self, images: jax.Array) -> jax.Array:
        """Returns patches, and the class token before them: (B, tokens, width)."""
        config = self.config
        size, patch, channels = config.image_size, config.patch_size, config.channels
        if images.shape[1:] != (size, size, channels):
            raise UserError(
                f"images have the shape {images.shape[1:]}, but the model takes "
                f"{(size, size, channels)}: height, width, channels"
            )
        kernel, side = self.patches["kernel"][...], size // patch
        images = images.astype(kernel.dtype).reshape(-1, side, patch, side, patch, channels)
        x = jnp.einsum("bipjqc,pqcd->bijd", images, kernel) + self.patches["bias"][None, None, None]
        x = x.reshape(x.shape[0], side * side, config.width)  # `len` would need a fixed size
        if config.pooling == "class_token":
            first = jnp.broadcast_to(self.class_token[...], (x.shape[0], 1, config.width))
            x = jnp.concatenate([first, x], axis=1)
        return split_residual(x + self.positions[None])


def _attention(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    x = layer_norm(x, weights["norm"], weights["norm_bias"], _EPSILON)
    heads = project_qkv(x, weights["qkv"], weights["qkv_bias"])
    mixed = attention(*heads, causal=False)
    mixed = constrain_sharding(mixed, "batch", "context", "tensor", None)
    return jnp.einsum("btnh,nhd->btd", mixed, weights["out"]) + weights["out_bias"][None, None]


def _mlp(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    normal = layer_norm(x, weights["norm"], weights["norm_bias"], _EPSILON)
    hidden = constrain_sharding(normal @ weights["up"], "batch", "context", "tensor")
    active = jax.nn.gelu(hidden + weights["up_bias"][None, None], approximate=False)
    return active @ weights["down"] + weights["down_bias"][None, None]
