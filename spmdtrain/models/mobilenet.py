"""MobileNetV2: inverted residuals (Sandler et al. 2018, arXiv:1801.04381)."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from spmdtrain.errors import UserError
from spmdtrain.sharding.placement import constrain_sharding, current_batch_shards, current_device

# Expansion, channels, blocks, and the stride of the first of them: t, c, n and s of table 2.
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
    """Pictures (B, H, W, 3), values in [0, 1], to logits (B, `classes`).

    As published: with `width_multiplier` 1 and 1,000 classes 3,504,872 parameters. Padding is
    "SAME", as in the authors' own program and in Keras, whose weights give the same numbers here
    (PyTorch's pad one pixel on every side, and do not). `momentum` is what the averages of the
    batch statistics keep at each step: Keras' 0.999 is for long runs, as after k steps
    0.999 ** k of them is still what they were at first; 0.9 serves short ones, too.

    Raises `UserError` for fewer than 1 class, a width that is not positive, and a dropout or
    momentum outside [0, 1).
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
            raise UserError(f"{classes} classes: there must be 1 or more")
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
    """The nearest multiple of 8, but at least 8, and the next one where it is 10 % too few."""
    rounded = max(8, int(channels + 4) // 8 * 8)
    return rounded if rounded >= 0.9 * channels else rounded + 8


def depthwise(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    """Each channel convolved with its own part of the kernel, "SAME" padding.

    (B, H, W, C) and (height, width, 1, C) to (B, ceil(H / stride), ceil(W / stride), C).
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
    """The same, as a sum of shifted pictures times one value of the kernel each.

    On a CPU, gradients of XLA's grouped convolutions take 4 to 8 times as long as these.
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
        # In f32, whatever the model computes in; then back, as the next layer takes what it gets.
        x = self.norm(x).astype(x.dtype)
        return x if self.linear else nnx.relu6(x)


class _Block(nnx.Module):
    """An inverted residual: to many channels, depthwise, and back to few, linearly.

    Where what comes out has the shape of what came in, their sum.
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
        found = self.project(self.depthwise(hidden))
        return x + found if self.adds else found


class _Depthwise(nnx.Module):
    """A 3x3 kernel for each channel."""

    def __init__(self, channels: int, stride: int, rngs: nnx.Rngs) -> None:
        draw = nnx.initializers.lecun_normal()
        self.kernel = nnx.Param(draw(rngs.params(), (3, 3, 1, channels)))
        self.stride = stride

    def __call__(self, x: jax.Array) -> jax.Array:
        return depthwise(x, self.kernel[...].astype(x.dtype), self.stride)


def _pointwise(before: int, channels: int, rngs: nnx.Rngs) -> nnx.Linear:
    """A 1x1 convolution: each pixel's channels times a matrix."""
    return nnx.Linear(before, channels, use_bias=False, rngs=rngs)


class _Norm(nnx.BatchNorm):
    """Batch normalization whose mean and variance travel in one collective.

    Each replica takes the mean and variance of its own rows, and all gather those of all. Sums of
    squares would be one collective, too, but lose digits where values are far from 0.
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
        mean, var = moments(x)
        for average, now in ((self.mean, mean), (self.var, var)):
            new = self.momentum * average[...] + (1 - self.momentum) * now
            average[...] = jax.lax.stop_gradient(new)
        return (x - mean) * (jax.lax.rsqrt(var + self.epsilon) * self.scale[...]) + self.bias[...]


def moments(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of each channel over the global batch.

    Args:
      x: Values (B, ..., C), B split over the replicas.

    Returns:
      Two arrays (C,): the variance is that of all rows, whatever parts they were split into (Chan,
      Golub and LeVeque 1983).
    """
    parts = current_batch_shards()
    if len(x) % parts:
        parts = 1
    rows = x.reshape(parts, len(x) // parts, *x.shape[1:])
    dims = tuple(range(1, rows.ndim - 1))
    means = rows.mean(dims, keepdims=True)
    variances = jnp.square(rows - means).mean(dims)
    both = jnp.stack([means.reshape(variances.shape), variances])
    means, variances = constrain_sharding(both, None, None, None)
    mean = means.mean(0)
    return mean, (variances + jnp.square(means - mean)).mean(0)
