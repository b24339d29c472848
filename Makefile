# `make` alone lists the targets. Everything installs into .venv by itself; nothing is asked.
.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory

PY := .venv/bin/python
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-16s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: setup
setup: ## make .venv with everything in it (Python >= 3.11; 6 GB, most of it torch's CUDA libraries)
	@hack/setup

.PHONY: demo
demo: ## train CartPole-v1 to a mean return of 475 on this machine, then verify the run
	@hack/setup train mujoco
	@.venv/bin/rlightning run manifests/cartpole.yaml
	@.venv/bin/rlightning verify "$$(ls -d runs/cartpole/[0-9]* | sort -t / -k 3 -n | tail -n 1)"

.PHONY: test
test: ## lint, types and every test
	@hack/setup
	@hack/test

.PHONY: lint
lint: ## ruff (rules and format) and mypy
	@hack/setup
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

.PHONY: format
format: ## rewrite the source in ruff's format, and mend what it can mend
	@hack/setup
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

.PHONY: bench-training
bench-training: ## steps per second beside a plain PyTorch loop and stable-baselines3 (ROUNDS=5; PROFILE=1: where time goes)
	@hack/setup train
	@benchmarks/training/setup-sb3
	@$(PY) -m benchmarks.training.bench $(if $(ROUNDS),--rounds $(ROUNDS)) $(if $(PROFILE),--profile)
	@$(PY) -m benchmarks.pages

.PHONY: lock
lock: ## resolve pyproject.toml into constraints.txt (UPGRADE=1: to the newest versions)
	@hack/setup
	@hack/lock $(if $(UPGRADE),--upgrade)

.PHONY: clean
clean: ## remove caches and build outputs; runs/ and .venv stay
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -print | xargs -r rm -rf
