"""The work: what is trained on, and with which options. NumPy alone, for all environments."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
CLASSES = 10
ROWS = 64_000  # about MNIST's: 2,000 batches of 32, a round number of dispatches


@dataclass(frozen=True)
class Shape:
    """Of a transformer: pre-norm blocks with RMS norms, causal attention, squared ReLU."""

    tokens: int
    rows: int
    """Of the embedding, which also makes the logits."""
    layers: int
    width: int
    heads: int
    context: int
    learned: bool
    """Positions are a vector each, and not rotations."""
    sixteen_bits: bool
    """bfloat16 is what is computed with; parameters are float32."""

    @property
    def flops(self) -> float:
        """Of a training step, for each token: 6 for each parameter that multiplies, and attention.

        As counted by Chowdhery et al., PaLM (2022), appendix B: twelve times layers, width and
        context for attention, though half of the pairs are masked.
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
    """One line of a table: a workload at one batch size on so many devices."""

    workload: str
    """mlp, resnet, leaves, images, or one of TRANSFORMERS."""
    batch_size: int
    segment: int
    """Steps that are made from one gate to the next."""
    devices: int = 1
    """Virtual devices, of each process."""
    processes: int = 1
    per_dispatch: int = 1
    """Steps in one dispatch, where the peer can do so."""
    leaves: int = 0
    """Arrays of parameters, of the workload `leaves`."""
    data: str = ""
    """The folder of images."""
    accelerator: int = 0
    """1 where the work is for the machine's accelerator, 0 for its processor."""

    @classmethod
    def from_arguments(cls) -> "Work":
        parser = argparse.ArgumentParser()
        for field in dataclasses.fields(cls):
            required = field.default is dataclasses.MISSING
            default = None if required else field.default
            kind: Any = field.type
            parser.add_argument(_flag(field.name), type=kind, required=required, default=default)
        return cls(**vars(parser.parse_known_args()[0]))

    @property
    def arguments(self) -> list[str]:
        """What `from_arguments` reads."""
        return [f"{_flag(name)}={value}" for name, value in vars(self).items()]

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and targets, in memory; no peer's speed depends on what is in them."""
        draws = np.random.default_rng(0)
        if made := TRANSFORMERS.get(self.workload):
            tokens = draws.integers(0, made.tokens, (20_000, made.context + 1), np.int32)
            return tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if self.workload == "leaves":
            return draws.normal(size=(ROWS, 4)).astype(np.float32), np.zeros(ROWS, np.int32)
        shape = (32, 32, 3) if self.workload == "resnet" else (28, 28)
        images = draws.integers(0, 256, (ROWS, *shape), np.uint8)
        return images, draws.integers(0, CLASSES, len(images)).astype(np.int32)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
