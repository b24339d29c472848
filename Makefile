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

.PHONY: cluster-up
cluster-up: ## boot a real two-node Kubernetes with KubeRay and this tree's images on this machine (root, Linux)
	@hack/setup
	@$(PY) -m hack.cluster up

.PHONY: cluster-down
cluster-down: ## take it down, with the run folders on its volumes; only caches stay
	@hack/setup
	@$(PY) -m hack.cluster down

.PHONY: images
images: ## build the operator's and the trainer's image, without booting (the first time 15 minutes, 20 GB of disk)
	@hack/setup
	@$(PY) -m hack.cluster images

.PHONY: demo-cluster
demo-cluster: ## the same on a real two-node Kubernetes cluster that it boots here (root; or KUBECONFIG=... VALUES=...)
	@hack/setup
	@hack/cluster/demo

.PHONY: test
test: ## lint, types and every test
	@hack/setup
	@hack/test

.PHONY: faults
faults: ## kill every part of a running job, one at a time, on the cluster (long; `make test` kills four in one run)
	@hack/setup
	@$(PY) -m pytest -m faults --durations 10 tests/integration tests/cluster

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

.PHONY: bench-startup
bench-startup: ## kubectl apply to the first iteration, beside a bare RayCluster of the same shape (ROUNDS=3)
	@hack/setup
	@hack/cluster/install
	@$(PY) -m benchmarks.startup.bench $(if $(ROUNDS),--rounds $(ROUNDS))
	@$(PY) -m benchmarks.pages

.PHONY: lock
lock: ## resolve pyproject.toml into constraints.txt (UPGRADE=1: to the newest versions)
	@hack/setup
	@hack/lock $(if $(UPGRADE),--upgrade)

.PHONY: clean
clean: ## remove caches and build outputs; runs/ and .venv stay
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	@find . -path './.venv*' -prune -o -name __pycache__ -type d -print | xargs -r rm -rf
