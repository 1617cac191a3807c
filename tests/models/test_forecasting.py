"""pytorch-forecasting and neuralforecast: models of time series."""

from __future__ import annotations

import functools
from typing import Any

import torch

from compile_callbacks import InductorCompile
from tests.models.trial import Trial


@functools.cache
def series():
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import TimeSeriesDataSet

    rng = np.random.default_rng(0)
    times = np.arange(60)
    values = [np.sin(times / 5 + group) + 0.1 * rng.standard_normal(60) for group in range(4)]
    frames = [pd.DataFrame({"value": v, "time": times, "group": str(group)}) for group, v in enumerate(values)]
    data = pd.concat(frames, ignore_index=True).astype({"value": "float32"})
    return TimeSeriesDataSet(
        data, time_idx="time", target="value", group_ids=["group"], max_encoder_length=12, max_prediction_length=4,
        time_varying_unknown_reals=["value"], min_encoder_length=6, static_categoricals=["group"],
        time_varying_known_reals=["time"], add_relative_time_idx=True, add_encoder_length=True,
    )  # fmt: skip


def tft():
    from pytorch_forecasting import TemporalFusionTransformer

    return TemporalFusionTransformer.from_dataset(
        series(), hidden_size=16, attention_head_size=2, hidden_continuous_size=8, dropout=0.0,
        optimizer="sgd", learning_rate=0.01, log_interval=-1,
    )  # fmt: skip


def batches(*, train: bool):
    return series().to_dataloader(train=train, batch_size=16 if train else 32, num_workers=0)


TRIALS = [
    Trial(
        name="pytorch-forecasting TFT",
        make=tft,
        train=functools.partial(batches, train=True),
        validate=functools.partial(batches, train=False),
        settings={"limit_train_batches": 10, "gradient_clip_val": 0.1},
    )
]


def train_nhits(*callbacks: Any) -> list[Any]:
    """Train NHITS, whose Trainer is that of the package ``pytorch_lightning``."""
    import numpy as np
    import pandas as pd
    from neuralforecast import NeuralForecast
    from neuralforecast.models import NHITS

    rng = np.random.default_rng(0)
    dates = pd.date_range("2020-01-01", periods=80, freq="D")
    frames = [
        pd.DataFrame({"unique_id": str(i), "ds": dates, "y": np.sin(np.arange(80) / 5 + i) + rng.normal(size=80) / 10})
        for i in range(4)
    ]
    model = NHITS(
        h=4, input_size=12, max_steps=40, mlp_units=3 * [[16, 16]], random_seed=1, accelerator="cpu",
        enable_progress_bar=False, enable_model_summary=False, logger=False, enable_checkpointing=False,
        callbacks=list(callbacks), optimizer=torch.optim.SGD, optimizer_kwargs={"lr": 0.01}, learning_rate=0.01,
    )  # fmt: skip
    forecast = NeuralForecast(models=[model], freq="D")
    forecast.fit(pd.concat(frames), val_size=0)
    predicted = forecast.predict()["NHITS"].to_numpy()
    losses = [torch.tensor(loss) for _, loss in model.train_trajectories]
    return [losses, torch.from_numpy(predicted), dict(model.state_dict())]


def test_neuralforecast_equals_eager():
    callback = InductorCompile(baseline_steps=5)
    torch.testing.assert_close(train_nhits(callback), train_nhits(), rtol=1e-3, atol=1e-4)
    assert callback.report.train.graphs
