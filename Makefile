# Targets that build, run and test the project; `make` alone lists them.
.DEFAULT_GOAL := help
.SILENT:
.ONESHELL:
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
MAKEFLAGS += --no-print-directory
unexport PYTHONDONTWRITEBYTECODE # without it each of the hundreds of processes of the tests compiles the package

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes
PYTEST := PYTHONHASHSEED=0 $(BIN)/python -m pytest -q -p no:cacheprovider -n 4 --dist loadscope
SOURCES := txnbuffer snapshots broker_io bench tests requirements

.PHONY: help setup demo test test-fast pulsar plugin explore explore-pair sim sim-planted power fuzz foreign-page screenshots soak soak-overload soak-pair stress size lint typecheck mutants bench compare golden docs protocols dist releases lock clean

help: ## list the targets
	awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install all dependencies, pinned and hashed

$(STAMP): requirements/build.txt requirements/dev.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
	    echo "txnbuffer requires Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) -V 2>&1): run make PYTHON=python3.12" >&2
	    exit 1
	}
	echo "installing into .venv (a minute, once)" >&2
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) -r requirements/build.txt >&2
	$(PIP) --no-build-isolation -r requirements/dev.txt >&2
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-build-isolation -e . >&2
	touch $(STAMP)

demo: $(STAMP) ## run the demo (1 minute), BROKER=pulsar on a real broker (3 minutes); ARGS="--output json" for JSON
	if [ "$(BROKER)" = pulsar ]; then
	    TXNBUFFER_PULSAR_HOME=$${TXNBUFFER_PULSAR_HOME:-$$(docker/distribution.sh)}
	    export TXNBUFFER_PULSAR_HOME
	    $(BIN)/python broker_plugin/build.py >/dev/null || true # without the jar the demo leaves out plain consumers
	fi
	$(BIN)/txnbuf demo $(if $(BROKER),--broker $(BROKER)) $(ARGS)

test: lint pulsar ## run lint, type checks and all tests, as CI does
	$(BIN)/mypy --no-error-summary >.venv/types 2>&1 & # meanwhile
	types=$$! failed=0
	PRINT_SIZE=1 $(PYTEST) || failed=$$?
	wait $$types || { cat .venv/types >&2; exit 1; }
	exit $$failed

test-fast: $(STAMP) ## run the tests only; ARGS="tests/buffer -k trim"
	$(PYTEST) $(ARGS)

pulsar: $(STAMP) ## show which Pulsar and which etcd the tests use, and download Pulsar if necessary
	$(BIN)/python tests/etcd_server.py >&2 || true # without one of them the tests that need it fail
	$(BIN)/python tests/pulsar_cluster.py >&2 || true

plugin: $(STAMP) ## build the jar of the broker plug-in into the package, with a JDK 17
	$(BIN)/python broker_plugin/build.py

size: $(STAMP) ## print the size of packages, tests and hot paths, and the seconds of the tests
	$(BIN)/python tests/size.py

lint: $(STAMP) ## check style and format
	$(BIN)/ruff check --quiet .
	$(BIN)/ruff format --quiet --check . || { echo "run: $(BIN)/ruff format ." >&2; exit 1; }

typecheck: $(STAMP) ## check types
	$(BIN)/mypy --no-error-summary

explore: $(STAMP) ## run random coordinator histories; N=20000 SEED=1; a failure prints its seed
	$(BIN)/python tests/coordinator/explore.py $(or $(N),1000) $(or $(SEED),0)

explore-pair: $(STAMP) ## explore histories of a pair; SECONDS=60 SEED=1; BREADTH=1 for all short ones
	PYTHONPATH=tests $(BIN)/python tests/pair_explore.py --seconds $(or $(SECONDS),60) --seed $(or $(SEED),0) $(if $(BREADTH),--breadth)

sim: $(STAMP) ## simulate the whole system; SEEDS=1000 or SECONDS=600, KIND=cluster; REDUCE=1 reduces a finding; SEED=7 prints events
	$(BIN)/python tests/sim/simulate.py $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(FIRST),--first $(FIRST)) $(if $(SEED),--seed $(SEED)) $(if $(PART),--part '$(PART)') $(if $(KIND),--kind $(KIND)) $(if $(REDUCE),--reduce)

sim-planted: $(STAMP) ## plant bugs and check that the simulator finds each; ONLY=text, SECONDS=600 for each, LIST=1 for the results
	$(BIN)/python tests/sim/planted.py $(if $(ONLY),"$(ONLY)") $(if $(SEEDS),--seeds $(SEEDS)) $(if $(SECONDS),--seconds $(SECONDS)) $(if $(MISSING),--missing) $(if $(LIST),--list)

power: $(STAMP) ## cut the power of a program on an embedded log; CUTS=1000 SEED=1
	PYTHONPATH=tests $(BIN)/python tests/power/cuts.py $(if $(CUTS),--cuts $(CUTS)) $(if $(SEED),--seed $(SEED))

fuzz: $(STAMP) ## fuzz the decoders and the wire protocol; SECONDS=600 in all, ONLY=text for some targets
	$(BIN)/python -c 'import atheris' 2>/dev/null || $(PIP) -r requirements/fuzz.txt >&2
	$(BIN)/python tests/fuzz/run_atheris.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(ONLY),--only "$(ONLY)")

