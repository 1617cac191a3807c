"""Use a loop without a Trainer: `compile_phases` compiles a module for training and for inference.

One call compiles the module in place. The grad mode of each later call decides its phase, so evaluation needs only
`torch.no_grad()` or `torch.inference_mode()`. `report_of` returns the report, and `restore` removes the compiled code.
Modules of Lightning Fabric work in the same way.

    python examples/plain_loop.py
"""

import torch
from digits import check, digits
from torch import nn
from torch.utils.data import DataLoader

from compile_callbacks import compile_phases, report_of, restore


def main(epochs=6):
    torch.manual_seed(0)
    train, val = digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 10))
    keys = list(model.state_dict())
    compile_phases(model, train_mode="default", infer_mode={"template": "aten"})
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    for epoch in range(epochs):
        model.train()
        for images, labels in DataLoader(train, 64, shuffle=True):
            loss = nn.functional.cross_entropy(model(images), labels)  # the train settings: grad is enabled
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.eval()
        with torch.no_grad():  # the infer settings
            correct = torch.cat([model(images).argmax(dim=1) == labels for images, labels in DataLoader(val, 64)])
        accuracy = correct.float().mean().item()
        print(f"epoch {epoch}  loss {loss.item():.3f}  accuracy {accuracy:.4f}")

    report = report_of(model)
    print(report)
    check(report.train.graphs == 1 and report.infer.graphs == 1, "a graph for each phase")
    check(list(model.state_dict()) == keys, "the module has the keys that it had")
    check(accuracy > 0.9, "it learns to read digits")
    restore(model)
    with torch.no_grad():
        eager = torch.cat([model(images).argmax(dim=1) == labels for images, labels in DataLoader(val, 64)])
    check(torch.equal(eager, correct), "eager gives the same answers")


if __name__ == "__main__":
    main()
