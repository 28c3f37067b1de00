"""An exact script that uses Accelerate, for `tierckpt prove`."""

from __future__ import annotations

import torch
from accelerate import Accelerator

from tierckpt.accelerate import attach

STEPS_AN_EPOCH = 6


def main() -> None:
    torch.manual_seed(7)
    accelerator = Accelerator(cpu=True)
    inputs = torch.randn(2 * 4 * STEPS_AN_EPOCH, 5)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
    prepared = accelerator.prepare(model, optimizer, loader, scheduler)
    model, optimizer, loader, scheduler = prepared
    with attach(accelerator, path="ckpts") as ckpt:
        loader = ckpt.resume(loader)
        for _ in range(loader.epoch, 20):
            for batch, target in loader:
                accelerator.backward(torch.nn.functional.mse_loss(model(batch), target))
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                ckpt.step()
    accelerator.end_training()


if __name__ == "__main__":
    main()
