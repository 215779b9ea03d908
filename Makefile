# `make demo` and `make test` work from a fresh clone: they create .venv and install into it first.

SHELL := /bin/bash
.SHELLFLAGS := -e -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SMOLLM2 := models/SmolLM2-135M-Instruct

# pip's own report is a thousand lines; this shows the name of each package as it is fetched, and what went wrong.
SHOW_PACKAGES := awk '/^Collecting/ { sub(/[^A-Za-z0-9_.-].*/, "", $$2); printf "  %s\n", $$2; fflush() } /^Installing collected/ { print "  unpacking"; fflush() } /^Successfully/ { print "  done"; fflush() }'

.PHONY: help demo test bench install model lint clean

help:
	@echo "make demo   train a tiny policy with GRPO on Megatron TP2 x PP2, on this machine's CPU"
	@echo "make test   run the whole test suite"
	@echo "also: make bench | install | model | lint | clean"

demo: $(STAMP)
	$(BIN)/rlcore train --config-name demo --overwrite $(ARGS)

test: $(STAMP) $(SMOLLM2)/config.json
	$(BIN)/python -m pytest $(ARGS)

# ARGS: `make bench ARGS="--case scaling --json scaling.json"`.
bench: $(STAMP)
	$(BIN)/rlcore bench $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/python tools/layers.py
	$(BIN)/pyright

install: $(STAMP)

$(STAMP): setup.py
	@echo "Preparing $(VENV) (about two minutes the first time)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --progress-bar off -e '.[megatron,dev]' | $(SHOW_PACKAGES)
	@touch $@

model: $(SMOLLM2)/config.json

$(SMOLLM2)/config.json: $(STAMP) tools/fetch_smollm2.py
	$(BIN)/python tools/fetch_smollm2.py
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis runs
