# make demo: train a network on handwritten digits twice, with the reports of what compiling cost and gained
# make test: the test suite on the newest torch, without its slow tests
# make test-fast: unit tests and a few fits, for while you edit
# make test-slow: tests of several processes, of an empty cache, and others that take many seconds
# make test-oldest: what depends on torch or Lightning, on their oldest versions that are supported
# make test-newest-python: unit tests and a few fits on the newest Python of this machine
# make test-nightly: the tests of workarounds and of private parts of torch, on torch's newest pre-release
# make test-random: 200 random modules, each trained with the callback and without
# make test-models: small models of other packages, each trained with the callback and without
# make examples: every example in a short form
# make lint: ruff and mypy
# make docs: the documentation site, in site/index.html
# make dist: sdist and wheel in dist/, built twice and compared, the wheel tried, and the examples typed with it
# make hooks: let git run the linters at each commit in this clone, and check its message
#
# Each works alone, from a fresh clone: the first one makes the environment .venv here.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
BIN_OLDEST := .venv-oldest/bin
INSTALLED_OLDEST := .venv-oldest/.installed
BIN_NEWEST := .venv-newest-python/bin
INSTALLED_NEWEST := .venv-newest-python/.installed
BIN_MODELS := .venv-models/bin
INSTALLED_MODELS := .venv-models/.installed

# The longest first. What makes one short stands behind it.
EXAMPLES := resnet_digits activation_memory resnet_imagefolder fsdp2 ddp max_pool_backward custom_pass finetune serve cli plain_loop ema resume
SHORT_resnet_digits := --max-epochs 3 --export
SHORT_serve := --package build/digits.pt2
SHORT_resnet_imagefolder := --fake-data --arch resnet18 --image-size 64 --limit-train-batches 8 --limit-val-batches 4
export UV_HTTP_TIMEOUT ?= 300
# Where the variable is set, as in many containers, each process of the hundreds here compiles the sources of torch and
# Lightning anew, for ten seconds.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test test-fast test-slow test-oldest test-newest-python test-nightly test-random test-models examples lint docs dist hooks clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

# One thread, because the threads of a step wait for each other if other programs use the cores, as on shared machines.
# Then the step times vary too much to compare, and the first verdict is "not comparable".
demo: export OMP_NUM_THREADS ?= 1
demo: $(INSTALLED)
	$(BIN)/python examples/demo.py --min-accuracy 0.9 $(ARGS)
	@printf '\nThe same run again, with the compiled code in the cache:\n\n'
	$(BIN)/python examples/demo.py --min-accuracy 0.9 $(ARGS)

TYPED := --ignore-missing-imports --check-untyped-defs --cache-dir ../.mypy_cache

PYTEST := -m pytest -p tests.support.order --numprocesses auto --maxprocesses 4 --dist loadscope

test: $(INSTALLED)
	$(BIN)/python $(PYTEST) -m "not slow" $(ARGS)

test-fast: $(INSTALLED)
	$(BIN)/python $(PYTEST) -m "not slow" tests/unit tests/cases/test_values.py $(ARGS)

test-slow: $(INSTALLED)
	$(BIN)/python $(PYTEST) -m slow $(ARGS)

test-oldest: $(INSTALLED_OLDEST)
	$(BIN_OLDEST)/python $(PYTEST) -m all_versions $(ARGS)

# The newest Python that torch supports and that this machine has, with uv, pyenv or the system. None is downloaded.
NEWEST = $(shell for minor in 15 14 13 12; do PATH="$$PATH:$$(printf '%s:' $$HOME/.pyenv/versions/*/bin)" \
	$(BIN)/uv python find --no-python-downloads --no-project 3.$$minor 2> /dev/null && break; done)

test-newest-python: $(INSTALLED)
	@if [ -z "$(NEWEST)" ]; then echo "skipped: this machine has no Python newer than 3.11"; \
	else $(MAKE) --no-print-directory $(INSTALLED_NEWEST) && \
	$(BIN_NEWEST)/python $(PYTEST) -m "not slow" tests/unit tests/cases/test_values.py $(ARGS); fi

# The package index of a machine may have no nightly builds. Nothing is left of an environment that could not be made.
NIGHTLY_INDEX ?=

