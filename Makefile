# Everything runs from .venv, which this file creates. You need Python 3.10-3.13 and a C compiler, but no Redis and no Docker.

PYTHON ?= python3
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
INSTALL := $(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt
# Most tests wait for something most of the time.
JOBS ?= 10
# Tests that share a slow-starting server run in one process, see tests/conftest.py.
# The plugins are for tests/smoke, and import much.
PARALLEL := -n $(JOBS) --dist loadgroup --ignore tests/smoke -p no:celery -p no:docker_tools
# `make versions` and `make wheel` have a target for each of these, in an environment of its own.
CELERIES := celery-5.4 celery-5.5 celery-5.6 celery-5.7
WHEELS := wheel-3.10 wheel-3.11 wheel-3.12 wheel-3.13
# Tests start hundreds of programs: compiling everything anew in each would take longer than the tests.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help setup demo compose-demo test lint test-slow test-all test-servers simulate smoke storm celery-suite versions wheel prereleases docs bench bench-compare model fuzz coverage constraints clean
.PHONY: mutants dist $(CELERIES) $(WHEELS)

help:
	@echo "make demo      two workers, a crash, and a timeline that shows who ran when (about 20 s)"
	@echo "make compose-demo  two workers and two beats in containers; one of each is killed (Docker; about 1 min)"
	@echo "make test      unit, contract and integration tests on a real Redis and real workers"
	@echo "make test-slow the slow tests"
	@echo "make test-all  both"
	@echo "make test-servers  tests of stores and locks on other servers (SERVERS=\"dir dir\": each with a redis-server)"
	@echo "make simulate  workers and lock servers, simulated: 10,000 seeds (SEEDS=…, MINUTES=… to stop earlier)"
	@echo "make smoke     worker containers that share a host name, or are paused (Docker; about 3 min)"
	@echo "make storm     real workers, and everything goes wrong for some minutes (MINUTES=5 SEED=1 STORM='--on cluster')"
	@echo "make celery-suite  Celery's own tests, with its Task and with SingletonTask, compared (about 40 min)"
	@echo "make model     the protocol's models, checked exhaustively by Spin (apt-get install spin; about 20 min)"
	@echo "make mutants   deliberate faults in the package, and the seed that finds each (about 2 min; BASE=main: in files that differ from it)"
	@echo "make fuzz      hundreds of thousands of messages, settings, stored values and answers (TIMES=100; about 10 min)"
	@echo "make versions  make test on every supported Celery (about 40 min; one of them: make celery-5.4)"
	@echo "make wheel     what is published, on every Python, with the oldest and the newest libraries (about 20 min; one of them: make wheel-3.10)"
	@echo "make prereleases  unit and contract tests with what is not out yet of Celery and redis-py"
	@echo "make lint      ruff, mypy, import-linter, codespell"
	@echo "make docs      build the documentation as a site, check its links, and run its code blocks"
	@echo "make constraints  renew the exact versions of what develops and tests this (constraints.txt)"
	@echo "make bench     what a lock costs, compared with other libraries (about 17 min; BENCH=--quick: 4 min)"
	@echo "make bench-compare  what it costs, compared with another commit (BASE=commit; COMPARE=--quick: 1 min)"

setup: .venv/.dev

.venv/.demo: pyproject.toml constraints.txt
	@test -x $(BIN)/uv || ($(PYTHON) -m venv .venv && $(BIN)/python -m pip install --quiet -c constraints.txt uv)
	@$(INSTALL) -e '.[embedded]' --group demo
	@touch $@

.venv/.dev: .venv/.demo
	@$(INSTALL) -e '.[embedded]' --group dev
	@touch $@

# Else each of the processes that run tests compiles them all.
.venv/.compiled: .venv/.dev
	@$(PYTEST) --collect-only --quiet --quiet --ignore tests/smoke > /dev/null
	@touch $@

demo: .venv/.demo
	@$(BIN)/python -m examples.demo

# COMPOSE_DEMO="rabbitmq redlock" also uses these files of docker/.
compose-demo: .venv/.demo
	@$(BIN)/python -m examples.containers $(COMPOSE_DEMO)

test: .venv/.compiled
	$(PYTEST) $(PARALLEL) -m "not slow"

# Environments with other people's packages, for tests/beside.
.venv/.beside: .venv/.dev
	@for group in beside beside-older; do \
	  test -x .venv/$$group/bin/python || $(BIN)/uv venv --quiet --python $(BIN)/python .venv/$$group; \
	  $(BIN)/uv pip install --quiet --python .venv/$$group/bin/python -e '.[embedded]' typing-extensions --group $$group || exit 1; \
	done
	@touch $@

test-slow: .venv/.compiled .venv/.beside
	$(PYTEST) $(PARALLEL) -m "slow and not smoke and not storm"

test-all: test test-slow

# SERVERS="dir dir": folders that have a redis-server each, Redis 6.2 or newer or Valkey. What speaks to the server.
ON_SERVERS := tests/contract $(addprefix tests/integration/test_,$(addsuffix .py,doctor late_requests line lock \
  lock_holding lock_servers outage redis_py_lock redis_store redlock replacing server_faults topologies))
test-servers: .venv/.compiled
	@test -n "$(SERVERS)" || { echo "SERVERS=\"dir dir\" names folders with a redis-server each" && exit 2; }
	for server in $(SERVERS); do PATH="$$server:$$PATH" $(PYTEST) $(PARALLEL) -m "not slow" $(ON_SERVERS) || exit 1; done


# SEEDS=7000..7999 runs these seeds. SIMULATE=--shrink: see `python -m tests.simulation --help`.
simulate: .venv/.dev
	$(BIN)/python -m tests.simulation --seeds $(or $(SEEDS),10000) $(if $(MINUTES),--minutes $(MINUTES)) $(SIMULATE)

.venv/.smoke: .venv/.dev
	@$(INSTALL) --group smoke
	@touch $@

smoke: .venv/.smoke
	$(PYTEST) tests/smoke

# STORM="--load flood" sends as fast as it can, "--on redlock" locks on five servers, "--soak" looks at what an hour of
# work leaves behind. SEED=… repeats what goes wrong; the outcome depends on the machine.
storm: .venv/.dev
	$(BIN)/python -m tests.storm --minutes $(or $(MINUTES),5) $(if $(SEED),--seed $(SEED)) $(STORM)

# Slow, and so not in CI: the results are in tests/celery_suite/README.md.
celery-suite: .venv/.dev
	$(BIN)/python -m tests.celery_suite $(CELERY_SUITE)

model: .venv/.dev
	@$(BIN)/python -m tests.model $(MODEL)

# Each target's own environment, made anew, with the newest of what is asked for, and not what constraints.txt names.
FRESH = $(BIN)/uv venv --quiet --clear .venv/$@ --python
INTO = $(BIN)/uv pip install --quiet --python .venv/$@/bin/python
TEST = .venv/$@/bin/python -m pytest $(PARALLEL) -m "not slow"

versions: $(CELERIES)

# TESTS="tests/unit" runs these only; so it does with prereleases and wheel.
$(CELERIES): celery-%: .venv/.demo
	$(FRESH) $(BIN)/python
	$(INTO) -e '.[embedded]' 'celery[redis]==$*.*' --group test
	$(TEST) $(TESTS)

prereleases: .venv/.demo
	$(FRESH) $(BIN)/python
	$(INTO) -e '.[embedded]' --group test
# Not with their extras, which would hold redis-py back.
	$(INTO) --upgrade --prerelease allow celery kombu billiard redis
	$(TEST) tests/unit/test_celery_private.py
	$(TEST) $(or $(TESTS),tests/unit tests/contract)

wheel: $(WHEELS)

# The wheel, and the tests of the sdist without the package's source.
DIST := .venv/dist
dist: .venv/.demo
	@rm -rf $(DIST)
	$(BIN)/uv build --quiet --out-dir $(DIST)
	@mkdir $(DIST)/tests && tar -xf $(DIST)/*.tar.gz -C $(DIST)/tests --strip-components 1 --exclude '*/celery_singleton_lock'

# The oldest optional libraries know the oldest Python only. The tests' own tools come last, and are the newest: the oldest
# cannot be built any more.
$(WHEELS): wheel-%: dist
	set -e; for resolution in lowest-direct highest; do \
	  $(FRESH) $*; \
	  $(INTO) --resolution $$resolution -r $(DIST)/tests/pyproject.toml $(if $(filter 3.10,$*),--all-extras,--extra embedded); \
	  $(INTO) --no-deps $(DIST)/*.whl; \
	  $(INTO) --group $(DIST)/tests/pyproject.toml:test; \
	  (cd $(DIST)/tests && ../../../$(TEST) $(or $(TESTS),tests/unit tests/contrib)); \
	done

lint: .venv/.dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/basedpyright

docs: .venv/.dev
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet --fresh-env docs docs/_build/html
	$(PYTEST) $(PARALLEL) -m "not slow" tests/unit/test_docs.py tests/integration/test_docs.py tests/contrib/test_fencing_docs.py
	@echo "the site is at docs/_build/html/index.html"

.venv/.bench: .venv/.dev
	@$(INSTALL) --group bench
	@touch $@

bench: .venv/.bench
	$(BIN)/python -m benchmarks $(BENCH)

# BASE is by default the commit where this branch left main, or the previous commit. Prints a table; never fails.
bench-compare: .venv/.dev
	$(BIN)/python -m benchmarks.compare $(BASE) $(COMPARE)

# NAMES="redlock trust.py" runs mutants whose name or file has this in it.
mutants: .venv/.dev
	$(BIN)/python -m tests.simulation.mutants $(NAMES) $(if $(BASE),--base $(BASE)) $(if $(SEEDS),--seeds $(SEEDS))

# TIMES=100: as many cases as 100 times those of `make test`. A fault is printed with its smallest case.
fuzz: .venv/.dev
	FUZZ_TIMES=$(or $(TIMES),100) $(PYTEST) tests/fuzz -m "not slow" --hypothesis-profile=search
	$(PYTEST) -m hypothesis --hypothesis-profile=search

coverage: .venv/.dev
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

# The exact versions of what develops and tests this, renewed.
constraints: .venv/.demo
	$(BIN)/uv pip compile pyproject.toml --group dev --group bench --group smoke --all-extras \
	  --universal --upgrade --no-header --no-annotate --quiet --output-file constraints.txt

clean:
	rm -rf dist build docs/_build .coverage* htmlcov .mypy_cache .ruff_cache .pytest_cache .hypothesis
