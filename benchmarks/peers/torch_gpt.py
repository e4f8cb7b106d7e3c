"""A PyTorch transformer for accelerators: `torch.compile`, fused attention and optimizer."""

from gate import Gate
from work import LEARNING_RATE, TRANSFORMERS, Work

gate, work = Gate(), Work.from_arguments()

import itertools
import math
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn import functional

gate.mark("imported")
shape = TRANSFORMERS[work.workload]
device = "cuda" if work.accelerator else "cpu"
if work.accelerator:
    gate.device_peak = torch.cuda.max_memory_allocated
torch.manual_seed(0)
torch.set_float32_matmul_precision("high")


half = shape.width // shape.heads // 2
speeds = torch.exp(-math.log(10_000) / half * torch.arange(half))
angles = torch.arange(shape.context)[:, None] * speeds
cosines, sines = angles.cos().to(device), angles.sin().to(device)


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Applies rotary position embeddings to (B, heads, T, width)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat([a * cosines - b * sines, a * sines + b * cosines], dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = shape.width
        self.norms = nn.ModuleList([nn.RMSNorm(width, eps=1e-6) for _ in range(2)])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        heads = (rows, length, shape.heads, width // shape.heads)
        query, key, value = (
            part.view(heads).transpose(1, 2)
            for part in self.qkv(self.norms[0](x)).split(width, dim=-1)
        )
        if not shape.learned:
            query, key = rotate(query), rotate(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(functional.relu(self.up(self.norms[1](x))).square())


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.rows, shape.width)
        self.positions: Any = 0.0
        if shape.learned:
            self.positions = nn.Parameter(torch.randn(shape.context, shape.width) * 0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(shape.layers)))
        self.norm = nn.RMSNorm(shape.width, eps=1e-6)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.embedding(tokens) + self.positions)
        return functional.linear(self.norm(x), self.embedding.weight)


model = Transformer().to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)


@torch.compile
def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    with torch.autocast(device, torch.bfloat16, enabled=shape.sixteen_bits):
        logits = model(tokens)
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


if gate.checks:
    import torch_work

    kept = [model.embedding.weight] + ([model.positions] if shape.learned else [])
    params = [*kept]
    for block in model.blocks:
        params += [block.norms[0].weight, block.qkv.weight, block.out.weight]
        params += [block.norms[1].weight, block.up.weight, block.down.weight]
    x, y = (part.to(device) for part in torch_work.first_batch(work))
    torch_work.report(gate, work, [*params, model.norm.weight], lambda: loss_of(x, y), kept)

inputs, targets = (torch.from_numpy(x) for x in work.arrays())


def batches() -> Iterator[tuple[Any, Any]]:
    while True:
        for rows in torch.randperm(len(inputs)).split(work.batch_size):
            if len(rows) == work.batch_size:
                batch = inputs[rows], targets[rows].long()
                if work.accelerator:
                    batch = batch[0].pin_memory(), batch[1].pin_memory()
                yield batch[0].to(device, non_blocking=True), batch[1].to(device, non_blocking=True)


stream = batches()
while gate.wait():
    for step, (x, y) in enumerate(itertools.islice(stream, work.segment)):
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            loss.item()
            gate.mark("first step")
    if work.accelerator:
        torch.cuda.synchronize()
os._exit(0)
