"""PyTorch Lightning: `Trainer.fit` on CPU with its defaults, one epoch per segment."""

from gate import Gate
from work import CLASSES, LEARNING_RATE, Work

gate, work = Gate(), Work.from_arguments()

import os
import tempfile
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

gate.mark("imported")
torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(784, 256), nn.ReLU()),
            *(nn.Linear(256, 256), nn.ReLU()),
            nn.Linear(256, CLASSES),
        )

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        x, y = batch
        logits = self.layers(x.float() / 255)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, prog_bar=True)
        gate.mark("first step")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

    def on_train_epoch_start(self) -> None:
        gate.wait() or os._exit(0)


if gate.checks:
    import torch_work

    model = Classifier()
    x, y = torch_work.first_batch(work)
    entropy = nn.functional.cross_entropy
    params = list(model.parameters())
    torch_work.report(gate, work, params, lambda: entropy(model.layers(x.float() / 255), y))

images, labels = work.arrays()
rows = work.segment * work.batch_size
data = TensorDataset(torch.from_numpy(images[:rows]), torch.from_numpy(labels[:rows]).long())
with tempfile.TemporaryDirectory() as folder:
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=10**6, default_root_dir=folder)
    trainer.fit(Classifier(), DataLoader(data, batch_size=work.batch_size, shuffle=True))
