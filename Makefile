# Every target sets itself up: `make demo` and `make test` work in a fresh clone.
SHELL := /bin/bash
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# cpu takes the CPU build of torch where pip offers one; cuda takes pip's default build.
DEVICE ?= $(shell if command -v nvidia-smi >/dev/null 2>&1 || [ -e /proc/driver/nvidia ]; then echo cuda; else echo cpu; fi)
CONSTRAINTS := $(if $(filter cpu,$(DEVICE)),--constraint constraints-cpu.txt)
PACKAGES := core sdk $(sort $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
EDITABLE := $(foreach package,$(PACKAGES),--editable ./$(package)) --editable .
SEED ?= 1
# Three jobs run at once: the parts of `make test`, environments for engines. Several goals are reached one after the other.
MAKEFLAGS += $(if $(word 2,$(MAKECMDGOALS))$(filter-out 0,$(MAKELEVEL)),,--jobs=3)
# Modules are compiled when they are first imported: most of those that come never are, and compiling all takes half of the time.
# Where the environment forbids to keep what is compiled, as that of many containers does, every process would compile torch anew.
unexport PYTHONDONTWRITEBYTECODE
PIP_INSTALL := -m pip install --quiet --no-compile --disable-pip-version-check
PIP = $(BIN)/python $(PIP_INSTALL) $(CONSTRAINTS)
# Tests on a real vLLM run in an environment of their own, on its CPU build; with an accelerator it is the user's to install.
VLLM_READY := $(if $(filter cpu,$(DEVICE)),.venv-vllm/.ready)
# The same for SGLang's server, whose kernels for accelerators its tests replace.
SGLANG_READY := $(if $(filter cpu,$(DEVICE)),.venv-sglang/.ready)
# The libraries of trackers bring 70 packages; they have an environment of their own, too.
TRACKERS_READY := .venv-trackers/.ready
# Programs on clients and agent frameworks, which the gateway trains unmodified; and environments, those with pins of their own in an
# interpreter of theirs.
PROOFS_READY := .venv-proofs/.ready
# Files of tests go to so many processes at once, the pool. Those that start Ray clusters, vLLM or SGLang run one after the other,
# beside it: they wait for processes half of the time, and so do packages that are fetched for their environments.
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest
# A worker that dies ends the run with a failure: pytest-xdist 3.8 can wait for ever after it has started another in its place.
TOGETHER := --numprocesses $(WORKERS) --max-worker-restart 0 --dist loadfile --no-loadscope-reorder

# Ray gives its workers a niceness of 15, with which they get next to nothing of two cores that other tests keep busy.
export RAY_worker_niceness := 0

# Recordings of training runs: of BASE, in a folder for each commit, and of the working tree.
RECORDS := $(CURDIR)/.records
BASE_COMMIT = $(shell git rev-parse --verify --quiet '$(BASE)^{commit}')
RECORDS_VLLM := $(if $(or $(filter vllm%,$(SCENARIOS)),$(if $(SCENARIOS),,all)),$(VLLM_READY))

.PHONY: setup demo quick test proofs pool test-pool test-vllm test-ray test-sglang test-trackers nightly nightly-1 nightly-2 nightly-3 coverage style lint site release-check bench records records-run table wheels manifests messages changelog clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints-cpu.txt requirements-dev.txt $(foreach package,$(PACKAGES),$(package)/pyproject.toml)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Dovetail needs Python 3.11 or newer; set PYTHON=…")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --requirement requirements-dev.txt
	$(PIP) --no-build-isolation $(EDITABLE)
	touch $@

demo: setup ## Train a tiny model with GRPO on this machine
	$(BIN)/dovetail demo --seed $(SEED)

# BASE=main counts what is committed on a branch as changed, too. Excluded are tests marked nightly, and those that start Ray, vLLM or SGLang.
BASE ?= HEAD
quick: style ## Style, types, imports, and the tests nearest to what is not committed, within a minute
	$(BIN)/python tests/quick.py $(BASE)

test: setup ## Every test that this machine can run
	@echo "The tests of vLLM, Ray, SGLang and the trackers run beside the others; the output of each is printed when it has ended."
	@$(MAKE) --no-print-directory --output-sync=target pool test-vllm test-ray test-sglang test-trackers

pool:
	@$(MAKE) --no-print-directory --output-sync=none test-pool

test-pool: setup
	$(PYTEST) $(TOGETHER) -m "not nightly and not ray"

test-ray: setup
	$(PYTEST) -m "ray and not nightly"

test-vllm: $(VLLM_READY)
	$(if $(VLLM_READY),.venv-vllm/bin/python -m pytest -m "vllm and not nightly")

test-trackers: $(TRACKERS_READY)
	.venv-trackers/bin/python -m pytest -m "trackers and not nightly"

test-sglang: $(SGLANG_READY)
	$(if $(SGLANG_READY),.venv-sglang/bin/python -m pytest -m "sglang and not nightly")

proofs: $(PROOFS_READY) .venv-harbor/.ready .venv-openenv/.ready .venv-textarena/.ready .venv-verifiers/.ready .venv-trl/.ready .venv-verl/.ready ## Programs on real clients and agent frameworks, published environments, and numerics against verl and TRL
	.venv-proofs/bin/python -m pytest -m proofs
	.venv-trl/bin/python -m pytest -m trl
	$(PYTEST) tests/end_to_end/test_trl_losses.py
	.venv-verl/bin/python -m pytest -m verl

# What `make test` leaves out: tests marked nightly, and every property on fresh random examples. PART=1/3, PART=2/3 and PART=3/3 take
# less than an hour each on two cores; without PART they follow each other.
nightly: ## The larger matrices, and every property on fresh random examples
	$(if $(filter-out 1/3 2/3 3/3,$(PART)),$(error PART=$(PART) is not a part; expected 1/3, 2/3 or 3/3))
	set -e; for part in $(if $(PART),$(firstword $(subst /, ,$(PART))),1 2 3); do $(MAKE) nightly-$$part; done

nightly-1: lint
	DOVETAIL_HYPOTHESIS=random $(PYTEST) $(TOGETHER) -m "(nightly or hypothesis) and not ray" plugins sdk core

nightly-2: setup $(VLLM_READY) $(SGLANG_READY) $(TRACKERS_READY) $(PROOFS_READY)
	DOVETAIL_HYPOTHESIS=random $(PYTEST) -m "ray and (nightly or hypothesis)"
	$(if $(VLLM_READY),.venv-vllm/bin/python -m pytest -m "vllm and nightly")
	$(if $(SGLANG_READY),.venv-sglang/bin/python -m pytest -m "sglang and nightly")
	.venv-trackers/bin/python -m pytest -m "trackers and nightly"
	.venv-proofs/bin/python -m pytest -m proofs -k "test_clients or [openai]"

nightly-3: setup .venv-trl/.ready
	DOVETAIL_HYPOTHESIS=random $(PYTEST) --numprocesses $(WORKERS) -m "(nightly or hypothesis) and not ray" tests
	.venv-trl/bin/python -m pytest -m trl

# Lines that run in processes which tests start do not count.
coverage: setup ## The tests of the pool, with the lines that they run: coverage/index.html
	$(PYTEST) $(TOGETHER) -m "not nightly and not ray" --cov --cov-report=html:coverage --cov-report=term:skip-covered

style: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p dovetail -p dovetail_sdk $(patsubst plugins/%,-p dovetail_%,$(filter plugins/%,$(PACKAGES)))
	$(BIN)/lint-imports

lint: style ## Style, types, imports, docstrings, manifests, names of change fragments
	$(BIN)/python tests/architecture/docstrings.py
	$(BIN)/python -m dovetail_sdk manifest --check $(PACKAGES)
	$(BIN)/python -m dovetail_sdk interfaces --check
	$(BIN)/python tests/changelog.py >/dev/null

manifests: setup ## Write every package's dovetail-plugin.json from its classes
	$(BIN)/python -m dovetail_sdk manifest $(PACKAGES)

site: .venv-site/.ready ## Build the docs site into site/; a broken link or a warning is an error
	NO_MKDOCS_2_WARNING=1 .venv-site/bin/python -m mkdocs build --strict

messages: setup ## Record anew what commands answer to bad inputs, in tests/end_to_end/bad_inputs/messages.txt
	$(PYTEST) --update-messages tests/end_to_end/test_bad_inputs.py

changelog: setup ## Print what the fragments in */changes say; with VERSION=0.2.0 put it on top of CHANGELOG.md and remove them
	$(BIN)/python tests/changelog.py $(VERSION)

table: setup ## Print the table of the architecture: sizes, boundaries, and what a step enters
	$(BIN)/python tests/architecture/table.py --step

wheels: setup ## Fill dist/ with a wheel of every package
	rm -rf dist && mkdir dist
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist $(foreach package,$(PACKAGES),./$(package)) .

release-check: wheels ## The wheels of dist/: their descriptions, their installation on three Pythons without the index, and the demo
	$(BIN)/python tests/release_check.py dist

bench: setup .venv-trl/.ready ## Time a GRPO step against TRL, in alternation
	$(BIN)/python benchmarks/grpo_step.py --peer-python .venv-trl/bin/python

# The scenarios of BASE run from its own tree, in a worktree with an environment that also sees this one's packages, so both use
# the same torch. PYTHONPATH is unset, since it would put this tree's packages before theirs. Recordings of a commit are kept
# until `make clean`. A scenario that fails does not stop the others; the comparison reports it.
records: setup $(RECORDS_VLLM) ## Compare the results of training runs with those of a commit: BASE=COMMIT [SCENARIOS="demo ppo"]
	@test -n "$(BASE_COMMIT)" || { echo "BASE=$(BASE) is not a commit; expected make records BASE=COMMIT" >&2; exit 2; }
	@git cat-file -e $(BASE_COMMIT):records/run.py || { echo "$(BASE) has no records/run.py; expected a commit that has" >&2; exit 2; }
	@test -e $(RECORDS)/base || git worktree add --quiet --detach $(RECORDS)/base $(BASE_COMMIT)
	@git -C $(RECORDS)/base checkout --quiet --detach $(BASE_COMMIT)
	@test -x $(RECORDS)/base/.venv/bin/python || $(PYTHON) -m venv $(RECORDS)/base/.venv
	@$(RECORDS)/base/.venv/bin/python tests/see_environment.py $(VENV)
	@rm -rf $(RECORDS)/present
	-@env --unset=PYTHONPATH $(MAKE) --no-print-directory -C $(RECORDS)/base records-run VENV=.venv OUT=$(RECORDS)/$(BASE_COMMIT) OPTIONS=--missing
	-@env --unset=PYTHONPATH $(MAKE) --no-print-directory records-run OUT=$(RECORDS)/present
	@$(BIN)/python records/compare.py $(RECORDS)/$(BASE_COMMIT) $(RECORDS)/present --scenarios $(SCENARIOS)

records-run: setup $(RECORDS_VLLM) ## Record this tree's training runs: OUT=DIR [SCENARIOS="demo ppo"]
	@test -n "$(OUT)" || { echo "OUT is not set; expected make records-run OUT=DIR" >&2; exit 2; }
	@$(BIN)/python records/run.py --out $(OUT) $(OPTIONS) --scenarios $(SCENARIOS)

# vLLM's pins would move the packages of the development environment, so it has one of its own, which sees that one's
# packages (torch and Dovetail among them) and holds only what vLLM adds. Its CUDA builds of torchvision and others would
# break `import transformers` beside a CPU build of torch.
.venv-vllm/.ready: $(VENV)/.ready plugins/rollout_vllm/requirements-cpu.txt
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv --without-pip .venv-vllm
	.venv-vllm/bin/python tests/see_environment.py $(VENV)
	.venv-vllm/bin/python $(PIP_INSTALL) $(CONSTRAINTS) --requirement plugins/rollout_vllm/requirements-cpu.txt
	.venv-vllm/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

# SGLang pins packages that need an accelerator; what its server imports on a CPU is listed, the rest stays away.
.venv-sglang/.ready: $(VENV)/.ready plugins/rollout_sglang/requirements-cpu.txt plugins/rollout_sglang/requirements-cpu-engine.txt
	test -x .venv-sglang/bin/python || $(PYTHON) -m venv --without-pip .venv-sglang
	.venv-sglang/bin/python tests/see_environment.py $(VENV)
	.venv-sglang/bin/python $(PIP_INSTALL) $(CONSTRAINTS) --requirement plugins/rollout_sglang/requirements-cpu.txt
	.venv-sglang/bin/python $(PIP_INSTALL) --no-deps --requirement plugins/rollout_sglang/requirements-cpu-engine.txt
	touch $@

.venv-trackers/.ready: $(VENV)/.ready plugins/trackers/requirements-test.txt
	test -x .venv-trackers/bin/python || $(PYTHON) -m venv --without-pip .venv-trackers
	.venv-trackers/bin/python tests/see_environment.py $(VENV)
	.venv-trackers/bin/python $(PIP_INSTALL) $(CONSTRAINTS) --requirement plugins/trackers/requirements-test.txt
	touch $@

.venv-proofs/.ready: $(VENV)/.ready plugins/gateway/requirements-proofs.txt plugins/environments_reasoning_gym/requirements-proofs.txt
	test -x .venv-proofs/bin/python || $(PYTHON) -m venv --without-pip .venv-proofs
	.venv-proofs/bin/python tests/see_environment.py $(VENV)
	.venv-proofs/bin/python $(PIP_INSTALL) $(CONSTRAINTS) --requirement plugins/gateway/requirements-proofs.txt --requirement plugins/environments_reasoning_gym/requirements-proofs.txt
	touch $@

# Harbor needs Python 3.12 or later, of the system or of pyenv; without one its tests are skipped.
PYTHON_312 ?= $(shell for each in python3.12 python3.13 python3.14 $(wildcard $(HOME)/.pyenv/versions/3.1[234].*/bin/python3); do $$each -c 'import sys; print(sys.executable)' 2>/dev/null && break; done)

.venv-harbor/.ready: plugins/environments_harbor/requirements-proofs.txt
	@test -n "$(PYTHON_312)" || echo "There is no Python 3.12 here: the tests of Harbor are skipped; set PYTHON_312=..."
	$(if $(PYTHON_312),test -x .venv-harbor/bin/python || $(PYTHON_312) -m venv .venv-harbor)
	$(if $(PYTHON_312),.venv-harbor/bin/python $(PIP_INSTALL) --requirement plugins/environments_harbor/requirements-proofs.txt)
	$(if $(PYTHON_312),touch $@)

.venv-openenv/.ready: plugins/environments_openenv/requirements-proofs.txt
	test -x .venv-openenv/bin/python || $(PYTHON) -m venv .venv-openenv
	.venv-openenv/bin/python $(PIP_INSTALL) --requirement plugins/environments_openenv/requirements-proofs.txt
	touch $@

.venv-textarena/.ready: plugins/environments_textarena/requirements-proofs.txt
	test -x .venv-textarena/bin/python || $(PYTHON) -m venv .venv-textarena
	.venv-textarena/bin/python $(PIP_INSTALL) --requirement plugins/environments_textarena/requirements-proofs.txt
	touch $@

.venv-verifiers/.ready: plugins/environments_verifiers/requirements-proofs.txt
	test -x .venv-verifiers/bin/python || $(PYTHON) -m venv .venv-verifiers
	.venv-verifiers/bin/python $(PIP_INSTALL) --requirement plugins/environments_verifiers/requirements-proofs.txt
	touch $@

.venv-site/.ready: $(VENV)/.ready docs/requirements.txt
	test -x .venv-site/bin/python || $(PYTHON) -m venv --without-pip .venv-site
	.venv-site/bin/python tests/see_environment.py $(VENV)
	.venv-site/bin/python $(PIP_INSTALL) --requirement docs/requirements.txt
	touch $@

.venv-trl/.ready: $(VENV)/.ready benchmarks/peers/requirements-trl.txt
	test -x .venv-trl/bin/python || $(PYTHON) -m venv --without-pip .venv-trl
	.venv-trl/bin/python tests/see_environment.py $(VENV)
	.venv-trl/bin/python $(PIP_INSTALL) $(CONSTRAINTS) --requirement benchmarks/peers/requirements-trl.txt
	touch $@

# What verl's algorithms import, at versions of their own; its pins of torch and transformers are not followed.
.venv-verl/.ready: $(VENV)/.ready tests/end_to_end/requirements-verl.txt
	test -x .venv-verl/bin/python || $(PYTHON) -m venv --without-pip .venv-verl
	.venv-verl/bin/python tests/see_environment.py $(VENV)
	.venv-verl/bin/python $(PIP_INSTALL) --no-deps --requirement tests/end_to_end/requirements-verl.txt
	touch $@

clean:
	test ! -e .records/base || git worktree remove --force .records/base
	rm -rf .records .release coverage dist site demo .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
