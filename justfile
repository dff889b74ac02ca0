# What developers run; CONTRIBUTING.md says when. `just setup` makes .venv, and every recipe prefers its programs.

export PATH := justfile_directory() / ".venv/bin" + ":" + env("PATH")

# List the recipes.
default:
    @just --list

# Create .venv with Finwhale, all development packages and the pre-commit hooks.
setup:
    python3 -m venv .venv
    pip install torch==2.13.0
    pip install -e '.[dev]'
    pre-commit install

# Linters, types, imports and unit tests: under two minutes, for every change.
quick:
    #!/usr/bin/env bash
    set -euo pipefail
    ruff check .
    ruff format --check .
    lint-imports --no-logo
    # Without its cache, mypy needs one core for a minute, so it runs beside pytest.
    mypy & types=$!
    status=0
    pytest tests/unit || status=$?
    wait "$types"
    exit "$status"

# Every test that needs no GPU and compiles for none, as CI runs them.
test *args:
    pytest {{ args }}

# What compiles kernels for GPUs: under ten minutes on two cores, after changes in ops/ or distributed/.
kernels *args:
    pytest tests/ops -m kernels {{ args }}

# Tests that take longer than CI's core job: about 90 minutes in all.
long: long-schedules long-fuzz long-marked long-page long-soak long-hostile long-hosts long-replicas long-upgrade long-rollouts long-clients long-batch long-examples long-deploy long-packages long-first-hour long-oracle

# Random schedules of the engine, and random chats: about 25 minutes.
long-schedules:
    pytest tests/unit/test_scheduler.py tests/engine/test_prefix.py tests/unit/test_v41_chat.py --hypothesis-profile long
    pytest tests/engine/test_drafting.py tests/distributed/test_equal_ranks.py tests/distributed/test_lanes.py -k random_schedules --hypothesis-profile long

# Requests generated from the server's OpenAPI description, and hostile grammars.
long-fuzz examples="200":
    FINWHALE_FUZZ_EXAMPLES={{ examples }} pytest -n0 tests/server/test_fuzz.py tests/server/test_hostile_grammars.py --hypothesis-profile long

# Cases that take seconds, and of which another case checks most, such as the compiled mode's second form; and two
# starts of the embedded model in the compiled mode, which compile for minutes.
long-marked:
    FINWHALE_LONG=1 pytest -m long --ignore tests/long

# The server's page in a browser; installs Chromium where it is missing. Needs npm.
long-page:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_page.py tests/server/test_page.py

# Many clients of one server, some of them hostile.
long-soak seconds="600":
    FINWHALE_SOAK_SECONDS={{ seconds }} pytest -n0 tests/server/test_soak.py

# All attacks of tests/server/attacks.py on one server, and a fuzz of hostile schemas: needs a machine with nothing else to do.
long-hostile seconds="600":
    FINWHALE_HOSTILE_SECONDS={{ seconds }} pytest -n0 tests/server/test_hostile_load.py tests/server/test_hostile_schemas.py

# Ranks on two hosts, which are two node agents of torchrun or two nodes of Ray on this machine.
long-hosts:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_hosts.py tests/long/test_ray.py

# Two demo engines behind vllm-router; two prefill and two decode servers behind it, killed in each phase.
long-replicas:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_replicas.py tests/long/test_prefill_decode.py

# New weights on two ranks, and the rollout endpoints.
long-rollouts:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_rollouts.py tests/long/test_rollout_endpoints.py

# Clients of other projects, each in its own environment, against the embedded model. Needs npm.
long-clients:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_clients.py tests/long/test_measuring_clients.py tests/long/test_agents.py

# `finwhale run-batch` and a server with batches, killed again and again.
long-batch:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_run_batch.py

# The programs and the notebook of examples/.
long-examples:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_examples.py

# The files in deploy/ against their schemas and linters.
long-deploy:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_deploy.py tests/long/test_monitoring.py

# Two servers behind vllm-router: a new version replaces the old one under load, and the old one comes back.
long-upgrade:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_upgrade.py

# The wheel and the sdist in clean environments, on each Python that is installed.
long-packages:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_packages.py

# README's commands and the tasks of docs/first-hour.md in a clean environment, and other pages' commands.
long-first-hour:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_first_hour.py

# DeepSeek-V4.1's formulas against nemo-automodel, which runs in an environment of its own.
long-oracle:
    FINWHALE_LONG=1 pytest -n0 tests/long/test_v41_oracle.py

# The same as long-soak against `finwhale serve`, and no stream may pause: needs a machine with nothing else to do.
soak seconds="600":
    #!/usr/bin/env bash
    set -euo pipefail
    mkdir -p build
    finwhale serve --port 8765 --max-queue 24 2> build/soak-server.log & server=$!
    trap 'kill $server; wait $server || true' EXIT
    for _ in {1..100}; do curl --silent --fail http://127.0.0.1:8765/health/ready > /dev/null && break; sleep 1; done
    python -m tests.server.soak --url http://127.0.0.1:8765 --seconds {{ seconds }} --pids $server

# Every test that needs an NVIDIA GPU. Several processes share the GPU, because compilers take most of the
# time; then one process runs the tests that need the GPU alone. A GPU of 80 GB may need fewer processes.
gpu processes="6" *args:
    pytest tests/gpu -m "not alone" -n {{ processes }} --dist loadfile {{ args }}
    pytest tests/gpu -m alone -n 0 {{ args }}

# Measure: `just bench`, `just bench offline --config flash --layers 8 --dummy`.
bench what="cpu" *args:
    finwhale bench {{ what }} {{ args }}

# Build the documentation into build/site; a broken link fails.
docs:
    mkdocs build --strict

# Choose the versions in the images (deploy/constraints*.txt) again, the newest that pyproject.toml allows. Needs uv.
constraints *args="--upgrade":
    #!/usr/bin/env bash
    set -euo pipefail
    compile() {
        uv pip compile pyproject.toml - --quiet --no-annotate --custom-compile-command "just constraints" \
            --python-version 3.12 --python-platform x86_64-manylinux_2_28 --extra hub --extra server {{ args }} "$@"
    }
    compile --extra nvidia --output-file deploy/constraints.txt < /dev/null
    compile --output-file deploy/constraints-cpu.txt <<< torch==2.13.0

# Show the documentation at http://127.0.0.1:8001 while you write it.
docs-serve:
    mkdocs serve --dev-addr 127.0.0.1:8001

# Make the docs' pictures of banner, page and report.
screenshots:
    python tools/screenshots.py

# Write the tables of docs/options.md and docs/fields.md.
pages:
    python tools/pages.py docs

# Write the line counts of the maps of the source (README and docs/architecture.md).
map:
    python tools/source_map.py

# Check and build a release into dist/; then tag and upload it by hand.
release:
    #!/usr/bin/env bash
    set -euo pipefail
    fail() { echo "$1" >&2; exit 1; }
    test -z "$(git status --porcelain)" || fail "commit or stash your changes first"
    version=$(python -c "import finwhale; print(finwhale.__version__)")
    grep -Eqx "## $version \([0-9-]{10}\)" CHANGELOG.md || fail "CHANGELOG.md has no dated section for $version"
    .ci/run
    pytest tests/ops -m kernels
    FINWHALE_LONG=1 pytest -n0 -m long tests/engine/test_compiled.py
    rm -rf dist
    python -m build
    python -m zipfile --list dist/*.whl | grep -c 'finwhale/demo.*\.safetensors' | grep -qx 3
