# make demo    the whole pipeline on real input, from nothing
# make test    the tests that need no GPU, the simulator's in a run of its own beside the others
# make test-more   the first of those left out of it: the dearer tests of each family, and a kernel of each compiled; CI's second job
# make test-slow   all those left out of it for their length: every variant of every kernel compiled; every case of parametrized tests; more examples of Hypothesis
# make test-newest   most of those that need no GPU, with the newest release of each library; NEWEST_PYTHON says which Python
# make test-versions   some of them, and the wheel, with each Python of VERSIONS, 3.11 to 3.14, which uv finds or brings
# make test-dist   the wheel and the source distribution built, looked into, and tried in an environment of their own
# make gpu-test  the tests that need a GPU; fails where none ran
# make campaign    3,000 seeded kills, 1,000 damages and 50 power cuts (as root), 1,000 kills of counts and 1,000 cuts of what they keep, into campaign.json, and 1,000 lives of 500 steps: three hours and a half on two cores, a quarter of an hour on 32; make campaign CASES=300 DAMAGES=100 CUTS=5 COUNTS=100 STATES=100 SEED=7 LIVES=100x75 runs fewer, and others
# make campaign-ci   60 damages, 5 cuts, 30 kills of counts, 30 cuts of states and 300 kills, or as many of these as begin within five minutes, and 200 lives of 75 steps: five to eight minutes on two cores
# make slurm     batch jobs under Slurms of two nodes, which it brings up on this host; as root, with Slurm's packages; make slurm STOPS=20 STOPS_SEED=7 stops them twice as often, and always alike
# make slurm-nightly   the same with 50 random stops
# make sanitize    every kernel under compute-sanitizer, which comes with CUDA's toolkit; needs a GPU
# make docs    the site, into build/site: executes the worked pages; fails where one fails, or a link between pages leads nowhere
# make linkcheck    whether the links to other sites lead somewhere; needs the network
# make man     docs/tilewright.1, the manual page, from what the commands say of themselves
# make dist    the wheel and the source distribution, into dist/; the wheel with the kernels of usual jobs, compiled; make dist KERNELS= compiles none, KERNELS='--capability 9.0' those of one kind of GPU
# make changelog   what changes/ will make of the next section of CHANGELOG.md
# make lint    ruff, mypy, import direction, what type checkers say of a user's script
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
DOCS_INSTALLED := $(VENV)/.docs
NEWEST := .venv-newest
# Several libraries give their newest releases to newer Pythons only.
NEWEST_PYTHON ?= python3.13
VERSIONS ?= 3.11 3.12 3.13 3.14
# Every kernel compiled, loops on a CPU, plans, whole products on clusters, the command line, what others do not promise.
VERSIONS_TESTS := tests/test_imports.py tests/test_private_parts.py tests/test_surface.py tests/kernels/cpu tests/kernels/gpu tests/kernels/gemm/test_compile.py tests/pipeline/plan tests/pipeline/store/test_region.py tests/pipeline/text/test_corpus.py tests/workflows/matmul/test_values.py tests/workflows/matmul/test_parts_of_k.py tests/workflows/test_cli.py
CASES ?= 3000
DAMAGES ?= 1000
CUTS ?= 50
COUNTS ?= 1000
STATES ?= 1000
SEED ?= 0
LIVES ?= 1000x500
# After which make campaign-ci begins no other case.
SECONDS_OF_CASES ?= 300
TABLE ?= campaign.json
# Those that the wheel has: what `tilewright kernels --into` is asked for.
KERNELS ?= --capability all
DOCS_VERSION ?=
# What `make test` runs, and the modules that `make lint` does.
QUICK := not gpu and not multigpu and not slow and not more
LINTED := tests/test_imports.py tests/test_private_parts.py tests/test_surface.py tests/test_types.py

# Without bytecode each process of the tests compiles all modules of ours anew, and pytest's all tests.
unexport PYTHONDONTWRITEBYTECODE

# BLAS would give itself a thread for every core in each of the processes, which spin while they wait for each other.
test test-host test-simulator test-more test-slow test-newest test-versions test-dist: export OPENBLAS_NUM_THREADS := 1

.PHONY: help demo test test-host test-simulator test-more test-slow test-newest test-versions test-dist gpu-test campaign campaign-ci slurm slurm-nightly sanitize lint docs linkcheck man dist changelog clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

# The stamp depends on pyproject.toml alone: the install is editable, so source changes need no new one.
$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/tilewright demo

# Both runs at once: the threads of the simulator's wait for each other, and leave half of the cores idle.
test: $(INSTALLED)
	@$(MAKE) --no-print-directory -j 2 test-host test-simulator

# What type checkers say, what imports what, and what signatures promise belongs to lint.
test-host: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m '$(QUICK)' $(addprefix --ignore=,$(LINTED))

