"""Steps with CUDA graphs equal eager steps in situations of ordinary training, validation and prediction."""

from __future__ import annotations

import dataclasses
import gc
import os
import subprocess
import sys

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, StochasticWeightAveraging
from torch import nn
from torch._inductor import cudagraph_trees
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from compile_callbacks import InductorCompile
from tests.cases import zoo
from tests.cases.case import Case, check, net
from tests.support.models import CLASSES, FEATURES, Classifier, Manual, Wrapper, fit, loader, mlp, seeded, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*(training batches|not have many|Profiler clears|non-leaf|not a leaf)"),
]

MODE, TRIED = "fast", ["reduce-overhead", "default"]
ANY = {f"{phase}.{name}": ... for phase in ("train", "infer") for name in ("graphs", "graph_breaks", "recompiles")}
ANY |= {f"{phase}.diagnostics.eager_calls": ... for phase in ("train", "infer")}


def around(call):
    """Make a `Classifier` that trains with a function of its network and a batch."""

    class Calls(Classifier):
        def logits(self, x):
            return call(self.net, x)

    return Calls


class Checkpointed(Wrapper):
    def forward(self, x):
        return checkpoint(self.net, x, use_reentrant=False)


class Gan(Classifier):
    """Two networks in turn with manual optimization. A step calls the second one three times."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.net = (
            nn.Sequential(nn.Linear(n, 16), nn.Tanh(), nn.Linear(16, FEATURES)) for n in (4, FEATURES)
        )

    def training_step(self, batch, batch_idx):
        x, _ = batch
        first, second = self.optimizers()
        fake = self.generator(x[:, :4])
        critic = (self.net(x) - self.net(fake.detach())).square().mean()
        first.zero_grad()
        self.manual_backward(critic)
        first.step()
        self.toggle_optimizer(second)
        loss = self.net(fake).square().mean()
        second.zero_grad()
        self.manual_backward(loss)
        second.step()
        self.untoggle_optimizer(second)
        self.losses.append(loss.item())

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), 0.01, eps=1e-3) for part in (self.net, self.generator)]


class Keeps(Classifier):
    """Keeps outputs across steps: in a list, by a hook, in a metric and in the log."""

    def __init__(self):
        super().__init__()
        self.outputs, self.hooked, self.metric = [], [], MeanMetric()
        self.net[0].register_forward_hook(lambda module, args, result: self.hooked.append(result.detach()))

    def training_step(self, batch, batch_idx):
        out = self.net(batch[0])
        self.outputs.append(out.detach())
        self.metric.update(out.detach())
        self.log("first", out[0, 0], on_step=True)
        self.log("metric", self.metric, on_epoch=True)
        loss = nn.functional.cross_entropy(out, batch[1])
        if len(self.outputs) > 3:
            loss = loss + (self.outputs[-3].detach() - out).square().mean()
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.losses = [float(loss) for loss in self.losses]
        self.kept, self.of_hooks = torch.cat(self.outputs), torch.cat(self.hooked)
        self.outputs.clear()
        self.hooked.clear()


class Swaps(pl.Callback):
    """Validates and predicts with an average of the weights, as EMA callbacks do."""

    average = None

    def on_train_batch_end(self, trainer, pl_module, *args):
        now = {name: weight.detach().clone() for name, weight in pl_module.named_parameters()}
        self.average = {n: w if self.average is None else self.average[n].lerp(w, 0.3) for n, w in now.items()}

    def on_validation_start(self, trainer, pl_module):
        if self.average is not None:
            self.own = {name: weight.detach().clone() for name, weight in pl_module.named_parameters()}
            self._set(pl_module, self.average)

    def on_validation_end(self, trainer, pl_module):
        if self.average is not None:
            self._set(pl_module, self.own)

    @torch.no_grad()
    def _set(self, module, weights):
        for name, weight in module.named_parameters():
            weight.copy_(weights[name])


class WithBackbone(Classifier):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES)))

    @property
    def backbone(self):
        return self.net[0]

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], 0.1)


class Lengths(Wrapper):
    """Pads nothing: a sequence of any length gives one vector."""

    def forward(self, x):
        return self.net(x).mean(dim=1)


def sequences(lengths):
    generator = torch.Generator().manual_seed(0)
    batches = [(torch.randn(4, n, FEATURES, generator=generator), torch.arange(4) % CLASSES) for n in lengths]
    return lambda: torch.utils.data.DataLoader(batches, batch_size=None)


def recurrent():
    return Lengths(nn.Sequential(nn.Linear(FEATURES, 16), nn.GELU(), nn.Linear(16, CLASSES)))


MANY = [3 + (7 * i) % 40 for i in range(40)]
CASES = [
    Case(name="accumulation", trainer={"accumulate_grad_batches": 2}),
    Case(name="accumulation and clipping", trainer={"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    Case(name="manual", make=Manual),
    Case(name="gan", make=Gan),
    Case(name="keeps outputs", make=Keeps, trainer={"max_epochs": 2}),
    Case(name="swa", others=lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=2)], trainer={"max_epochs": 4}),
    Case(name="swaps weights", others=lambda: [Swaps()], trainer={"max_epochs": 3}),
    Case(
        name="unfreezes a backbone",
        make=WithBackbone,
        others=lambda: [BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)],
        trainer={"max_epochs": 4},
    ),
    Case(name="activation checkpoint", make=net(lambda: Checkpointed(zoo.smooth()))),
    Case(name="smaller last batch", train=(4,) * 9 + (3,), validation=(4, 4, 2), trainer={"max_epochs": 3}),
    *(
        Case(name=f"12 epochs of {n}", train=(4,) * (n - 1) + (3,), trainer={"max_epochs": 12})
        for n in (3, 5, 7, 13, 40)
    ),
    *(
        Case(name=f"{kind} lengths", make=net(recurrent), train=sequences(lengths), validation=None, predict=None)
        for kind, lengths in (("40", MANY), ("sorted", sorted(MANY)))
    ),
    Case(name="three calls", make=around(lambda net, x: net(x) + net(x.sin()) + net(x.cos()))),
    Case(name="anomaly detection", trainer={"detect_anomaly": True}),
    Case(name="profiler", inside=torch.profiler.profile),
]


@pytest.mark.parametrize(("mode", "baseline_steps"), [("reduce-overhead", 0), ("fast", 10)])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_training_validation_and_prediction_equal_eager(case, mode, baseline_steps):
    settings = {"train_mode": mode, "infer_mode": mode, "baseline_steps": baseline_steps, "verify": "warn"}
    expect = ANY | {"train.verified": ..., "infer.verified": ...}
    codes = {"codes": (), "expect": expect, "close": {"rtol": 2e-3, "atol": 2e-4}}
    ours = dataclasses.replace(case, callback=settings, trainer={"accelerator": "gpu", **case.trainer}, **codes)
    report = check(ours).report
    assert report.train.graphs or baseline_steps
    varies = mode == "fast" and "lengths" in case.name
    assert report.train.mode == ("default" if varies else "reduce-overhead"), report.train.mode_reason


class TwoNetworks(Classifier):
    """Two networks in a step, and a function that the user has compiled."""

    def __init__(self):
        super().__init__()
        self.other = mlp()
        self.compiled = torch.compile(torch.sigmoid)

    def logits(self, x):
        return self.compiled(self.net(x)) + self.other(x)


def test_a_function_that_the_user_compiled_and_two_networks():
    runs = []
    for callbacks in ([], [InductorCompile(MODE, MODE, baseline_steps=3)]):
        module = seeded(TwoNetworks)
        trainer(*callbacks, accelerator="gpu", max_epochs=2).fit(module, loader(12))
        runs.append((module.losses, module.cpu().state_dict()))
    torch.testing.assert_close(*runs, rtol=2e-3, atol=2e-4)


def test_a_large_batch_after_a_small_one_in_other_stages():
    ours, module = InductorCompile(MODE, MODE, baseline_steps=4), seeded()
    trainer(ours, accelerator="gpu").validate(module, loader(24, batch_size=64), verbose=False)
    predictions = trainer(ours, accelerator="gpu").predict(module, loader(24, batch_size=1))
    assert (ours.report.infer.mode, ours.report.infer.graphs) == ("reduce-overhead", 2)  # each of one batch size
    x = torch.cat([batch[0] for batch in loader(24, batch_size=1)])
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(predictions).cpu(), module.cpu().eval()(x), rtol=1e-3, atol=1e-4)


def test_a_module_that_stays_compiled_trains_in_a_loop_of_the_user():
    losses = []
    for callbacks in ([], [InductorCompile(MODE, MODE, baseline_steps=2, keep_compiled=True)]):
        module = seeded()
        trainer(*callbacks, accelerator="gpu").fit(module, loader(12))
        module.cuda().train()
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        outputs = []
        for x, y in loader(8):
            out = module(x.cuda())
            outputs.append(out.detach())
            loss = nn.functional.cross_entropy(out, y.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append((module.losses, outputs))
    torch.testing.assert_close(*losses, rtol=2e-3, atol=2e-4)


def test_the_memory_of_an_earlier_trainer_is_freed():
    sizes = []
    for _ in range(3):
        net = nn.Sequential(nn.Linear(FEATURES, 4096), nn.Tanh(), nn.Linear(4096, CLASSES))
        trainer(InductorCompile(MODE, MODE, baseline_steps=2), accelerator="gpu").fit(Classifier(net), loader(12, 1024))
        del net
        gc.collect()
        torch.cuda.empty_cache()
        sizes.append(torch.cuda.memory_reserved())
    assert sizes[2] <= sizes[0] + 2**21


def test_two_equal_runs_are_bit_equal():
    runs = []
    for _ in range(2):
        module = seeded()
        settings = {"accelerator": "gpu", "deterministic": True, "max_epochs": 2}
        trainer(InductorCompile(MODE, MODE, baseline_steps=4), **settings).fit(module, loader(12))
        runs.append((module.losses, module.state_dict()))
    torch.testing.assert_close(*runs, rtol=0, atol=0)
    torch.use_deterministic_algorithms(False)


SCRIPT = """
import torch
from tests.gpu.test_cuda_graphs import MODE
from compile_callbacks import InductorCompile
from tests.support.models import fit
losses = [fit(*c, train=20, accelerator="gpu").losses for c in ([], [InductorCompile(MODE, MODE, baseline_steps=4)])]
torch.testing.assert_close(*losses, rtol=2e-3, atol=2e-4)
"""


def test_the_allocator_may_use_expandable_segments():
    environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    environment |= {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("node", "method"), [("CUDAWarmupNode", "run"), ("CUDAGraphNode", "_record")])
def test_a_capture_without_memory_lets_the_phase_go_on_in_default(node, method, monkeypatch):
    of_torch, raised = getattr(cudagraph_trees, node), []
    original = getattr(of_torch, method)

    def without_memory(*args):
        if not raised:  # in the forward pass
            raised.append(method)
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(*args)

    monkeypatch.setattr(of_torch, method, without_memory)
    ours = InductorCompile(MODE, MODE, baseline_steps=4)
    losses = [fit(*callbacks, train=20, accelerator="gpu").losses for callbacks in ([], [ours])]
    torch.testing.assert_close(*losses, rtol=2e-3, atol=2e-4)
    train = ours.report.train
    assert raised
    assert (train.mode, train.mode_reason) == ("default", "the CUDA graphs need more memory than is free")
    assert train.diagnostics.eager_calls == {"net": 1}


class Wide(Wrapper):
    """Saves twelve activations of 64 MiB for the backward pass."""

    def forward(self, x):
        x = self.net[0](x)
        for _ in range(6):
            x = x + self.net[1](x).tanh()
        return self.net[2](x) / 100  # or the losses explode


def test_the_largest_batch_that_fits_in_default_also_fits_in_fast():
    def one_run(mode):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        layers = (nn.Linear(*sizes) for sizes in ((FEATURES, 1024), (1024, 1024), (1024, CLASSES)))
        module = seeded(lambda: Classifier(Wide(nn.Sequential(*layers))))
        trainer(InductorCompile(mode, None, baseline_steps=2), accelerator="gpu").fit(module, loader(12, 2**14))
        module.cpu()
        return module.losses, torch.cuda.max_memory_reserved()

    expected, needed = one_run("default")
    torch.cuda.set_per_process_memory_fraction(1.05 * needed / torch.cuda.get_device_properties(0).total_memory)
    try:
        losses, _ = one_run(MODE)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=2e-4)


def test_auto_begins_with_what_fast_would_become():
    ours = InductorCompile("auto", None)
    fit(ours, train=60, accelerator="gpu")
    assert [trial["candidate"] for trial in ours.report.train.diagnostics.trials][:3] == ["eager", *TRIED]
