PYTHON ?= python3
VENV ?= .venv

STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup test test-browser check format demo reproduce report bench clean distclean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## make the virtual environment and install fpexp with its development tools

$(STAMP): pyproject.toml
	@echo "installing fpexp and its dependencies into $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install -q -e '.[dev]'
	@touch $@

test: $(STAMP) ## run the tests, one process a core; PYTEST_ARGS is handed on
	@$(VENV)/bin/python -m pytest -n auto --maxprocesses 8 --dist worksteal $(PYTEST_ARGS)

test-browser: $(STAMP) ## try the report's page in a headless browser, fetched into $(VENV) where there is none
	@$(VENV)/bin/python -m pip install -q -e '.[browser]'
	@FPEXP_BROWSER="$${FPEXP_BROWSER:-$$($(VENV)/bin/python tests/browser/install.py $(VENV)/browser)}" \
		$(VENV)/bin/python -m pytest tests/browser $(PYTEST_ARGS)

check: $(STAMP) ## lint, formatting and types
	@$(VENV)/bin/ruff check
	@$(VENV)/bin/ruff format --check
	@$(VENV)/bin/mypy

format: $(STAMP) ## mend formatting and what the linter can mend
	@$(VENV)/bin/ruff check --fix --exit-zero --quiet
	@$(VENV)/bin/ruff format

demo: $(STAMP) ## train FP-Mamba on A5 and show its length-generalisation curve
	@$(VENV)/bin/fpexp train experiment=demo_a5

reproduce: $(STAMP) ## run the experiments of results/reference, or what of them is not done; REPRODUCE_ARGS is handed on
	@PATH="$(abspath $(VENV))/bin:$$PATH" scripts/reproduce.sh $(REPRODUCE_ARGS)

report: $(STAMP) ## tables, figures and a page of recorded runs, in results/report; REPORT_ARGS is handed on
	@$(VENV)/bin/fpexp report $(REPORT_ARGS)

bench: $(STAMP) ## time this machine against its baselines; BENCH_ARGS is handed on
	@$(VENV)/bin/python -m pip install -q -e '.[bench]'
	@$(VENV)/bin/fpexp bench $(BENCH_ARGS)

clean: ## remove caches and build output; results/ and the environment stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . \( -path ./.git -o -path ./results -o -path ./$(VENV) \) -prune -o \
		-type d -name __pycache__ -prune -exec rm -rf {} +

distclean: clean ## clean, and remove the environment
	@rm -rf $(VENV)
