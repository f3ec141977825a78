# All set-up is done by the targets that need it: `make demo` and `make test`
# work in a fresh clone. The work itself is in scripts/setup.py.

# auto looks at the machine; a login node names what its compute nodes have.
ACCELERATOR ?= auto
# PYTHON=... overrides the search for one that will do.
PYTHON ?=
# For example PYTEST_ARGS='-n 0' or PYTEST_ARGS='-k order'.
PYTEST_ARGS ?=

MARKED := multiprocess or slurm or slow
LEFT_OUT := portability or soak
VENV_PYTHON := .venv/bin/python
STAMP := .venv/anp_jax-setup.json
# A named accelerator or Python has to be compared with what .venv has; without
# one the stamp's age says enough.
ifeq ($(ACCELERATOR)$(PYTHON),auto)
  READY := $(STAMP)
else
  READY := setup
endif

# A cluster's modules put their own packages on this path, before .venv's.
unexport PYTHONPATH
# Images of containers set it, and each process of a test would compile all that it
# imports again.
unexport PYTHONDONTWRITEBYTECODE

define run_setup
@for python in \
    $(if $(PYTHON),"$(PYTHON)",python3 python3.13 python3.12 python3.11); do \
  if "$$python" scripts/setup.py --check-python >/dev/null 2>&1; then \
    exec "$$python" scripts/setup.py --accelerator=$(ACCELERATOR) \
      $(if $(PYTHON),--pin-python) $(1); \
  fi; \
done; \
echo "No Python 3.11, 3.12 or 3.13 with venv found$(if $(PYTHON), at\
 $(PYTHON)): install one, or name it: make PYTHON=/path/to/python3" >&2; exit 1
endef

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all soak portability lint bench clean

help:  ## Show this.
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' $(firstword $(MAKEFILE_LIST)) | \
	  while IFS='	' read -r name text; do \
	    printf '  make %-11s %s\n' "$$name" "$$text"; done
	@echo '  with ACCELERATOR=auto|cpu|cuda12|cuda13|tpu PYTHON=... PYTEST_ARGS=...'

setup:  ## Make .venv for this machine's accelerator (done once).
	$(call run_setup)

$(STAMP): requirements.txt pyproject.toml scripts/setup.py
	$(call run_setup)

demo: $(READY)  ## Train a small model on made-up data, on any machine.
	$(VENV_PYTHON) main.py --config=configs/resnet_anp.py:demo \
	  --workdir=runs/demo

# A file's tests in one process: what they make once, or compile, is not made
# twice.
test: $(READY)  ## Run the quick tests.
	$(VENV_PYTHON) -m pytest -q -n 2 --dist=loadfile -m "not ($(LEFT_OUT) or $(MARKED))" \
	  $(PYTEST_ARGS)

# Not the quick ones again: `make test test-all` runs every test once. At most one
# runs under Slurm at a time (tests/conftest.py). That no test carries a mark
# (pytest's status 5) is no failure.
test-all: $(READY)  ## Run the other tests: several processes, Slurm, slow.
	$(VENV_PYTHON) -m pytest -q -n 2 --dist=loadscope --no-loadscope-reorder \
	  --durations=40 $(PYTEST_ARGS) -m "($(MARKED)) and not ($(LEFT_OUT))" || [ $$? -eq 5 ]

# Its environment is compared with what is wanted each time, in a second.
portability:  ## Compile for TPUs and GPUs that are not here, and test what comes.
	$(call run_setup,--accelerator=portability)
	.venv-portability/bin/python -m pytest -q -m portability $(PYTEST_ARGS)

soak: $(READY)  ## Kill runs over and over; variants of slow tests.
	ANP_SOAK_RUNS=20 ANP_NODES=20 $(VENV_PYTHON) -m pytest -q -m slurm \
	  -k "random_moment or outlives" tests/processes/test_slurm.py \
	  tests/processes/test_slurm_nodes.py $(PYTEST_ARGS)
	ANP_LOSSES=500 $(VENV_PYTHON) -m pytest -q -k random_losses \
	  tests/processes/test_elastic_processes.py $(PYTEST_ARGS)
	ANP_KILLS=50 $(VENV_PYTHON) -m pytest -q -k random_kills \
	  tests/processes/test_parameter_server_processes.py $(PYTEST_ARGS)
	ANP_MUTANTS=10000 $(VENV_PYTHON) -m pytest -q -k mutated_files \
	  tests/data/test_corruption.py $(PYTEST_ARGS)
	ANP_KILLS=20 $(VENV_PYTHON) -m pytest -q -k again_and_again \
	  tests/test_train.py $(PYTEST_ARGS)
	ANP_INTERRUPTS=200 $(VENV_PYTHON) -m pytest -q -k any_moment \
	  tests/system/test_interrupts.py $(PYTEST_ARGS)
	ANP_STEPS=200 $(VENV_PYTHON) -m pytest -q -m 'soak or slow' \
	  tests/parallel/test_invariant.py $(PYTEST_ARGS)
	ANP_FUZZ=2000 $(VENV_PYTHON) -m pytest -q tests/test_fuzz.py $(PYTEST_ARGS)
	$(VENV_PYTHON) -m pytest -q -m soak $(PYTEST_ARGS)

lint: $(READY)  ## Check style, format, types, spelling, and the links of the docs.
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .
	$(VENV_PYTHON) -m mypy
	$(VENV_PYTHON) -m codespell_lib --skip='*.png,*.csv,*.txtpb' \
	  anp_jax configs docs scripts *.md
	$(VENV_PYTHON) -m mkdocs build

bench: $(READY)  ## Run every benchmark in scripts/bench, one after another.
	@set -e; for script in $(basename $(notdir $(wildcard scripts/bench/[!_]*.py))); do \
	  echo "== $$script"; $(VENV_PYTHON) -m "scripts.bench.$$script"; done

clean:  ## Remove .venv and caches; runs stay.
	rm -rf .venv .venv.lock .venv-portability .venv-portability.lock
	rm -rf .pytest_cache .ruff_cache build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
