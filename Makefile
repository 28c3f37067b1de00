# Settings: PYTHON makes the environment VENV (.venv). If PY is given, it is used unchanged instead.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
VENV ?= .venv
ifndef PY
PY := $(VENV)/bin/python
READY := $(VENV)/.tierckpt-ready
# Enough for the demo; an environment for the tests is as well.
DEMO_READY := $(or $(wildcard $(READY)),$(VENV)/.tierckpt-demo-ready)
S3 := $(VENV)/.tierckpt-s3-ready
else
HOROVOD_ARGS := --check
export PYTHONPATH := $(CURDIR):$(CURDIR)/common:$(PYTHONPATH)
endif
# Tests wait more than they compute: more workers than cores. 0: all in one process.
TEST_WORKERS ?= 3
PYTEST_ARGS := $(if $(filter-out 0,$(TEST_WORKERS)),-n $(TEST_WORKERS))
PYTEST := $(PY) -m pytest $(PYTEST_ARGS)
# Run at toy size: what they start has imported torch already. tests/dist runs goodput.py and stall.py.
BENCHMARKS := benchmarks/coding.py benchmarks/levels.py \
	benchmarks/restart.py benchmarks/deltas.py benchmarks/agreement.py \
	benchmarks/budget.py benchmarks/replicacheck.py benchmarks/objectstore.py \
	benchmarks/saturated.py benchmarks/attach.py benchmarks/stepcost.py \
	benchmarks/manyranks.py benchmarks/ballots.py benchmarks/scale.py benchmarks/routed.py \
	benchmarks/journal.py benchmarks/papers.py

.PHONY: help venv horovod horovod-for-tests s3-for-tests demo demo-horovod spares overlap test test-quick test-unit test-store test-dist test-crash test-gpu coverage lint format docs bench figures chaos mutants simulate-faults suites oldest-frameworks clean

help:
	@echo 'make demo        train a small classifier on two ranks, kill one, and compare the loss curves'
	@echo 'make demo-horovod  the same under elastic Horovod'
	@echo 'make overlap     a small job under Horovod, and its report: copies during the allreduces'
	@echo 'make spares      eight nodes and four spares; a node is lost five times'
	@echo 'make test-quick  the promises in two minutes: a kill, a restore, both adapters, each level'
	@echo 'make test        run all tiers of tests: half an hour'
	@echo 'make test-TIER   run one tier: unit store dist crash gpu (gpu is skipped without CUDA)'
	@echo 'make lint        check formatting, lint, types and imports; make format repairs the first two'
	@echo 'make docs        build the documentation site (build/docs/html), without any warning'
	@echo 'make coverage    run all tiers and list the lines that no test runs'
	@echo 'make bench       run the benchmarks at toy size'
	@echo 'make figures     measure the figures of the documents again, in 90 minutes (QUICK=1: in 10), and set both side by side'
	@echo 'make simulate-faults  whole jobs in a simulated world for MINUTES (10), from SEED (1) on'
	@echo 'make chaos       random faults for CHAOS_SECONDS (600), with CHAOS_SEED (0), under CHAOS_LAUNCHER (ddp or horovod; ddp-journal, horovod-journal)'
	@echo 'make mutants     try N (20) more mutants of the product on the tests; CHECK=1: those that were killed, again'
	@echo "make suites      torch's and Horovod's own tests, with checkpoints; see CONTRIBUTING.md"
	@echo 'make oldest-frameworks  tests of the oldest supported Lightning, Accelerate and Transformers'
	@echo 'make venv        make only the environment (.venv), which the other targets make and reuse'
	@echo 'make horovod     build Horovod for the torch in .venv, once (minutes); with MPI if there is an MPI compiler'
	@echo 'make clean       remove build products and caches; .venv stays'
	@echo
	@echo 'Variables:'
	@echo 'PYTHON=python3.12           make .venv from this Python, with its torch if it has one'
	@echo 'TORCH_INSTALL_ARGS="..."    arguments of pip install for torch, such as --index-url'
	@echo 'VENV="$$VIRTUAL_ENV"         install into this environment instead of .venv'
	@echo 'PY=python                   use this Python unchanged, and install nothing'
	@echo 'HOROVOD_WITHOUT_MPI=1       build Horovod without MPI even if there is an MPI compiler'
	@echo 'TEST_WORKERS=3              number of test files that run in parallel; 0: one after the other, in one process'
	@echo 'REQUIRE_HOROVOD=1           let tests fail if Horovod is missing; also REQUIRE_MPI, REQUIRE_S3, REQUIRE_SLURM'

venv: $(READY)
	@:

