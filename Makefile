# Refit's commands, named after what a person wants. `make` alone lists them.
# Every target can be run twice, and again after a Ctrl-C at any moment.

PYTHON ?= $(shell command -v python3.11 || echo python3)
BIN := .venv/bin
# Where torch is; the training stage's tests run there.
COMPUTE := .venv-compute/bin
PIPELINE ?= review_sentiment
SEED ?= 1
DOCS ?= 1000000
COUNT ?= 200
STEPS ?= 1000
SOAK ?= .refit/soak
PACKAGES := images/base/refit images/data/corpus images/evaluate/evaluator images/serve/serving images/standalone/standalone operators
UNIT := "not integration and not scenarios and not kubernetes and not benchmark"
SOAKING = REFIT_SOAK_SEED=$(SEED) REFIT_SOAK_COUNT=$(COUNT) REFIT_SOAK_FOLDER=$(SOAK)
BOOTSTRAP := PYTHONPATH=images/standalone $(PYTHON) -m

.DEFAULT_GOAL := help
.PHONY: help setup up down status demo rollback check test-fast test scenarios bench bench-data bench-train soak lock clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## make both venvs, and the demos' data and base model
	@$(BOOTSTRAP) standalone.bootstrap

up: setup ## start the embedded stack and wait until it works
	@$(BIN)/refit up

down: ## stop the stack and everything it started
	@test ! -x $(BIN)/refit || $(BIN)/refit down

status: ## what runs, and whether it works
	@$(BIN)/refit status

demo: setup ## retrain, prove better, roll out: the whole line (PIPELINE=tiny is the quick one)
	@$(BIN)/refit demo $(PIPELINE)

rollback: ## put the previous champion of PIPELINE back
	@$(BIN)/refit rollback $(PIPELINE)

check: setup ## lint, format, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict $(PACKAGES)
	$(BIN)/mypy --strict --python-executable .venv-compute/bin/python images/train/trainer

test-fast: setup ## unit tests only, on every core
	$(BIN)/pytest -n auto -m $(UNIT) $(ARGS)

test: setup check ## every check and the tests (ARGS= goes to pytest)
	$(COMPUTE)/python -m pytest -m "not benchmark" tests/train $(ARGS)
	$(BIN)/pytest -n auto -m $(UNIT) $(ARGS)
	$(BIN)/pytest -m "integration or kubernetes" $(ARGS)
	$(BIN)/pytest tests/scenarios $(ARGS)

scenarios: setup ## every scenario: kill and corrupt things while a line runs
	$(BIN)/pytest tests/scenarios $(ARGS)

bench: setup ## how fast: benchmarks beside their peers, written to bench-*.json
	$(BIN)/pytest -m benchmark -s tests/benchmarks $(ARGS)

bench-data: setup .venv-peers ## the data stage beside its peers, in one run: a table and bench-data.json (DOCS= documents, MB= of a delivery)
	REFIT_BENCH_DOCS=$(DOCS) REFIT_BENCH_MB=$(or $(MB),1000) $(BIN)/pytest -m benchmark -s tests/benchmarks $(ARGS)

bench-train: setup ## the training stage beside a bare DeepSpeed loop: a table and bench-train.json (STEPS= scales it)
	REFIT_BENCH_TABLE=bench-train.json REFIT_BENCH_STEPS=$(STEPS) $(COMPUTE)/python -m pytest -m benchmark -s tests/benchmarks/test_train.py $(ARGS)

.venv-peers: tests/benchmarks/peers.txt tests/benchmarks/peers-bare.txt
	$(PYTHON) -m venv $@
	$@/bin/pip install --quiet -r $<
	$@/bin/pip install --quiet --no-deps -r tests/benchmarks/peers-bare.txt
	touch $@

soak: setup ## long campaigns of faults (SEED= and COUNT= are settable, a stopped one goes on; ARGS="-k kills" for some)
	mkdir -p $(SOAK)
	$(SOAKING) $(BIN)/pytest -s tests/train/test_soak_states.py $(ARGS); test $$? -eq 0 -o $$? -eq 5
	$(SOAKING) $(COMPUTE)/python -m pytest -s tests/train/test_soak*.py $(ARGS)

lock: ## derive every lock and pin list from images/constraints.txt (REFIT_TORCH_WHEELS=folder with torch's CPU wheel)
	@$(BOOTSTRAP) standalone.lock

clean: down ## remove the venvs and the stack's home; what was downloaded stays in ~/.cache/refit
	rm -rf .venv .venv-compute .venv-peers $(or $(REFIT_HOME),.refit) .mypy_cache .ruff_cache .pytest_cache .hypothesis
