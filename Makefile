# `make demo` and `make test` set themselves up; see scripts/setup_env.sh for the variables they take.
VENV ?= .venv
BIN := $(VENV)/bin
SAMPLE ?= sample_traces/h200_engine_eager
REPORT ?= report.html
PYTEST_ARGS ?=
export VENV

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench docs env env-test

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1	\2/p' Makefile | expand -t 18

demo: env ## analyse the bundled H200 recording, write report.html
	@test -e $(SAMPLE) || { echo "demo: there is no trace at $(SAMPLE); name one: make demo SAMPLE=PATH" >&2; exit 3; }
	@$(BIN)/spikeprof analyze $(SAMPLE)
	@$(BIN)/spikeprof report $(SAMPLE) -o $(REPORT)

test: check ## check, then all tests (GPU tests are skipped without a GPU)
	$(BIN)/pytest -n 2 $(PYTEST_ARGS)

check: env-test ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: env-test ## format, and fix what lint can
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: env-test ## measure against untraced and torch.profiler (needs a GPU)
	$(BIN)/python benchmarks/run.py

docs: env-test ## rewrite docs/reference from the code
	$(BIN)/python scripts/gen_docs.py

env:
	@scripts/setup_env.sh demo
env-test:
	@scripts/setup_env.sh test
