# Whimbrel's entry points. Each does the set-up it needs; `make demo` and `make test` work on a fresh machine.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.ready
DIR ?= .whimbrel
export PATH := $(CURDIR)/$(BIN):$(PATH)

.PHONY: setup demo up down test check nightly-simulation sanitize fuzz chaos format bench bench-report models clean

setup: $(STAMP)

# Anything that changes what is installed makes the set-up run again.
$(STAMP): pyproject.toml constraints.txt tools/setup.sh $(shell find libs/ckptio -name '*.py[x]' -o -name '*.pxd' -o -name '*.[ch]pp' -o -name 'pyproject.toml' -o -name 'setup.py' 2>/dev/null)
	PYTHON=$(PYTHON) VENV=$(VENV) bash tools/setup.sh
	@touch $@

models: $(STAMP)
	$(BIN)/python tools/demo_models.py --out .models

demo: $(STAMP) models
	$(BIN)/python tools/demo.py --models .models

up: $(STAMP)
	$(BIN)/whimbrel up --servers 2 --slots 1 --dir $(DIR) --detach

down: $(STAMP)
	$(BIN)/whimbrel down --dir $(DIR)

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# The simulation, and the search of all interleavings of a migration, at night's length, over seeds of their own: about eight
# hours, and 8 GB. SEED, SEEDS, STEPS and FAULTS choose others.
nightly-simulation: $(STAMP)
	FAULTS=$${FAULTS:-2} STEPS=$${STEPS:-5000000} SEEDS=$${SEEDS:-1000} SEED=$${SEED:-$$RANDOM} $(BIN)/python -m pytest -q tests/simulation

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy libs/whimbrel/wire libs/whimbrel/chassis services/*/core
	$(BIN)/python tools/settings_docs.py --check
	$(BIN)/python tools/state_docs.py --check
	$(BIN)/python tools/bench_report.py --check
	$(BIN)/codespell
	find libs/ckptio -name '*.[ch]pp' -not -path '*/build/*' -not -name _native.cpp -print0 | xargs -0 -r $(BIN)/clang-format --dry-run --Werror

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	find libs/ckptio -name '*.[ch]pp' -not -path '*/build/*' -not -name _native.cpp -print0 | xargs -0 -r $(BIN)/clang-format -i

# The native part of ckptio under AddressSanitizer, UBSan and ThreadSanitizer.
sanitize: $(STAMP)
	$(MAKE) -s -j2 -C libs/ckptio/native_tests

# Kills and pauses everything in every state of a migration, and writes docs/chaos.md: some twelve minutes. ONLY and
# STATES choose by words: make chaos ONLY="worker,redis" STATES="handover,ended". SEED has harms come at random moments.
chaos: $(STAMP)
	$(BIN)/python -m tests.chaos --only "$(ONLY)" --states "$(STATES)" $(if $(SEED),--seed $(SEED))

# FUZZ_SECONDS for each parser that reads what strangers wrote.
FUZZ_SECONDS ?= 60
fuzz: $(STAMP)
	$(BIN)/python -m pip install -q 'atheris>=3,<4'
	PYTHON=$(CURDIR)/$(BIN)/python libs/ckptio/fuzz/run.sh $(FUZZ_SECONDS)

# Takes about an hour. The peers of ckptio that are installed are measured beside it.
bench: $(STAMP) models
	mkdir -p docs/bench
	$(BIN)/whimbrel bench coldstart --models .models --json > docs/bench/coldstart.json
	$(BIN)/whimbrel bench tiers --models .models --json > docs/bench/tiers.json
	$(BIN)/whimbrel bench sched --json > docs/bench/sched.json
	$(BIN)/whimbrel bench migrate --models .models --json > docs/bench/migrate.json
	$(BIN)/ckptio bench --ablation --plot docs/bench/ckptio.svg --json > docs/bench/ckptio.json
	$(MAKE) bench-report

bench-report: $(STAMP)
	$(BIN)/python tools/bench_report.py

clean:
	rm -rf $(VENV) .whimbrel build libs/ckptio/build *.egg-info
