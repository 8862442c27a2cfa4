# The same commands for people and for CI. `make` alone lists them.
PYTHON ?= python3
POINT_SEEDS ?= 30
MINUTES ?= 30
BIN := .venv/bin
export OMP_NUM_THREADS ?= 1
# The programs started here are many, and compiling our modules anew is a tenth of what each imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo test test-gpu check fmt docs snapshots pictures bench chaos chaos-matrix chaos-shared chaos-points chaos-torn thorough quiet lossy soak

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

setup: .venv/ready ## make .venv with everything pinned in constraints.txt

# `demo` has three stages after the product's three, `setup` one; INSTALLED is how many this run of make has done.
STAGES := 3
demo: STAGES := 6
.venv/ready: STAGES := 4
INSTALLED := 0

.venv/product: pyproject.toml constraints.txt setup.py worker/sums/kernels.c worker/optimizers/update.c worker/runtime/cpu.h
	$(eval INSTALLED := 3)@$(PYTHON) tools/install.py product --of $(STAGES)
	@touch $@

.venv/ready: .venv/product
	@$(PYTHON) tools/install.py dev --of 4
	@touch $@

demo: .venv/product ## train on seven nodes of this machine, kill some, compare bit for bit; KEEP=1 leaves the cluster running
	@$(BIN)/python examples/demo.py --after $(INSTALLED) $(if $(KEEP),--keep)

# Whole clusters in one process of pytest, other live tests in the second, what computes in the third (D-testing-021).
# A test that hangs for ten minutes says where, in every thread, and fails: else CI's own limit would say nothing.
test: setup ## every test but the long repetitions
	$(BIN)/python -m pytest -m "not slow and not gpu" -n 3 \
		-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true

test-gpu: setup ## the tests that need an NVIDIA GPU (tests/gpu/README.md)
	$(BIN)/python -m pytest -m gpu tests/gpu

check: setup ## lint, format, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

docs: setup ## write docs/job-toml.md from the model of job.toml, docs/api.md from the API's, docs/settings.md from the programs', docs/console.md from the keys
	$(BIN)/python -m oobleckd.ctl.docs
	$(BIN)/python -m oobleckd.ctl.apidocs
	$(BIN)/python -m oobleckd.ctl.settingsdocs
	$(BIN)/python -m oobleckd.console.docs

snapshots: setup ## write what the console's screens look like anew; git diff shows what that changes
	$(BIN)/python -m tests.unit.console.test_snapshots

pictures: setup ## draw the console's screens into docs/images
	$(BIN)/python -m tests.unit.console.pictures

bench: setup ## the planner against brute force and the optimum; recovery and throughput, against other systems
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/recovery.py
	$(BIN)/python benchmarks/throughput.py
	$(BIN)/python benchmarks/throughput.py --tokens 128
	$(BIN)/python benchmarks/schedules.py
	$(BIN)/python benchmarks/lag.py
	$(BIN)/python benchmarks/flood.py
	$(BIN)/python benchmarks/fleet.py
	$(BIN)/python benchmarks/modelled.py
	$(BIN)/python benchmarks/backward.py
	$(BIN)/python benchmarks/bubbles.py
	$(BIN)/python benchmarks/shared_stages.py
	$(BIN)/python benchmarks/rerouted.py --live
	$(BIN)/python benchmarks/console.py
	$(BIN)/python benchmarks/million.py

chaos: SEEDS ?= 20
chaos: setup ## kills at random times; SEEDS=50 for fifty of them
	$(BIN)/python benchmarks/chaos.py --seeds $(SEEDS)

chaos-matrix: setup ## a kill in every phase of a step, of every kind of victim
	$(BIN)/python benchmarks/chaos.py --matrix

chaos-shared: setup ## the same in jobs whose stages have two devices, or four
	$(BIN)/python benchmarks/chaos.py --matrix --devices-per-stage 2
	$(BIN)/python benchmarks/chaos.py --matrix --devices-per-stage 4

chaos-points: setup ## a kill inside a backup, a validation or a copy; POINT_SEEDS=60 for sixty of them
	$(BIN)/python benchmarks/chaos.py --points --seeds $(POINT_SEEDS)

quiet: setup ## train under load: no node may be lost; MINUTES=2 for a short one
	$(BIN)/python benchmarks/quiet.py --minutes $(MINUTES)

lossy: setup ## the same over two network namespaces with lost and late packets (needs root)
	$(BIN)/python benchmarks/lossy.py --minutes $(MINUTES)

soak: SEEDS ?= 5000
soak: setup ## bad weather in simulated worlds, SEEDS=50000 for so many; the slow ones of tests/loopback; 10,000 nodes
	$(BIN)/python benchmarks/soak.py --seeds $(SEEDS)
	$(BIN)/python -m pytest -q -m slow tests/loopback
	$(BIN)/python benchmarks/fleet.py --nodes 10000

thorough: setup ## all simulated and single-process tests, also the slow ones; kills on every kind of data
	$(BIN)/python -m pytest -m "(thin or slow) and not gpu" -n 2 tests/sim tests/unit
	$(BIN)/python -m pytest -m slow tests/loopback/test_data_kinds.py
	$(BIN)/python benchmarks/million.py --steps 1000 50000

chaos-torn: setup ## a writer killed in the middle of a checkpoint file, 20 times
	$(BIN)/python benchmarks/chaos.py --torn 20