$(VENV)/.tierckpt-ready: EXTRA := dev
$(VENV)/.tierckpt-demo-ready: EXTRA := demo
$(VENV)/.tierckpt-ready $(VENV)/.tierckpt-demo-ready: setup.cfg setup.py $(wildcard common/tierckpt/*/*.c) tools/bootstrap.py
	@test -n "$(PYTHON)" || { echo "No Python 3.11 or newer that can make virtual environments was found."; \
	echo "Install one (on Debian and Ubuntu: python3-venv) or name it: make PYTHON=/path/to/python"; exit 1; }
	@$(PYTHON) tools/bootstrap.py $(VENV) $(EXTRA)
	@touch $@

horovod: $(READY)
	@$(PY) tools/make_horovod.py $(HOROVOD_ARGS)

# Continues without Horovod, with a message; then REQUIRE_HOROVOD=1 makes pytest fail, as does REQUIRE_MPI=1 without MPI.
horovod-for-tests: $(READY)
	@$(PY) tools/make_horovod.py --for-tests $(HOROVOD_ARGS)

# A real S3 server and a client, 50 MB, for the tests alone. Continues without them, with a message; REQUIRE_S3=1 makes pytest fail.
s3-for-tests: $(READY) $(S3)
	@:

$(VENV)/.tierckpt-s3-ready: setup.cfg $(VENV)/.tierckpt-ready
	@echo "[s3] installing an S3 server and client for the tests (the s3-tests extra)"
	@if $(PY) -m pip install --quiet --disable-pip-version-check --editable '.[s3-tests]'; then touch $@; else \
	echo "[s3] that failed, for the reason above: tests that need them will be reported as skipped"; fi

demo: $(DEMO_READY)
	$(PY) examples/digits/demo.py

demo-horovod: horovod
	$(PY) examples/digits/demo.py --launcher horovodrun --picture demo-horovod.png

# Needs an idle machine, or the picture shows other load.
overlap: horovod
	@rm -rf overlap; mkdir overlap
	TIERCKPT_TRACE_DIR=overlap TIERCKPT_EVENTS_DIR=overlap HOROVOD_TIMELINE=overlap/hvd.json OMP_NUM_THREADS=1 \
	$(PY) -m horovod.runner.launch --gloo -np 2 --network-interfaces lo $(PY) examples/overlap/train.py overlap/ckpts
	$(PY) -m tierckpt trace summary --from-version 8 --ours overlap/trace-r*.json --horovod overlap/hvd.json
	$(PY) -m tierckpt report overlap -o overlap.html

spares: $(READY)
	$(PY) examples/spares/experiment.py

# Horovod's build, minutes at the first time, is beside the tests that do not need it. Where it is there, with
# MPI, all tests are one run: a second one would import torch and all tests again, in each worker.
test: s3-for-tests
	@echo '[test] all tiers: unit and store, then dist, crash and gpu. Half an hour on two idle cores, and'
	@echo '[test] more beside other work. make test-quick holds the promises in two minutes; make test-unit'
	@echo '[test] is the shortest tier.'
	@if [ -z "$$HOROVOD_WITHOUT_MPI" ] && $(PY) tools/make_horovod.py --check 2>&1 | grep 'mpi works$$'; then \
	exec $(PYTEST); fi; mkdir -p build; \
	$(MAKE) --no-print-directory horovod-for-tests >build/horovod.log 2>&1 & horovod=$$!; \
	trap 'kill $$horovod 2>/dev/null; exit 130' INT TERM; \
	$(PYTEST) tests/unit tests/store; first=$$?; \
	echo '[test] that were the first two tiers (exit status '$$first'); now the others'; \
	wait $$horovod; cat build/horovod.log; \
	$(PYTEST) tests/dist tests/crash tests/gpu && exit $$first

# The promises, a few tests for each: a kill, a restore, both adapters, each level.
test-quick: $(READY)
	@echo "[test] the promises, in some two minutes on two idle cores: $$(grep -c :: tests/quick.txt) of the tests."
	@echo '[test] Those of Horovod are skipped until make horovod or make test has built it.'
	$(PYTEST) @tests/quick.txt

test-dist test-crash: horovod-for-tests
test-store test-dist: s3-for-tests
test-unit test-store test-dist test-crash test-gpu: test-%: $(READY)
	$(PYTEST) tests/$*

coverage: horovod-for-tests s3-for-tests
	$(PY) -m coverage erase
	$(PY) -m coverage run -m pytest $(PYTEST_ARGS)
	$(PY) -m coverage combine --quiet
	$(PY) -m coverage report

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -c 'from importlinter.cli import lint_imports_command as lint; lint()' --no-logo --no-cache
	$(PY) tools/weight.py --check

format: $(READY)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

# The second command finds links that lead nowhere, and whatever would be loaded from another host.
docs: $(READY)
	rm -rf build/docs
	PYTHONPATH=.:common $(PY) -m sphinx --quiet --fail-on-warning --conf-dir docs/site --doctree-dir build/docs/trees . build/docs/html
	$(PY) tools/check_site.py build/docs/html

bench: $(READY)
	@PYTHONPATH=. $(PY) -m tests.support.warm_python.servers sh -ec \
	'for script; do echo "$$script --toy"; python $$script --toy; done' sh $(BENCHMARKS)

# Needs an idle machine. New results are in build/figures; the documents stay as they are.
figures: $(READY)
	$(PY) benchmarks/figures.py --run $(if $(QUICK),--quick)

SEED ?= 1
MINUTES ?= 10
CHAOS_SECONDS ?= 600
CHAOS_SEED ?= 0
CHAOS_LAUNCHER ?= ddp
chaos: $(READY)
	PYTHONPATH=.:common $(PY) -m tests.chaos --seconds $(CHAOS_SECONDS) --seed $(CHAOS_SEED) --launcher $(CHAOS_LAUNCHER)

# Hours for all, in one process. The tests run once without a mutant, the first time: half an hour.
N ?= 20
mutants: $(READY)
	$(PY) tools/mutants.py $(if $(CHECK),check,run) $(N)

simulate-faults: $(READY)
	PYTHONPATH=. $(PY) -m tests.simulator --seed $(SEED) --minutes $(MINUTES)

suites: horovod
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps expecttest
	PYTHONPATH=.:common $(PY) -m tests.suites $(SUITES)

# Needs the network once: the environments stay in build/oldest-frameworks.
oldest-frameworks: $(READY)
	PYTHONPATH=.:common $(PY) -m tests.oldest_frameworks

clean:
	rm -rf build dist *.egg-info common/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find . -path ./$(VENV) -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