# What it says comes when it has ended, and not in between.
test-simulator: $(INSTALLED)
	@log=$$(mktemp); NUMBA_ENABLE_CUDASIM=1 $(BIN)/python -m pytest -n auto --dist worksteal tests/kernels tests/pipeline/text/test_lanes.py -m 'simulator and not slow' > $$log 2>&1; status=$$?; cat $$log; rm $$log; exit $$status

test-more: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal -m 'more and not slow and not gpu and not multigpu'

# Those of Hypothesis once more, with more examples.
test-slow: $(INSTALLED)
	$(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-profile thorough -m '(slow or more or hypothesis) and not gpu and not multigpu'
	NUMBA_ENABLE_CUDASIM=1 $(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-profile thorough tests/kernels tests/pipeline/text/test_lanes.py -m 'simulator and (slow or hypothesis)'

# Past pins of other libraries, not past ours: dask-cuda is made for one release of Dask.
test-newest:
	$(NEWEST_PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager --editable '.[dev]'
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --no-deps dask distributed
	$(NEWEST)/bin/python -m pytest -n auto --dist worksteal -m 'not gpu and not multigpu and not slow' tests/test_*.py tests/kernels/cpu tests/kernels/gpu tests/pipeline tests/workflows/matmul tests/workflows/test_icechunk.py

test-versions: $(addprefix test-version-,$(VERSIONS))

test-version-%: $(INSTALLED)
	$(BIN)/uv venv --quiet --clear --python $* $(VENV)-$*
	$(BIN)/uv pip install --quiet --python $(VENV)-$*/bin/python --editable '.[test]'
	$(VENV)-$*/bin/python -m pytest -n auto --dist worksteal -m 'not gpu and not multigpu and not slow' $(VERSIONS_TESTS)
	TILEWRIGHT_PYTHON=$(VENV)-$*/bin/python $(BIN)/python -m pytest -m slow tests/test_distribution.py
	$(BIN)/uv pip freeze --quiet --python $(VENV)-$*/bin/python | grep -E '^(numpy|numba|numba-cuda|dask|distributed|zarr|numcodecs)=='

test-dist: $(INSTALLED)
	$(BIN)/python -m pytest -m slow tests/test_distribution.py

gpu-test: $(INSTALLED)
	$(BIN)/python -m pytest --hypothesis-profile thorough -m 'gpu or multigpu'

campaign: $(INSTALLED)
	$(BIN)/python -m tests.campaign --kills $(CASES) --damages $(DAMAGES) --cuts $(CUTS) --counts $(COUNTS) --states $(STATES) --seed $(SEED) --table $(TABLE) --logs $(TABLE).logs
	TILEWRIGHT_LIVES=$(LIVES) $(BIN)/python -m pytest -n auto --dist worksteal --timeout 0 -m slow tests/workflows/test_lives.py

campaign-ci: $(INSTALLED)
	$(BIN)/python -m tests.campaign --kills 300 --damages 60 --cuts 5 --counts 30 --states 30 --seconds $(SECONDS_OF_CASES) --seed $(SEED) --table $(TABLE) --logs $(TABLE).logs
	$(BIN)/python -m pytest -n auto --dist worksteal --hypothesis-seed $(SEED) -m slow tests/workflows/test_lives.py

slurm: $(INSTALLED)
	PYTHON=$(CURDIR)/$(BIN)/python tests/slurm/run

slurm-nightly: $(INSTALLED)
	PYTHON=$(CURDIR)/$(BIN)/python STOPS=50 tests/slurm/run

sanitize: $(INSTALLED)
	$(BIN)/python -m tests.kernels.gemm.sanitized

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q $(LINTED)

$(DOCS_INSTALLED): pyproject.toml $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	@touch $@

# DOCS_VERSION puts it into a folder of that name, beside those of other versions, which every page offers; what is at
# build/site itself then leads to it.
docs: $(DOCS_INSTALLED)
	DOCS_VERSION=$(DOCS_VERSION) $(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -c docs -b html . build/site/$(DOCS_VERSION)
	$(BIN)/python docs/versions.py build/site $(DOCS_VERSION)

linkcheck: $(DOCS_INSTALLED)
	DOCS_EXECUTE=off $(BIN)/python -m sphinx --quiet --keep-going --fresh-env -c docs -b linkcheck . build/linkcheck

dist: $(INSTALLED)
	PYTHON=$(BIN)/python .ci/dist dist $(KERNELS)

changelog: $(INSTALLED)
	$(BIN)/towncrier build --draft --version $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

man: $(INSTALLED)
	$(BIN)/python -m tilewright.workflows.commands.manual docs/tilewright.1

clean:
	rm -rf $(VENV) $(VENV)-3.* $(NEWEST) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache demo-output
