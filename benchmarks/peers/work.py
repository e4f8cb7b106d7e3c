"""Workloads: data and options. Imports only NumPy, for all environments."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
CLASSES = 10
ROWS = 64_000  # similar to MNIST: 2,000 batches of 32, a whole number of dispatches


@dataclass(frozen=True)
class Shape:
    """Shape of a transformer: pre-norm blocks with RMSNorm, causal attention, squared ReLU."""

    tokens: int
    rows: int
    """Rows of the embedding, which also computes the logits."""
    layers: int
    width: int
    heads: int
    context: int
    learned: bool
    """Whether positions are learned vectors instead of rotations."""
    sixteen_bits: bool
    """Whether to compute in bfloat16; parameters are float32."""

    @property
    def flops(self) -> float:
        """FLOPs of a training step per token: 6 per parameter in a product, plus attention.

        Counted as by Chowdhery et al., PaLM (2022), appendix B: twelve times layers, width and
        context for attention, although half of the pairs are masked.
        """
        return 6 * (12 * self.layers * self.width**2 + self.rows * self.width) + (
            12 * self.layers * self.width * self.context
        )


TRANSFORMERS = {
    "transformer": Shape(512, 512, 6, 384, 6, 128, learned=False, sixteen_bits=False),
    "gpt2-small": Shape(50_257, 50_304, 12, 768, 12, 1024, learned=True, sixteen_bits=True),
}


@dataclass(frozen=True)
class Work:
    """A workload with its batch size and devices."""

    workload: str
    """mlp, resnet, leaves, images, or one of TRANSFORMERS."""
    batch_size: int
    segment: int
    """Steps from one gate to the next."""
    devices: int = 1
    """Virtual devices of each process."""
    processes: int = 1
    per_dispatch: int = 0
    """Steps in one dispatch, if the peer supports it; 0 for its default."""
    leaves: int = 0
    """Number of parameter arrays of the workload `leaves`."""
    data: str = ""
    """The folder of images."""
    accelerator: int = 0
    """1 for the machine's accelerator, 0 for its CPU."""

    @classmethod
    def from_arguments(cls) -> "Work":
        """Parses the command line of a peer and ignores unknown arguments."""
        parser = argparse.ArgumentParser()
        for field in dataclasses.fields(cls):
            required = field.default is dataclasses.MISSING
            default = None if required else field.default
            kind: Any = field.type
            parser.add_argument(_flag(field.name), type=kind, required=required, default=default)
        return cls(**vars(parser.parse_known_args()[0]))

    @property
    def arguments(self) -> list[str]:
        """Command-line arguments for `from_arguments`."""
        return [f"{_flag(name)}={value}" for name, value in vars(self).items()]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns inputs and targets; the speed of a peer does not depend on their values."""
        draws = np.random.default_rng(0)
        if shape := TRANSFORMERS.get(self.workload):
            tokens = draws.integers(0, shape.tokens, (20_000, shape.context + 1), np.int32)
            return tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if self.workload == "leaves":
            return draws.normal(size=(ROWS, 4)).astype(np.float32), np.zeros(ROWS, np.int32)
        image = (32, 32, 3) if self.workload == "resnet" else (28, 28)
        images = draws.integers(0, 256, (ROWS, *image), np.uint8)
        return images, draws.integers(0, CLASSES, len(images)).astype(np.int32)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
