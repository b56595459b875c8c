# Each target calls one script; CI calls the same. Options:
#   PYTHON=python3.12   the interpreter that .venv is made with, when there is none yet
#   ARGS="-k resume"    handed on to what the target runs
PYTHON ?= python3
export PYTHON

.DEFAULT_GOAL := help
.PHONY: help demo test check bench-save bench-convert clean

help: ## this list
	@sed -n 's/^\([a-z-]*\): ## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

demo: ## train a small model, save it, restore it and prove that it is the same
	@scripts/demo $(ARGS)

test: ## build the wheel, install it in .venv and test what was installed
	@scripts/test $(ARGS)

check: ## lint, format, types and the direction of imports; changes nothing
	@scripts/check

bench-save: ## time saving against the stock tools
	@scripts/bench-save $(ARGS)

bench-convert: ## time converting a ZeRO folder against the stock tools
	@scripts/bench-convert $(ARGS)

clean: ## remove .venv and everything else that was made
	rm -rf .venv .demo build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
