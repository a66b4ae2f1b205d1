# Requirements of every target: make, and Python 3.10+ with venv and pip.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo demo-ray demo-fsdp demo-text demo-image demo-tools demo-real study study-target study-staleness study-tokenizers test test-all test-rest test-device test-numeric test-slow test-peers engines real durations mutants matrix nightly bench bench-gpu gpu bench-ray lint types stubs docs site clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## Create .venv with all dependencies

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat --editable '.[all]'
	touch $@

demo: $(READY)  ## Train a small model on Countdown, with the KL held at a target; writes runs/demo
	$(BIN)/python tutorials/countdown_demo.py $(ARGS)

demo-ray: $(READY)  ## Run the demo with four collectors that share one Ray reference, killed halfway; writes runs/ray
	$(BIN)/python tutorials/ray_shared_reference.py $(ARGS)

RANKS ?= 2
demo-fsdp: $(READY)  ## Run the demo on two ranks (RANKS=2) with sharded models and checkpoints; writes runs/fsdp
	$(BIN)/python tutorials/countdown_demo.py --prepare
	OMP_NUM_THREADS=1 $(BIN)/python -m torch.distributed.run --standalone --nproc-per-node $(RANKS) -m torchrl_llm_kl train tutorials/countdown.yaml run.out=runs/fsdp $(ARGS)

demo-text: $(READY)  ## Train a small model on GSM8K's text, SFT then DPO, for three seeds; writes runs/text
	OMP_NUM_THREADS=1 $(BIN)/python tutorials/gsm8k_text.py $(ARGS)

demo-image: $(READY)  ## Train a small image-text model to count coloured squares, with the KL held at a target; writes runs/image
	OMP_NUM_THREADS=1 $(BIN)/python tutorials/image_demo.py $(ARGS)

demo-tools: $(READY)  ## Train a small model to call a calculator, with the KL held at a target; writes runs/tools
	$(BIN)/python tutorials/calculator_demo.py $(ARGS)

REAL := .real
demo-real: $(READY)  ## Train Gemma 3 270M, a real pre-trained model, on sums for three seeds (25 minutes); writes runs/real
	$(BIN)/python tests/real/environment.py $(REAL)
	$(BIN)/python tutorials/real_demo.py $(ARGS)

study: $(READY)  ## Compare placements of the KL on the demo's task (an hour, resumable); writes benchmarks/kl_study.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python tutorials/countdown_study.py placement $(ARGS)

study-target: $(READY)  ## Run the demo with two controllers on ten seeds (an hour, resumable); writes benchmarks/kl_study.jsonl
	OMP_NUM_THREADS=1 $(BIN)/python tutorials/countdown_study.py target $(ARGS)

study-staleness: $(READY)  ## Compare corrections of stale answers on the demo's task (an hour, resumable); writes benchmarks/STALENESS.md's data
	OMP_NUM_THREADS=1 $(BIN)/python tutorials/staleness_study.py $(ARGS)

study-tokenizers: $(READY)  ## Compare teachers with two tokenizers on GSM8K's text (20 minutes, resumable); writes benchmarks/TOKENIZERS.md's tables
	OMP_NUM_THREADS=1 $(BIN)/python tutorials/tokenizers_study.py $(ARGS)

