"""Run by each of two processes: cases under FSDP, one after another, and what each process saw of them.

    LOCAL_RANK=0 python -m tests.support.fsdp_ranks FOLDER [CASE ...] and the same with LOCAL_RANK=1, in a new folder

Leaves ``FOLDER/rank0.json`` and ``rank1.json``. In ``FOLDER`` lies ``one.ckpt``, which one device saved.
"""

from __future__ import annotations

import functools
import json
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard

from compile_callbacks import InductorCompile, compile_phases, report_of, restore
from compile_callbacks._utils.errors import CompileWarning
from tests.support.models import trainer
from tests.support.pairs import join
from tests.support.sharded_models import Block, Blocks, Sharded, Whole, WholeForward, data, loader, two_devices
from tests.support.uncached import Uncached

FOLDER = Path(sys.argv[1]) if len(sys.argv) > 1 else Path()
CASES: dict[str, Callable[[], Any]] = {}


def case(function: Callable[[], Any]) -> Callable[[], Any]:
    CASES[function.__name__] = function
    return function


def fit(
    *callbacks: pl.Callback,
    module: Whole | None = None,
    save: str | None = None,
    full: bool = True,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> Whole:
    module = module or Sharded()
    trainer = two_devices(*callbacks, full=full, **settings)
    trainer.fit(module, loader(2), loader(2), ckpt_path=ckpt_path)
    if save is not None:
        trainer.save_checkpoint(FOLDER / save)
    return module


@functools.cache
def eager(epochs: int) -> Whole:
    return fit(max_epochs=epochs)


def compiler(train: Any = "default", infer: Any = None, **settings: Any) -> InductorCompile:
    return InductorCompile(train, infer, **({"baseline_steps": 0} | settings))


def weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """A copy of all weights, gathered on each rank."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=False)
    return {name: value.clone() for name, value in get_model_state_dict(module, options=options).items()}


def apart(one: Whole, other: Whole) -> dict[str, float]:
    """How far a run lies apart from another, or from the end of a longer one."""
    ours, others = weights(one), weights(other)
    assert ours.keys() == others.keys()
    since = len(other.losses) - len(one.losses)  # what was resumed has the later ones
    assert 0 < len(one.losses) <= len(other.losses)
    return {
        "losses": max(abs(a - b) for a, b in zip(one.losses, other.losses[since:], strict=True)),
        "weights": max(float((ours[name] - others[name]).abs().max()) for name in ours),
        # What moved least: a weight without gradient would stay where it was.
        "moved": min(float((ours[name] - value).abs().max()) for name, value in weights(Whole()).items()),
    }


def counts(ours: InductorCompile) -> dict[str, Any]:
    return {phase: getattr(ours.report, phase).to_dict() for phase in ("train", "infer")}


# ------------------------------------------------------------------------------------------ FSDP2


@case
def fits() -> Any:
    ours = compiler("default", "default")
    compiled = fit(ours, max_epochs=2, save="full.ckpt")
    left = [name for part in compiled.modules() for name in vars(part) if name in ("forward", "_compiled_call_impl")]
    set_ = [part for part in compiled.modules() if getattr(part, "_compiled_call_impl", None) is not None]
    return {"apart": apart(compiled, eager(2)), "report": counts(ours), "left": [*left, *map(str, set_)]}


@case
def saves_in_parts() -> Any:
    fit(compiler(), full=False, save="parts.ckpt")


@case
def resumes_what_two_devices_saved() -> Any:
    """The second epoch, from a checkpoint in parts."""
    return apart(fit(compiler(), full=False, ckpt_path=FOLDER / "parts.ckpt", max_epochs=2), eager(2))


@case
def resumes_what_one_device_saved() -> Any:
    return apart(fit(compiler(), ckpt_path=FOLDER / "one.ckpt", max_epochs=2), eager(2))


@case
def predicts_without_baking_in() -> Any:
    module, ours = fit(), compiler(None, {"freezing": True})
    expected = torch.cat(two_devices().predict(module, loader(2)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = two_devices(ours)
        got = torch.cat(trainer.predict(module, loader(2)))
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(0.5)
        moved = torch.cat(trainer.predict(module, loader(2)))
    moved_expected = torch.cat(two_devices().predict(module, loader(2)))
    return {
        "apart": float((got - expected).abs().max()),
        "apart_moved": float((moved - moved_expected).abs().max()),
        "moved": float((moved - got).abs().max()),
        "warned": [str(one.message) for one in caught if issubclass(one.category, CompileWarning)],
        "report": counts(ours),
    }


@case
def accumulates_and_clips() -> Any:
    settings = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}
    return apart(fit(compiler(), **settings), fit(**settings))


@case
def checkpoints_activations() -> Any:
    module, ours = Sharded(), compiler()
    module.net.checkpoints = True
    return {"apart": apart(fit(ours, module=module), eager(1)), "report": counts(ours)}


class Thaws(pl.Callback):
    """The first block is frozen at first."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.net.layers[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.net.layers[0].requires_grad_(True)


@case
def thaws() -> Any:
    return apart(fit(Thaws(), compiler(), max_epochs=2), fit(Thaws(), max_epochs=2))


@case
def lower_precision() -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    ours = compiler()
    pair = [fit(*one, module=Sharded(policy=policy)) for one in ((ours,), ())]
    return {"apart": apart(*pair), "report": counts(ours)}


@case
def sharded_as_one() -> Any:
    ours = compiler()
    return {"apart": apart(fit(ours, module=Sharded(by_block=False)), eager(1)), "report": counts(ours)}


@case
def one_rank_fails() -> Any:
    """Torch fails to compile the first block, on one rank alone."""
    from torch._inductor import graph

    rank, run, calls = torch.distributed.get_rank(), graph.GraphLowering.run, []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if rank == 1 and len(calls) == 1:
            raise RuntimeError("no code on this rank")
        return run(*args, **kwargs)

    ours = compiler({"passes": [Uncached()]}, None, verify="off")
    graph.GraphLowering.run = failing
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            compiled = fit(ours)
    finally:
        graph.GraphLowering.run = run
    return {"apart": apart(compiled, eager(1)), "report": counts(ours)}


# ------------------------------------------------------------------------------------------ without a Trainer, FSDP1


def steps(net: nn.Module, count: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, y = data().tensors
    half = slice(torch.distributed.get_rank(), None, 2)
    losses = []
    for _ in range(count):
        loss = nn.functional.cross_entropy(net(x[half]), y[half])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(float(net(x[half]).sum()))
    return losses


def built(shard: Callable[[Blocks], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return shard(Blocks())


@case
def without_a_trainer() -> Any:
    mesh = init_device_mesh("cpu", (2,))

    def shard(net: Blocks) -> nn.Module:
        for layer in net.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(net, mesh=mesh)

    return _by_grad_mode(shard)


class OnCPU(FSDPStrategy):
    """Lightning asks for a GPU where the strategy is of its own class, and names its index."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


@case
def fsdp1_in_a_trainer() -> Any:
    """Wrapped by Lightning: the LightningModule as a whole, and each block within it."""
    ours, pair = compiler(), []
    for callbacks in ((ours,), ()):
        module = WholeForward()
        strategy = OnCPU(auto_wrap_policy={Block}, process_group_backend="gloo")
        trainer(*callbacks, devices=2, strategy=strategy, num_sanity_val_steps=0).fit(module, loader(2), loader(2))
        pair.append(module.losses)
    return {"losses": pair[0], "eager": pair[1], "report": counts(ours)}


@case
def fsdp1() -> Any:
    def shard(net: Blocks, **settings: Any) -> nn.Module:
        settings = {"use_orig_params": True, "device_id": torch.device("cpu"), **settings}
        for index, layer in enumerate(net.layers):
            net.layers[index] = FullyShardedDataParallel(layer, **settings)
        return FullyShardedDataParallel(net, **settings)

    found = _by_grad_mode(shard)
    try:
        compile_phases(built(lambda net: shard(net, use_orig_params=False)))
    except ValueError as error:
        found["refused"] = str(error)
    return found


def _by_grad_mode(shard: Callable[[Blocks], nn.Module]) -> dict[str, Any]:
    eager_net, net = built(shard), built(shard)
    compile_phases(net, verify="raise")
    losses = steps(net)
    report = report_of(net).to_dict()
    restore(net)
    return {"losses": losses, "eager": steps(eager_net), "report": report}


def main() -> None:
    join(FOLDER, "group")
    seen: dict[str, Any] = {}
    for name in sys.argv[2:] or CASES:
        try:
            seen[name] = CASES[name]()
        except Exception:
            seen[name] = {"error": traceback.format_exc()}
            break  # the other rank is somewhere else by now
    (FOLDER / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
