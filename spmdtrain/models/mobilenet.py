"""MobileNetV2: inverted residuals (Sandler et al. 2018, arXiv:1801.04381)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.errors import UserError
from spmdtrain.kernels.reference import moments
from spmdtrain.sharding.placement import current_device

# Expansion, channels, blocks, and stride of the first block: t, c, n and s of table 2.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEM, _HEAD = 32, 1280  # channels before and after the stages


class MobileNetV2(nnx.Module):
    """MobileNetV2, from images (B, H, W, 3) with values in [0, 1] to logits (B, `classes`).

    It has 3,504,872 parameters with `width_multiplier` 1 and 1,000 classes, as published. Padding
    is "SAME", as in the authors' own program and in Keras, so Keras' weights give the same outputs
    (PyTorch pads one pixel on every side, so its weights do not).

    Args:
      classes: Number of classes.
      width_multiplier: Scales the number of channels of each layer.
      dropout: Fraction of the values dropped before the classifier.
      momentum: Decay of the averages of the batch statistics. Keras' 0.999 is for long runs: after
        k steps, 0.999 ** k of the initial values remains. 0.9 works for short runs, too.
      epsilon: Added to the variance.
      rngs: Random streams of the initialization and of dropout.

    Raises:
      UserError: If there is no class, the width is not positive, or dropout or momentum are outside
        [0, 1).
    """

    def __init__(
        self,
        classes: int,
        *,
        width_multiplier: float = 1.0,
        dropout: float = 0.2,
        momentum: float = 0.9,
        epsilon: float = 1e-3,
        rngs: nnx.Rngs,
    ) -> None:
        if classes < 1:
            raise UserError(f"classes is {classes}: it must be 1 or more")
        if not width_multiplier > 0:
            raise UserError(f"width_multiplier is {width_multiplier}: it must be above 0")
        for name, value in (("dropout", dropout), ("batch norm's momentum", momentum)):
            if not 0 <= value < 1:
                raise UserError(f"{name} is {value}: it must be at least 0 and below 1")
        norm = partial(_Norm, momentum=momentum, epsilon=epsilon, rngs=rngs)
        channels = round_channels(width_multiplier * _STEM)
        stem = nnx.Conv(3, channels, (3, 3), strides=2, padding="SAME", use_bias=False, rngs=rngs)
        self.stem = _Layer(stem, norm(channels))
        blocks = []
        for expansion, wide, count, stride in STAGES:
            for number in range(count):
                before, channels = channels, round_channels(width_multiplier * wide)
                first = stride if number == 0 else 1
                blocks.append(_Block(before, channels, expansion, first, norm, rngs))
        self.blocks = nnx.List(blocks)
        last = round_channels(max(1.0, width_multiplier) * _HEAD)
        self.head = _Layer(_pointwise(channels, last, rngs), norm(last))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.classifier = nnx.Linear(last, classes, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.classifier(self.dropout(self.head(x).mean((1, 2))))


def round_channels(channels: float) -> int:
    """Returns the nearest multiple of 8 that is at least 8 and at least 90 % of `channels`.

    Args:
      channels: Number of channels times a width multiplier.
    """
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def depthwise(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Returns a depthwise convolution with "SAME" padding.

    Args:
      x: Images (B, H, W, C).
      kernel: (height, width, 1, C).
      stride: Stride of both dims.

    Returns:
      (B, ceil(H / stride), ceil(W / stride), C).
    """
    if current_device().platform == "cpu":
        return depthwise_by_products(x, kernel, stride)
    return jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )


def depthwise_by_products(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Returns the same as `depthwise`, as a sum of shifted images times values of the kernel.

    On CPU, gradients of XLA's grouped convolutions take 4 to 8 times as long.

    Args:
      x: See `depthwise`.
      kernel: See `depthwise`.
      stride: See `depthwise`.
    """
    height, width = (-(-side // stride) for side in x.shape[1:3])
    sides, strides = kernel.shape[:2], (stride, stride)
    pads = jax.lax.padtype_to_pads(x.shape[1:3], sides, strides, "SAME")
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    total = jnp.zeros((), x.dtype)
    for i in range(sides[0]):
        for j in range(sides[1]):
            shifted = x[:, i : i + stride * height : stride, j : j + stride * width : stride]
            total = total + shifted * kernel[i, j, 0]
    return total


# -- parts -----------------------------------------------------------------------------------------


class _Layer(nnx.Module):
    """A convolution without bias, batch norm, and, unless `linear`, ReLU6."""

    def __init__(
        self, convolution: nnx.Module, norm: nnx.BatchNorm, *, linear: bool = False
    ) -> None:
        self.convolution, self.norm, self.linear = convolution, norm, linear

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.convolution(x)
        # The norm returns f32 for any compute dtype. It is cast back for the next layer.
        x = self.norm(x).astype(x.dtype)
        return x if self.linear else nnx.relu6(x)


class _Block(nnx.Module):
    """An inverted residual: expansion, depthwise convolution, linear projection.

    The input is added if it has the shape of the output.
    """

    def __init__(
        self,
        before: int,
        channels: int,
        expansion: int,
        stride: int,
        norm: "partial[_Norm]",
        rngs: nnx.Rngs,
    ) -> None:
        hidden = expansion * before
        self.expand = (
            None if expansion == 1 else _Layer(_pointwise(before, hidden, rngs), norm(hidden))
        )
        self.depthwise = _Layer(_Depthwise(hidden, stride, rngs), norm(hidden))
        self.project = _Layer(_pointwise(hidden, channels, rngs), norm(channels), linear=True)
        self.adds = stride == 1 and before == channels

    def __call__(self, x: jax.Array) -> jax.Array:
        hidden = x if self.expand is None else self.expand(x)
        projected = self.project(self.depthwise(hidden))
        return x + projected if self.adds else projected


class _Depthwise(nnx.Module):
    """A depthwise 3x3 convolution."""

    def __init__(self, channels: int, stride: int, rngs: nnx.Rngs) -> None:
        draw = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(draw(rngs.params(), (3, 3, 1, channels)))
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        return depthwise(x, self.kernel[...].astype(x.dtype), self.stride)


def _pointwise(before: int, channels: int, rngs: nnx.Rngs) -> nnx.Linear:
    """Returns a 1x1 convolution as a matrix product."""
    return nnx.Linear(before, channels, use_bias=False, rngs=rngs)


class _Norm(nnx.BatchNorm):
    """Batch normalization with one collective for mean and variance.

    Each replica computes the mean and variance of its rows, and they are gathered. Sums of squares
    would need only one collective as well, but lose precision if values are far from 0.
    """

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: jax.Array | None = None,
    ) -> jax.Array:
        fixed = self.use_running_average if use_running_average is None else use_running_average
        if fixed or mask is not None:
            return super().__call__(x, fixed, mask=mask)
        assert self.scale is not None and self.bias is not None  # the defaults of flax
        x = x.astype(self.mean.dtype)
        mean, var = moments(x, near=jax.lax.stop_gradient(self.mean[...]))
        for average, now in ((self.mean, mean), (self.var, var)):
            new = self.momentum * average[...] + (1 - self.momentum) * now
            average[...] = jax.lax.stop_gradient(new)
        return (x - mean) * (jax.lax.rsqrt(var + self.epsilon) * self.scale[...]) + self.bias[...]