# A test that hangs ends its worker after five minutes, with the stacks of all threads, and the others go on.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile --timeout 300 --timeout-method thread
# Tests on an accelerator have a process of their own: the simulated one is there for all that runs beside it.
DEVICE ?= sim
ON_DEVICE := TORCHRL_LLM_KL_DEVICE=$(DEVICE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q --timeout 300 tests/device
test: $(READY)  ## Run all units and a smoke test of every other tier (6 minutes)
	$(PYTEST) -m "smoke and not slow and not device" $(ARGS)
	$(ON_DEVICE) -m "smoke and not slow"

test-all: $(READY)  ## Run every test that is not slow (14 minutes)
	$(PYTEST) -m "not slow and not device" $(ARGS)
	$(ON_DEVICE) -m "not slow"

test-rest: $(READY)  ## Run what `make test-all` has and `make test` has not
	$(PYTEST) -m "not smoke and not slow and not device" $(ARGS)
	$(ON_DEVICE) -m "not smoke and not slow"

test-device: $(READY)  ## Run the package on an accelerator, simulated or real (DEVICE=cuda; then also bench-gpu); writes runs/device-*.json
	TORCHRL_LLM_KL_FIGURES=runs/device-$(DEVICE).json $(ON_DEVICE) -m "not slow" $(ARGS)

# Two minutes.
NUMERIC := tests/units/estimators tests/units/head tests/units/losses tests/units/advantages tests/units/algorithms tests/units/ragged tests/units/rollouts tests/units/scoring tests/units/transforms
CPU ?= default
test-numeric: $(READY)  ## Run the units of numbers with the instructions of an older processor (CPU=avx2; default: none)
	ATEN_CPU_CAPABILITY=$(CPU) $(PYTEST) -m "not slow" $(NUMERIC) $(ARGS)

test-slow: $(READY)  ## Run the slow tests (minutes)
	$(BIN)/python -m pytest -q -m "slow and not device" $(ARGS)

PEERS := .peers
test-peers: $(READY)  ## Fetch Trinity-RFT, verl, TRL, genlm-bytes and torchrl's own tests into .peers, and compare with them
	PYTHONPATH=tests/lab $(BIN)/python tests/lab/fetch_peers.py $(PEERS)
	TORCHRL_LLM_KL_PEERS=$(CURDIR)/$(PEERS) TORCHRL_LLM_KL_TORCHRL=$(CURDIR)/$(PEERS)/torchrl $(PYTEST) -m "not slow" tests/peers $(ARGS)

ENGINES := .engines
engines: $(READY)  ## Install vLLM for processors into .engines (3.5 GB) and run tests/engines against its server (15 minutes)
	$(BIN)/python tests/engines/environment.py $(ENGINES)
	TORCHRL_LLM_KL_ENGINES=$(CURDIR)/$(ENGINES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -s -p no:cacheprovider tests/engines $(ARGS)

real: $(READY)  ## Fetch Gemma 3 270M and five tokenizers into .real (1.5 GB) and run tests/real against them (15 minutes)
	$(BIN)/python tests/real/environment.py $(REAL)
	TORCHRL_LLM_KL_REAL=$(CURDIR)/$(REAL)/model $(BIN)/python -m pytest -q -s -p no:cacheprovider tests/real $(ARGS)

durations: $(READY)  ## Run `make test-all` and write its slowest hundred tests and fixtures to tests/durations.txt
	$(PYTEST) -m "not slow and not device" --durations-file tests/durations.txt $(ARGS)

mutants: $(READY)  ## Mutate the maths and check that a test fails for each mutant (an hour; ARGS="--only losses/terms": one file)
	OMP_NUM_THREADS=1 PYTHONPATH=tests/lab $(BIN)/python -m mutants $(ARGS)

matrix: $(READY)  ## Test the oldest and the newest releases that are allowed; writes docs/versions.md (gigabytes)
	$(BIN)/python .ci/matrix.py $(ARGS)

nightly: $(READY)  ## Test today's releases and torchrl's nightly, beyond the bounds; writes a row into docs/versions.md (gigabytes)
	rm -rf .matrix/beyond
	$(BIN)/python .ci/matrix.py beyond $(ARGS)

# On a shared machine, set OMP_WAIT_POLICY=passive: spinning threads keep the ones they wait for off the cores.
bench: $(READY)  ## Compare speed and memory with torchrl on the CPU; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks run $(ARGS)

bench-gpu: $(READY)  ## Compare speed and memory with torchrl on a CUDA device; writes benchmarks/cuda/RESULTS.md
	$(BIN)/python -m benchmarks run --device cuda $(ARGS)

gpu: $(READY)  ## Run tests/device and four benchmarks on a CUDA device, ten minutes at most; writes runs/gpu (ARGS="--device sim --quick": a try without)
	$(BIN)/python -m benchmarks.gpu $(ARGS)

bench-ray: $(READY)  ## Compare the Ray service with torchrl's; writes benchmarks/RAY.md
	$(BIN)/python -m benchmarks.ray run $(ARGS)

lint: $(READY)  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## Check types
	$(BIN)/mypy

docs: $(READY)  ## Write the tables and notebooks of docs/, and build the site in site/
	$(BIN)/python docs/build_stubs.py
	$(BIN)/python docs/build_pages.py
	$(BIN)/python docs/build_notebooks.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

stubs: $(READY)  ## Write what is registered into the stubs, for type checkers
	$(BIN)/python docs/build_stubs.py

site: $(READY)  ## Build the site from docs/ as they are, and serve it on this machine while you edit
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

clean:  ## Remove .venv, runs and caches
	rm -rf $(VENV) .matrix $(PEERS) $(ENGINES) runs site .pytest_cache .mypy_cache .ruff_cache .hypothesis
