# `make demo` and `make test` set up what they need; `make` alone lists the targets.
#
# A second environment:  make test VENV=.venv-3.11 PYTHON=python3.11 JAX='jax==0.10.2'
# CUDA=none, cuda12 or cuda13 decides what is otherwise decided by looking for a GPU.

SHELL := bash

VENV ?= .venv
PYTHON ?=
JAX ?=
CUDA ?= auto
PYTEST_ARGS ?=
ARGS ?=

SETUP := VENV='$(VENV)' PYTHON='$(PYTHON)' JAX='$(JAX)' CUDA='$(CUDA)' tools/setup-env
BIN := $(VENV)/bin

# Stamps say which extras are installed: a changed pyproject, JAX or PYTHON looks again.
PIN := $(addprefix -,$(notdir $(PYTHON)) $(subst =,-,$(subst <,-,$(subst >,-,$(JAX)))))
PIN := $(subst $(eval) ,,$(PIN))
RUN := $(VENV)/.run$(PIN)
DEV := $(VENV)/.dev$(PIN)
DOCS := $(VENV)/.docs$(PIN)
FORGET := rm -f $(VENV)/.run* $(VENV)/.dev* $(VENV)/.docs*

.DEFAULT_GOAL := help
.PHONY: help demo train test lint docs picture env clean

help:
	@echo 'make demo      set up, then decode real text with a small model of each family'
	@echo 'make test      set up, then run the tests       PYTEST_ARGS="-n 2 -k step"'
	@echo 'make lint      ruff check, ruff format --check, mypy'
	@echo 'make docs      build the documentation into build/site, warnings are errors'
	@echo 'make bench     time generate both ways         ARGS=--help lists the options'
	@echo 'make train     train the models of the demo     ARGS=--help lists the options'
	@echo 'make picture   draw docs/replayssm.svg'
	@echo 'make env       only set up $(VENV), with all that development needs'
	@echo 'make clean     remove environments and caches'

demo: $(RUN)
	@$(BIN)/python examples/decode_text.py $(ARGS)

train: $(RUN)
	@$(BIN)/python examples/train_tiny_hybrid.py $(ARGS)

test: $(DEV)
	@$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(DEV)
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

docs: $(DOCS)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo build/site/index.html

bench: $(DEV)
	@$(BIN)/python benchmarks/decode_loop.py $(ARGS)

picture: $(DEV)
	@$(BIN)/python docs/picture.py

env: $(DEV)

clean:
	rm -rf .venv .venv-* build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(RUN): pyproject.toml
	@$(SETUP) examples
	@$(FORGET)
	@touch $(RUN)

$(DEV): pyproject.toml
	@$(SETUP) test,bench
	@$(FORGET)
	@touch $(RUN) $(DEV)

$(DOCS): pyproject.toml
	@$(SETUP) test,bench,docs
	@$(FORGET)
	@touch $(RUN) $(DEV) $(DOCS)
