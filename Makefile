# Every target works on a machine that has only Python 3.10+ with venv and pip, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: help setup demo demo-ray test test-slow mutants bench bench-gpu bench-ray lint types docs clean

help:  ## Show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

setup: $(READY)  ## Make .venv with everything

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all]'
	touch $@

demo: $(READY)  ## Train a small model on Countdown with the KL held at a target; writes runs/demo
	$(BIN)/python tutorials/countdown_grpo.py $(ARGS)

demo-ray: $(READY)  ## The same with one reference for four collectors over Ray, killed halfway; writes runs/ray
	$(BIN)/python tutorials/ray_shared_reference.py $(ARGS)

test: $(READY)  ## Run the tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu" $(ARGS)

test-slow: $(READY)  ## Run the tests that take minutes
	$(BIN)/python -m pytest -q -m slow $(ARGS)

mutants: $(READY)  ## Break the maths in one place at a time: does a test fail? Takes minutes
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(BIN)/python -m mutants $(ARGS)

# Waiting threads sleep: ones that spin keep those they wait for off the cores of a machine that others use.
bench: $(READY)  ## Compare with torchrl on the same work, in turns; writes benchmarks/RESULTS.md
	$(BIN)/python -m benchmarks run $(ARGS)

bench-gpu: $(READY)  ## The same on a CUDA device; writes benchmarks/cuda/RESULTS.md
	$(BIN)/python -m benchmarks run --device cuda $(ARGS)

bench-ray: $(READY)  ## Compare the Ray service with torchrl's, and say how many replicas collectors need; writes benchmarks/RAY.md
	$(BIN)/python -m benchmarks.ray run $(ARGS)

lint: $(READY)  ## Check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)  ## Check types
	$(BIN)/mypy

docs: $(READY)  ## Write the generated pages, tables and pictures of docs/
	$(BIN)/python docs/build_architecture.py
	$(BIN)/python docs/build_api.py
	$(BIN)/python docs/build_estimator_table.py
	$(BIN)/python docs/build_chat_template_table.py
	$(BIN)/python docs/build_algorithm_table.py

clean:  ## Remove .venv and what runs have written
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
