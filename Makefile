# Start here: `make demo` and `make test` need only Python, 3.11 to 3.14.
# Variables: PYTHON=/path/to/python3.12  TORCH_INDEX=URL  ARGS="options passed on"
SHELL := bash
.DEFAULT_GOAL := help
export PYTHON TORCH_INDEX
# Services and tests start Python hundreds of times, so always keep its bytecode.
unexport PYTHONDONTWRITEBYTECODE
bin := .venv/bin
# Number of test processes, each of which runs one file at a time; three suit two cores, since tests wait for services.
WORKERS ?= 3

.PHONY: help demo test test-fast up chat setup setup-dev check format stubs options metrics clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name text; \
	  do printf '  make %-10s %s\n' "$$name" "$$text"; done

demo: setup ## Set up, start the services, stream an answer, stop them.
	@$(bin)/outrider demo $(ARGS)

test: setup-dev ## Set up and run the tests; ARGS="tests/tree -x" selects tests, WORKERS=0 runs one at a time.
	@$(bin)/outrider models pull
	$(bin)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations 25 $(ARGS)

# Unit tests that need no model and start no process: tree, caches, scheduler, codecs, n-grams, gateway.
FAST := tests/tree tests/cache tests/rpc tests/gateway $(addprefix tests/draft/test_,draft_wire.py growth.py ngram.py requests.py) \
  $(addprefix tests/verify/test_,budget.py queue.py scheduler.py wire.py)

test-fast: setup-dev ## Set up and run the unit tests of tree, scheduler, codecs and gateway, in about a minute.
	$(bin)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations 10 $(FAST) $(ARGS)

up: setup ## Run the services until Ctrl-C.
	@$(bin)/outrider up $(ARGS)

chat: setup ## Talk to the model in the terminal.
	@$(bin)/outrider chat $(ARGS)

setup: ## Create .venv with the packages needed to run.
	@scripts/setup

setup-dev: ## Create .venv with the packages for tests and checks, too.
	@scripts/setup dev

check: setup-dev ## Run CI's checks besides the tests: lint, format, types, import rules, stubs, forbidden calls, pins.
	@scripts/check

format: setup-dev ## Sort imports and format the code.
	@$(bin)/ruff check --fix --quiet .
	@$(bin)/ruff format .

stubs: setup-dev ## Regenerate outrider/v1 from protos/.
	@scripts/gen_stubs

options: setup-dev ## Regenerate docs/options.md from the code.
	@$(bin)/python scripts/gen_options

metrics: setup-dev ## Regenerate docs/metrics.md from the code.
	@$(bin)/python scripts/gen_metrics

clean: ## Remove .venv and all caches in this folder, but keep downloaded models.
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
