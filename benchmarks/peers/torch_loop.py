"""Eager PyTorch on CPU: its tutorials' loop over tensors in memory; DDP with several processes."""

from gate import Gate
from work import CLASSES, LEARNING_RATE, Work

gate, work = Gate(), Work.from_arguments()

import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

gate.mark("imported")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
torch.manual_seed(0)
images, labels = map(torch.from_numpy, work.arrays())
labels = labels.long()
model: Any = nn.Sequential(
    nn.Flatten(),
    *(nn.Linear(784, 256), nn.ReLU()),
    *(nn.Linear(256, 256), nn.ReLU()),
    nn.Linear(256, CLASSES),
)
if work.processes > 1:
    import torch.distributed

    address = f"tcp://{gate.address}"
    torch.distributed.init_process_group(
        "gloo", init_method=address, world_size=work.processes, rank=gate.rank
    )
    model = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
loss_of = nn.CrossEntropyLoss()
if gate.checks:
    import torch_work

    x, y = torch_work.first_batch(work)
    torch_work.report(
        gate, work, list(model.parameters()), lambda: loss_of(model(x.float() / 255), y)
    )
own = work.batch_size // work.processes


def batches() -> Iterator[tuple[Any, Any]]:
    while True:
        for rows in torch.randperm(len(images)).split(own):
            if len(rows) == own:
                yield images[rows].float() / 255, labels[rows]


stream = batches()
while gate.wait():
    for step in range(work.segment):
        x, y = next(stream)
        optimizer.zero_grad()
        logits = model(x)
        loss = loss_of(logits, y)
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            loss.item(), (logits.argmax(-1) == y).float().mean().item()
            gate.mark("first step")
os._exit(0)
