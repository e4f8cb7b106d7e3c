"""Reports the work of a training step in PyTorch, for `Gate.report_work`."""

from collections.abc import Callable, Sequence

import torch
from gate import Gate
from same_work import first_batch as arrays
from same_work import weights
from torch.utils.flop_counter import FlopCounterMode
from work import Work


def first_batch(work: Work) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the inputs and the targets of `same_work`."""
    inputs, targets = arrays(work)
    return torch.from_numpy(inputs), torch.from_numpy(targets).long()


def report(
    gate: Gate,
    work: Work,
    params: Sequence[torch.Tensor],
    loss: Callable[[], torch.Tensor],
    kept: Sequence[torch.Tensor] = (),
) -> None:
    """Gives a model the weights of `same_work`, and reports its step.

    Args:
        gate: The gate of the peer.
        work: The workload.
        params: All parameters in the order in which the model uses them. Those of `nn.Linear` are
            transposed.
        loss: Returns the mean loss of the first batch.
        kept: The arrays with two dims that are not transposed (embeddings).
    """
    with torch.no_grad():
        for param, array in zip(params, weights(work), strict=True):
            value = torch.from_numpy(array)
            if param.dim() == 2 and not any(param is x for x in kept):
                value = value.reshape(param.shape[1], param.shape[0]).T
            param.copy_(value)
    with FlopCounterMode(display=False) as counter:
        value = loss()
        value.backward()
    dtypes = "+".join(sorted({str(x.dtype).removeprefix("torch.") for x in params}))
    count = sum(x.numel() for x in params)
    gate.report_work(value.item(), count, counter.get_total_flops(), dtypes)
