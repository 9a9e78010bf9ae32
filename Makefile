# The two commands are `make rehearse` and `make test`; each sets up what it needs by itself.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
PYTHON := .venv/bin/python
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# The engine of the rehearsal: standin, or vllm, which installs real vLLM (6 GB) and takes 8 GB of memory.
ENGINE ?= standin
# More arguments for ansible-playbook, for example: make rehearse ARGS="--tags edge --limit gw1"
ARGS ?=
# Checks of tests/run/crate, all if none is named.
CRATE ?=

.PHONY: help setup ahead rehearse rehearse-down preprocessor test test-slow lint sanity unit package e2e molecule crate engine bench lock

help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: ## Debian packages and .venv (done by the other targets)
	@rehearsal/setup

# The preprocessor's first build takes minutes, and images of hosts take some. They are begun beside what leaves a core idle
# now and then; who needs them waits, or builds them anew and says what is wrong.
AHEAD := rehearsal.preprocessor rehearsal.images
ahead: setup
	@mkdir -p .cache && (nohup nice -n 19 $(SHELL) -c 'for each; do $(PYTHON) -m $$each; done' ahead $(AHEAD) > .cache/ahead.log 2>&1 &)

rehearse: AHEAD := "rehearsal.preprocessor --architecture $(shell uname -m)"
rehearse: ahead ## the main job: fleet, site.yml, a chat through the edge, the summary
	@$(PYTHON) -m rehearsal --engine $(ENGINE) run -- $(ARGS)

rehearse-down: ## remove all that `make rehearse` made
	@[ -x $(PYTHON) ] || rehearsal/setup
	@$(PYTHON) -m rehearsal --engine $(ENGINE) down

preprocessor: setup ## the preprocessor's static binaries, for x86_64 and aarch64, in build/
	@$(PYTHON) -m rehearsal.preprocessor --into build

test: ahead ## lint and sanity beside each other, unit tests, package, then the rehearsal with its assertions
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint sanity
	@$(MAKE) --no-print-directory unit package e2e

test-slow: preprocessor crate molecule ## what takes longer: a molecule scenario for each role, the preprocessor's sources and aarch64
	@tests/run/preprocessor

lint: setup ## yamllint, ansible-lint, ruff, mypy
	@tests/run/lint

sanity: setup ## ansible-test sanity, no ignore file
	@tests/run/sanity

unit: setup ## unit tests
	@tests/run/unit

package: setup ## the tarball, built, installed elsewhere and tried
	@tests/run/package

e2e: setup ## the rehearsal on a fleet of its own, twice, with faults under load
	@tests/run/e2e

molecule: setup ## each role alone
	@tests/run/molecule

crate: setup ## the preprocessor's own tests, ten minutes of new inputs, the same bytes when built again
	@tests/run/crate $(CRATE)

engine: setup ## real vLLM behind the edge, on a fleet of its own (6 GB of disk, 8 GB of memory)
	@tests/run/engine

bench: setup ## figures: streaming through the edge, decisions, the preprocessor, the stand-in engine
	@tests/run/bench

lock: setup ## resolve requirements/development.in to development.txt with hashes (needs uv on PATH)
	uv pip compile --python-version 3.11 --generate-hashes --no-emit-index-url --no-emit-find-links \
	  --quiet --output-file requirements/development.txt requirements/development.in
