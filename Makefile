# `make help` lists what people call; `make demo` and `make test` set up .venv first, and a second call does not install again
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt
DEMO_ARGS ?=
TORCH_INDEX ?=
TEST_ARGS ?=

.PHONY: help demo test test-fast coverage faults compare gpu simulated-gpu soak versions ecosystem cluster bench bench-peers proofs examples lab docs pictures \
	names notebooks format check dist clean

help: ## this list; more targets, for single questions, are in the Makefile with a comment each
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: .venv/installed ## train a first model, in a minute; TORCH_INDEX=https://download.pytorch.org/whl/cpu takes the smaller PyTorch
	$(BIN)/nbtrain demo $(DEMO_ARGS)

test: .venv/installed-dev ## all tests, as in CI: a quarter of an hour on two cores
	$(BIN)/python -m pytest $(TEST_ARGS)

# What a change most often breaks, in two minutes: without kernels and browsers, the exact comparisons of states and loops, and loggers
SLOW := state/test_state_manager loops/test_random_jobs addons/test_loggers addons/test_addons_together
test-fast: .venv/installed-dev ## the tests that most often find a problem, in two minutes
	$(BIN)/python -m pytest tests/unit tests/test_layers.py $(SLOW:%=--ignore=tests/unit/%.py) $(TEST_ARGS)

# Lines and branches that `make test` reaches, those in processes that it starts among them
coverage: export PYTHONPATH := $(CURDIR)/tests
coverage: .venv/installed-dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest $(TEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# 1,000 runs that are interrupted in two lives where their state changes; 100 kills of a process that saves and 100 of whole runs, on two file
# systems; runs resumed at every save; 1,000 damaged files for each reader; and last every test that `make test` leaves out: those that are
# marked as long and three of four cases of those with five or more, about 5,000, which is as many again as it runs: hours on two cores
faults: .venv/installed-dev .venv/s3
	NBTRAIN_FAULT_CASES=1000 $(BIN)/python -m pytest --dist worksteal tests/faults/test_interrupted.py $(TEST_ARGS)
	NBTRAIN_KILLS=100 NBTRAIN_EVERY_SAVE=1 NBTRAIN_FLIPS=1000 $(BIN)/python -m pytest -m "" --ignore tests/faults/test_interrupted.py \
		tests/faults tests/unit/state/test_state_manager.py tests/unit/history/test_hostile_folders.py $(TEST_ARGS)
	$(BIN)/python -m pytest -m long $(TEST_ARGS)

# A million steps with pauses, saves, stops, restarts and kills at random beside a million without; docs/soak.md is written
soak: .venv/installed-dev
	PYTHONPATH=tests $(BIN)/python tests/faults/soak.py

# 1,000 configurations of a trainer's steps drawn at random, on Lightning's loops and on nbtrain's; 300 jobs that the package of an earlier
# commit saves and this one resumes, and the other way round; 300 jobs of two processes, beside a doubled batch in one and beside torch's DDP;
# 1,000 jobs beside a plain PyTorch loop, on both; docs/plain_loop.md is written
compare: .venv/installed-dev
	PYTHONPATH=tests $(BIN)/python tests/random_configurations.py 1000
	PYTHONPATH=tests $(BIN)/python tests/resume_across.py 300
	PYTHONPATH=tests $(BIN)/python tests/plain_distributed_loop.py 300
	PYTHONPATH=tests $(BIN)/python tests/random_jobs.py 1000 --page

# On a machine with a CUDA device: jobs beside a plain PyTorch loop, time travel, copies and interrupted runs on it, and what a step costs there.
# `make simulated-gpu` runs on devices that are simulated on the CPU, which need g++: what `make test` runs of it in a minute, and the rest. They
# count launches, waits and memory, and find reads that nothing orders; they can't show CUDA's numerics, NCCL, or how long anything takes
gpu: export NBTRAIN_TEST_DEVICE=cuda
gpu: .venv/installed-dev
	PYTHONPATH=tests $(BIN)/python tests/random_jobs.py 200
	NBTRAIN_FAULT_CASES=100 $(BIN)/python -m pytest -m "" tests/simulated_gpu tests/unit/travel tests/unit/checkpoint/test_device_copy.py \
		tests/unit/trainer/test_several_optimizers.py tests/unit/trainer/test_copies.py tests/faults/test_interrupted.py $(TEST_ARGS)
	PYTHONPATH=tests $(BIN)/python tests/benchmarks/gpu_calls.py
	$(BIN)/python tests/benchmarks/gpu.py

simulated-gpu: .venv/installed-dev
	PYTHONPATH=tests $(BIN)/python -m simulated_gpu tests/random_jobs.py 200
	$(BIN)/python -m pytest -m "" tests/test_simulated_gpu.py $(TEST_ARGS)

# The unit tests and the time of a step with each supported torch and Lightning, each torch in an environment of its own, of about 5 GB;
# docs/versions.md is written. VERSIONS="--torch 2.15.0 --only steps" chooses
versions: .venv/transformers
	$(PYTHON) tests/versions.py $(VERSIONS)

# One short job with each of the libraries that people train with, each in an environment of its own; docs/ecosystem.md is written
ecosystem: .venv-ecosystem/installed
	PYTHONPATH=tests .venv-ecosystem/bin/python tests/ecosystem $(ONLY)

.venv-ecosystem/installed: constraints.txt pyproject.toml
	test -x .venv-ecosystem/bin/python || $(PYTHON) -m venv .venv-ecosystem
	.venv-ecosystem/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	.venv-ecosystem/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable .
	touch $@

# Runs on a Ray cluster of two nodes, and submitted ones on a SLURM, which this machine pretends to be; SLURM needs Debian's munge, slurmctld,
# slurmd and slurm-client, as root. tests/benchmarks/on_ray.py in this environment says what a run costs there
cluster: .venv-cluster/installed
	PYTHONPATH=.:tests .venv-cluster/bin/python -m pytest -o addopts= -q tests/cluster $(TEST_ARGS)

.venv-cluster/installed: constraints.txt pyproject.toml
	test -x .venv-cluster/bin/python || $(PYTHON) -m venv .venv-cluster
	.venv-cluster/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	.venv-cluster/bin/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[ray,slurm]' pytest pytest-xdist
	touch $@

# The claims of speed, with the peers that are installed; docs/benchmarks.md is written
bench: .venv/installed-dev ## measure the claims of speed, and write docs/benchmarks.md: half an hour
	$(BIN)/python tests/benchmarks/saving.py
	PYTHONPATH=tests $(BIN)/python tests/benchmarks

# Every page that proves something, made again from this commit, before a release: hours on two cores, in the background. The logs are in _proofs/
PROOFS := faults compare soak versions ecosystem bench
proofs: .venv/installed-dev
	mkdir -p _proofs
	nohup sh -c 'for proof in $(PROOFS); do make $$proof > _proofs/$$proof.log 2>&1; echo "$$proof: exit code $$?"; done' > _proofs/result.log 2>&1 &

# fastai without its dependencies: tests/benchmarks/requirements.txt says why
bench-peers: .venv/installed-dev
	$(PIP) --requirement tests/benchmarks/requirements.txt
	$(PIP) --no-deps fastai==2.8.12

# Execute every notebook and compare its metrics and texts with the stored ones: minutes of training; the text that one trains on is that of Python 3.11
examples: .venv/installed-dev
	$(PIP) mnist1d==0.0.2.post1 optuna optuna-integration peft onnx onnxscript
	$(BIN)/python docs/execute.py --compare

lab: .venv/installed-dev ## the demo as a notebook
	$(BIN)/jupyter lab nbs/tutorials/first_run.ipynb

# torch comes first: a bare `torch` in a dependency would choose another build
.venv/installed: constraints.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) $(TORCH_INDEX:%=--index-url %) torch==2.13.0
	$(PIP) --editable '.[examples]'
	touch $@