test-nightly: $(INSTALLED)
	@if $(BIN)/uv venv --quiet --clear --python $(BIN)/python .venv-nightly \
	&& $(BIN)/uv pip install --quiet --python .venv-nightly/bin/python --prerelease allow torch torchvision \
		$(if $(NIGHTLY_INDEX),--index $(NIGHTLY_INDEX) --index-strategy unsafe-best-match) \
	&& $(BIN)/uv pip install --quiet --python .venv-nightly/bin/python --editable '.[examples,plot]' --group dev \
	&& .venv-nightly/bin/python -c "import torch as t; from packaging.version import Version as V; exit(not V(t.__version__).is_prerelease)"; \
	then .venv-nightly/bin/python $(PYTEST) -m "" tests/compile/test_ports.py tests/compile/test_workarounds.py $(ARGS); \
	else rm -rf .venv-nightly; echo "skipped: no pre-release of torch can be installed$(if $(NIGHTLY_INDEX), from $(NIGHTLY_INDEX))"; fi

test-random: $(INSTALLED)
	COMPILE_CALLBACKS_EXAMPLES=200 $(BIN)/python -m pytest tests/lightning/test_random_modules.py --timeout 3600 $(ARGS)

test-models: $(INSTALLED_MODELS)
	$(BIN_MODELS)/python -m pytest tests/models -m models --timeout 900 $(ARGS)

# Two at a time: each spends most of its time in one thread. What one prints is shown when it ends. With more threads,
# the threads of two examples wait for each other, and their step times vary too much to compare.
examples: export OMP_NUM_THREADS = 1
examples: $(INSTALLED)
	$(MAKE) --no-print-directory --jobs 2 --output-sync=target $(addprefix example-,$(EXAMPLES))

example-%:
	$(BIN)/python examples/$*.py $(SHORT_$*)

# The others start their processes by Lightning.
example-ddp:
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/ddp.py

example-cli:
	$(BIN)/python examples/cli/main.py fit --config examples/cli/config.yaml --trainer.max_epochs 3

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file .ci/mypy.ini

# The variable silences the theme's notice of its end of life; CONTRIBUTING.md says what follows from it. With --quiet,
# mkdocs would not count the warnings that --strict turns into an error.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# uv builds the wheel from the sdist, so that both are tried. The second build must give the same bytes. mypy reads the
# types of the library from the wheel, as it does for a user.
dist: $(INSTALLED)
	rm -rf dist build
	$(BIN)/uv build --quiet --python $(BIN)/python
	$(BIN)/uv build --quiet --python $(BIN)/python --out-dir build/again
	diff --recursive dist build/again
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target build/wheel dist/*.whl
	$(BIN)/python .ci/check_dist.py dist build/wheel
	cd examples && PYTHONPATH=../build/wheel ../$(BIN)/mypy --config-file= $(TYPED) .

hooks: $(INSTALLED)
	$(BIN)/pre-commit install

# Logs, checkpoints and compiled code of the examples, in runs, stay.
clean:
	rm -rf .venv .venv-oldest .venv-newest-python .venv-nightly .venv-models .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site

# uv.lock names the version of each package: `uv lock --upgrade` takes newer ones. torch and torchvision come together,
# from one index: a torchvision beside another build of torch cannot be imported.
SYNC := $(BIN)/uv sync --quiet --locked --inexact

$(INSTALLED): pyproject.toml uv.lock
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(SYNC) --all-extras --python $(BIN)/python
	touch $@

# The lower bounds of pyproject.toml.
$(INSTALLED_OLDEST): $(INSTALLED)
	$(BIN)/uv venv --quiet --allow-existing --python $(BIN)/python .venv-oldest
	$(BIN)/uv pip install --quiet --python $(BIN_OLDEST)/python --resolution lowest-direct \
		--editable '.[examples,plot]' --group dev
	touch $@

$(INSTALLED_NEWEST): $(INSTALLED)
	UV_PROJECT_ENVIRONMENT=.venv-newest-python $(SYNC) --all-extras --python "$(NEWEST)"
	touch $@

$(INSTALLED_MODELS): $(INSTALLED)
	UV_PROJECT_ENVIRONMENT=.venv-models $(SYNC) --no-default-groups --group models --python $(BIN)/python
	touch $@
