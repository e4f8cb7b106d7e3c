"""The work: what is trained on, and with which options. NumPy alone, for all environments."""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE = 1e-3
CLASSES = 10
TOKENS, CONTEXT = 512, 128  # of the transformer


@dataclass(frozen=True)
class Work:
    """One line of a table: a workload at one batch size on so many devices."""

    workload: str
    """mlp, resnet, transformer, leaves, rows or images."""
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
        if self.workload == "transformer":
            tokens = draws.integers(0, TOKENS, (20_000, CONTEXT + 1), np.int32)
            return tokens[:, :-1].copy(), tokens[:, 1:].copy()
        if self.workload == "leaves":
            return draws.normal(size=(60_000, 4)).astype(np.float32), np.zeros(60_000, np.int32)
        shape = (32, 32, 3) if self.workload == "resnet" else (28, 28)
        images = draws.integers(0, 256, (60_000, *shape), np.uint8)
        return images, draws.integers(0, CLASSES, len(images)).astype(np.int32)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