# Older releases of pip know no dependency groups
.venv/installed-dev: .venv/installed | .venv/lowest .venv/transformers
	$(PIP) 'pip>=25.1'
	$(PIP) --editable '.[examples]' --group dev --group docs
	touch $@

# The lowest Lightning that is supported and a kernel of the line before, for tests that put them before the installed ones
.venv/lowest: | .venv/installed
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --target $@ lightning==2.6.4 ipykernel==6.31.0

# Not in the environment itself: where it is, torchmetrics imports it in every process that imports Lightning, which takes a second
.venv/transformers: | .venv/installed
	$(PIP) --target $@ transformers

# A server of this machine that speaks the protocol of S3, and its client
.venv/s3: | .venv/installed
	$(BIN)/pip install --quiet --target $@ 'moto[server]' s3fs

# The site in _site/html, from notebooks with the outputs they keep, pages and docstrings; a warning is an error
docs: .venv/installed-dev ## build the site in _site/html
	$(BIN)/python docs/build.py

# The view in sixteen situations, light and dark, narrow and wide, in _pictures/, and those of the README; ONLY=motion records a run,
# ONLY=pages takes ten pages of the site that `make docs` has built
ONLY ?=
pictures: .venv/installed-dev
	PYTHONPATH=tests $(BIN)/python tests/browser/pictures.py $(ONLY)

# The reference, tables in docs/, README and the types of the addons' options; it prints what it has written
names: .venv/installed-dev ## write what is made from the code: reference, tables, README, types of options
	$(BIN)/python docs/generate.py

notebooks: .venv/installed-dev ## execute every notebook and keep its outputs
	$(BIN)/python docs/execute.py

format: .venv/installed-dev ## bring what has changed into its one form, and export it
	$(BIN)/python docs/form.py

check: .venv/installed-dev ## ruff and pyright
	$(BIN)/ruff check nbs nbtrain tests docs
	$(BIN)/pyright

# The wheel and the source distribution in dist/, as they would be uploaded
dist: .venv/installed-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

clean:
	rm -rf .venv build dist _site *.egg-info .coverage*
