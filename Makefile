# Everything starts here: `make demo` and `make test` need Python 3.11 or newer and nothing else.
# Variables: PYTHON=/path/to/python3.12  TORCH_INDEX=URL  ARGS="options passed on"
SHELL := bash
.DEFAULT_GOAL := help
export PYTHON TORCH_INDEX
# Services and tests start Python some hundred times: what it has compiled is kept, wherever this is run.
unexport PYTHONDONTWRITEBYTECODE
bin := .venv/bin
# Processes that tests run in, a file at a time; on two cores three, since tests of services wait for them.
WORKERS ?= 3

.PHONY: help demo test test-fast up chat setup setup-dev check format stubs options metrics clean

help: ## Show this list.
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | while IFS=$$'\t' read -r name text; \
	  do printf '  make %-10s %s\n' "$$name" "$$text"; done

demo: setup ## Set up, start the services, stream an answer, stop them.
	@$(bin)/outrider demo $(ARGS)

test: setup-dev ## Set up and run the tests; ARGS="tests/tree -x" picks some, WORKERS=0 runs one after the other.
	@$(bin)/outrider models pull
	$(bin)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations 25 $(ARGS)

# Units that need no model and no process of their own: tree, caches, scheduler, codecs, n-grams, gateway.
FAST := tests/tree tests/cache tests/rpc tests/gateway $(addprefix tests/draft/test_,draft_wire.py growth.py ngram.py requests.py) \
  $(addprefix tests/verify/test_,budget.py queue.py scheduler.py wire.py)

test-fast: setup-dev ## Set up and run the units of tree, scheduler, codecs and gateway, in about a minute.
	$(bin)/python -m pytest -n $(WORKERS) --dist loadgroup --no-loadscope-reorder --durations 10 $(FAST) $(ARGS)

up: setup ## Run the services until Ctrl-C.
	@$(bin)/outrider up $(ARGS)

chat: setup ## Talk to the model in the terminal.
	@$(bin)/outrider chat $(ARGS)

setup: ## Create .venv with what running needs.
	@scripts/setup

setup-dev: ## Create .venv with what tests and checks need, too.
	@scripts/setup dev

check: setup-dev ## Lint, format, types, import rules, stubs: what CI checks beside the tests.
	@scripts/check

format: setup-dev ## Sort imports and format the code.
	@$(bin)/ruff check --fix --quiet .
	@$(bin)/ruff format .

stubs: setup-dev ## Generate outrider/v1 from protos/ anew.
	@scripts/gen_stubs

options: setup-dev ## Write docs/options.md anew from the code.
	@$(bin)/python scripts/gen_options

metrics: setup-dev ## Write docs/metrics.md anew from the code.
	@$(bin)/python scripts/gen_metrics

clean: ## Remove .venv and every cache in this folder; downloaded models stay.
	rm -rf .venv build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
