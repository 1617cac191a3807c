# make demo: train a ResNet on real images, with the report of what compiling cost and gained
# make test: the test suite
# make lint: ruff and mypy
# make docs: the documentation site, in site/index.html
# make dist: sdist and wheel in dist/, the wheel looked at and imported
#
# Each works alone, from a fresh clone: the first one makes the environment .venv here.

PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
export UV_HTTP_TIMEOUT ?= 300

.PHONY: demo test lint docs dist clean

demo: $(INSTALLED)
	$(BIN)/python examples/resnet_digits.py --min-accuracy 0.95 $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The variable silences an advertisement for another site generator, as its text says.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

# uv builds the wheel from the sdist, so that both are tried.
dist: $(INSTALLED)
	rm -rf dist build
	$(BIN)/uv build --quiet --python $(BIN)/python
	$(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --target build/wheel dist/*.whl
	$(BIN)/python .ci/check_dist.py dist build/wheel

# Logs and checkpoints of the examples, in runs, stay.
clean:
	rm -rf .venv .venv-oldest .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site

# torch and torchvision come together, from one index: a torchvision beside another build of torch cannot be imported.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --editable '.[dev]'
	touch $@
