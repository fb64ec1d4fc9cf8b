# Each target sets up what it needs, once: .venv is made again only when the lists of packages change.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test test-all lint docs clean

demo: .venv/ready  ## train a small residual network on the embedded digits
	$(BIN)/crossbow train resnet8-digits

test: .venv/ready  ## the tests, without the slow ones
	$(BIN)/python -m pytest -m "not slow"

test-all: .venv/ready  ## every test
	$(BIN)/python -m pytest

lint: .venv/ready  ## what CI checks before the tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/ready  ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[images,tensorboard]" --group dev --group docs
	@touch $@

clean:  ## forget the set-up and all caches
	rm -rf .venv .mypy_cache .pytest_cache .ruff_cache
