"""Settings that are loaded from data cannot run code or a command."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from compile_callbacks import InductorBackend, InductorCompile, InductorConfig, Tune, graph_pass

pytestmark = pytest.mark.all_versions

REFUSED = {
    "cpp.cxx": "/tmp/planted",
    "cuda.arch": "90 -wrapper /tmp/planted",
    "cuda.cuda_cxx": "/tmp/planted",
    "cuda.cutlass_dir": "/tmp/planted",
    "rocm.rocm_home": "/tmp/planted",
    "global_cache_dir": "/tmp/planted",
    "trace.debug_dir": "/tmp/planted",
    "aot_inductor.output_path": "/tmp/planted",
    "aot_inductor.custom_op_libs": ["/tmp/planted.so"],
    "aot_inductor.metadata": {"a": "b"},
    "post_grad_custom_post_pass": "planted:run",
    "pre-grad-custom-pass": "planted:run",
    "max_autotune_gemm_backends": "ATEN,/tmp/planted",
}
ACCEPTED = {
    "max_autotune": True,
    "trace.debug_dir": None,
    "epilogue_fusion": False,
    "max-autotune-gemm-backends": "ATEN,CPP",
    "max_autotune_conv_backends": "ATEN",
    "max_autotune_gemm_search_space": "EXHAUSTIVE",
    "cpp.descriptive_names": "torch",
    "triton.multi_kernel": 1,
    "cpp.min_chunk_size": 512,
}


@graph_pass
def changes_nothing(graph: torch.fx.Graph, is_inference: bool) -> None:
    pass


REFERENCE = f"{__name__}:changes_nothing"


def saved_backend() -> dict[str, object]:
    backend = InductorBackend().build(nn.ReLU(), [((torch.ones(2),), {})])
    state = backend.to_dict()
    backend.deactivate()
    return state


@pytest.fixture(scope="module")
def backend_state():
    return saved_backend()


@pytest.fixture
def loaders(backend_state):
    """Every way to load settings, by name."""
    return {
        "dict": InductorConfig.from_dict,
        "backend": lambda data, **kwargs: (
            InductorBackend.from_dict(nn.ReLU(), {**backend_state, "config": data}, **kwargs).config
        ),
    }


WAYS = ["dict", "backend"]


@pytest.mark.parametrize("way", WAYS)
def test_loaded_options_that_name_a_path_a_command_or_a_module_are_refused(way, loaders):
    for option, value in REFUSED.items():
        with pytest.raises(ValueError, match=rf"options\['{option}'\]=.* is refused in loaded settings"):
            loaders[way]({"options": {option: value}})


@pytest.mark.parametrize("way", WAYS)
def test_loaded_options_that_are_numbers_booleans_and_enumerated_strings_are_accepted(way, loaders):
    assert loaders[way]({"options": ACCEPTED}) == InductorConfig(options=ACCEPTED)


@pytest.mark.parametrize("way", WAYS)
def test_loaded_options_of_a_wrong_name_or_value_are_refused_as_by_the_constructor(way, loaders):
    with pytest.raises(ValueError, match="options key='max_autotun' is unknown"):
        loaders[way]({"options": {"max_autotun": "/tmp/planted"}})
    with pytest.raises(ValueError, match=r"options\['cpp.descriptive_names'\]='other' is refused"):
        loaders[way]({"options": {"cpp.descriptive_names": "other"}})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", ["planted_pass:run", {"class_path": "planted_pass.Run", "init_args": {}}])
def test_a_planted_pass_is_not_imported(given, way, loaders, tmp_path, monkeypatch):
    (tmp_path / "planted_pass.py").write_text("raise SystemExit('the planted code ran')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match=r"passes\[0\]='planted_pass.*allow_passes=\["):
        loaders[way]({"passes": [given]})
    assert "planted_pass" not in sys.modules


@pytest.mark.parametrize("way", WAYS)
def test_an_allowed_pass_is_imported(way, loaders):
    assert loaders[way]({"passes": [REFERENCE]}, allow_passes=[REFERENCE]).passes == (changes_nothing,)
    with pytest.raises(ValueError, match=r"passes\[0\]='.*:other' is refused"):
        loaders[way]({"passes": [f"{__name__}:other"]}, allow_passes=[REFERENCE])
    with pytest.raises(TypeError, match=r"allow_passes='.*' must be a list"):
        loaders[way]({"passes": [REFERENCE]}, allow_passes=REFERENCE)


def test_the_constructor_takes_what_loaded_settings_may_not_hold():
    config = InductorConfig(options={"cuda.arch": "90"}, passes=[REFERENCE])
    assert config.options["cuda.arch"] == "90"
    assert config.passes == (changes_nothing,)
    saved = InductorConfig(passes=[changes_nothing]).to_dict()
    assert InductorConfig.from_dict(saved, allow_passes=saved["passes"]) == InductorConfig(passes=[changes_nothing])


def test_a_mapping_in_the_program_takes_what_loaded_settings_may_not_hold():
    """LightningCLI hands over the YAML's mapping; a YAML file is the user's program."""
    given = {"options": {"cuda.arch": "90"}, "passes": [REFERENCE]}
    candidates = {"candidates": [given, {"class_path": "compile_callbacks.InductorConfig", "init_args": given}]}
    callback = InductorCompile(given, candidates)
    config = InductorConfig(options={"cuda.arch": "90"}, passes=[changes_nothing])
    assert callback.arguments.configs == {"train": config, "infer": Tune([config])}