mutants: $(STAMP) ## plant each known bug and check that a test fails; SECONDS=3000 for a slice, PARALLEL=1, ONLY=text for some
	$(BIN)/python tests/mutants/run.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(PARALLEL),--parallel $(PARALLEL)) $(if $(ONLY),"$(ONLY)")

foreign-page: $(STAMP) ## try with a foreign web page in Chromium to use the HTTP port of a service; CHROMIUM=path
	PYTHONPATH=tests $(BIN)/python tests/foreign_page.py $(CHROMIUM)

screenshots: $(STAMP) ## take screenshots of the site in Chromium and look for what is cut; CHROMIUM=path, DIRECTORY=screenshots
	PYTHONPATH=tests $(BIN)/python tests/site_shots.py "$(CHROMIUM)" "$(or $(DIRECTORY),screenshots)"

soak-pair: $(STAMP) ## break machines, disks, links and the lock of a pair; FAULTS=300 SEED=1
	PYTHONPATH=tests $(BIN)/python tests/pair_soak.py --faults $(or $(FAULTS),300) $(if $(SEED),--seed $(SEED))

soak-overload: $(STAMP) ## load a service with ten times its capacity; SECONDS=600
	PYTHONPATH=tests $(BIN)/python tests/service/overload_soak.py --seconds $(or $(SECONDS),600)

soak: $(STAMP) ## kill services, clients and brokers for an hour; tests at full scale; 5,000 examples per property
	$(BIN)/python tests/service/soak.py --kills $(or $(KILLS),200) $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/pulsar/cluster_soak.py --brokers $(or $(BROKERS),20) --services $(or $(SERVICES),50) $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/pulsar/cluster_soak.py --shards 2 --brokers $(or $(BROKERS),5) --services $(or $(SERVICES),40) $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/pulsar/unload_soak.py --unloads $(or $(UNLOADS),50) --restarts $(or $(RESTARTS),5) $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/pulsar/unload_soak.py --unloads $(or $(HANDOVERS),20) --restarts $(or $(HANDOVERS),20) --services 2 $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/pulsar/plain_soak.py --seconds $(or $(PLAIN_SECONDS),600) $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/pulsar/plain_soak.py --brokers 2 --seconds $(or $(PLAIN_SECONDS),600) $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/relay_kills.py --kills 20 $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/cursor_kills.py $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/pulsar/sink_kills.py $(if $(SEED),--seed $(SEED))
	$(BIN)/python tests/sinks/materialize_soak.py $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/delta_kills.py --kills 100 $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/spark_kills.py --kills 20 $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/spark_kills.py --pulsar --kills 10 $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/groups_soak.py $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/interrupts.py --blocks 600 $(if $(SEED),--seed $(SEED))
	PYTHONPATH=tests $(BIN)/python tests/groups_soak.py --events 0 --shards 2 $(if $(SEED),--seed $(SEED))
	HYPOTHESIS_PROFILE=soak $(PYTEST) $(addprefix tests/,broker_io broker_plugin buffer coordinator mutations recovery snapshots streams)
	PULSAR_PLUG_IN=1 $(PYTEST) tests/pulsar --ignore tests/pulsar/test_mixed_services.py --ignore-glob '*/test_pl[au]*' --deselect tests/pulsar/test_replicated_topics.py::test_written_messages_are_not_replicated
	SOAK=full $(PYTEST) tests/service/test_scale.py tests/users/test_programs_of_new_users.py tests/pipeline/submitted_soak.py $(addprefix tests/pulsar/,test_plain_features.py test_many_aborts.py test_spark_source.py spark_cluster_soak.py figures_soak.py)
	$(MAKE) demo BROKER=pulsar
	$(MAKE) soak-pair
	$(MAKE) soak-overload

stress: $(STAMP) ## check real processes: read-only disk, 2,000 clients, 500 streams, retention, clocks; ONLY=clock_jumps
	$(BIN)/python tests/stress/stress_run.py $(ONLY)

bench: $(STAMP) ## measure the figures, one JSON object per line; ONLY=prefix for some, ARGS=--accept to accept calls
	$(BIN)/python -m bench $(ONLY) $(ARGS)

compare: $(STAMP) ## compare the figures with another tree; OTHER=DIR, ONLY=prefix for some
	$(BIN)/python -m bench.compare $(OTHER) $(ONLY)

golden: $(STAMP) ## rewrite the golden files; ONLY when a format changed on purpose
	echo "Golden files pin formats that users have on disk. A diff here is a new format version." >&2
	UPDATE_GOLDEN=1 $(BIN)/python -m pytest -q -p no:cacheprovider -k golden
	git status --short tests/golden >&2

docs: $(STAMP) ## build the documentation site in site/, update the diagram in docs/architecture.md
	$(BIN)/python tests/layers.py
	$(BIN)/python -m properdocs build --strict
	echo "open site/index.html" >&2

protocols: $(STAMP) ## generate the modules of the protocol files (*.proto) again
	$(BIN)/python requirements/protocols.py

dist: $(STAMP) ## build wheel and sdist in dist/, try them on Python 3.11 to 3.14; PYTHONS="path …", ONLY=3.12
	$(BIN)/python requirements/dist.py $(addprefix --python ,$(PYTHONS)) $(addprefix --only ,$(ONLY))

releases: $(STAMP) ## show when each dependency had its last release
	$(BIN)/python requirements/releases.py

lock: ## resolve the lock files again (Python 3.11)
	$(PYTHON) requirements/lock.py

clean: ## remove everything that make created
	rm -rf .venv .fuzz .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist site
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
