# shellcheck shell=bash
# SPDX-License-Identifier: GPL-3.0-or-later
#
# Shared by the commands in this folder: find the checkout, put its virtual environment first, time each step.

set -euo pipefail

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd -P)
cache=$checkout/.cache
cd "$checkout"

if [[ ! -x .venv/bin/python ]]; then
    echo "expected a virtual environment at .venv, found none; to do: make setup" >&2
    exit 2
fi
export PATH=$checkout/.venv/bin:$PATH

# Neither settings of the caller nor collections installed for the user may decide whether a check passes.
unset ANSIBLE_CONFIG ANSIBLE_ROLES_PATH PYTHONPATH
unset GIT_DIR GIT_INDEX_FILE GIT_WORK_TREE # set by git where it runs these commands as hooks
export ANSIBLE_HOME=$cache/ansible
export LC_ALL=C.UTF-8 NO_COLOR=1 ANSIBLE_NOCOLOR=1 PYTHONDONTWRITEBYTECODE=1

failed_steps=()

# step TITLE COMMAND…: runs the command and prints its result and time. A failure does not stop the steps that follow, so
# that one run shows everything that is wrong; `finish` turns it into the exit status.
step() {
    local title=$1 begin=$EPOCHREALTIME status
    shift
    printf -- '--- %s\n' "$title"
    set +e # not `"$@" || status=$?`: there a function would go on after a command of its own that fails
    (
        set -e
        "$@"
    )
    status=$?
    set -e
    local result=passed
    if ((status != 0)); then
        result="FAILED (exit status $status)"
        failed_steps+=("$title")
    fi
    printf -- '--- %s: %s in %s s\n' "$title" "$result" "$(seconds_since "$begin")"
}

# seconds_since MOMENT: seconds with one decimal since a value of EPOCHREALTIME.
seconds_since() {
    awk -v begin="$1" -v end="$EPOCHREALTIME" 'BEGIN { printf "%.1f", end - begin }'
}

# finish NAME: last line of a command; fails when a step failed.
finish() {
    if ((${#failed_steps[@]} > 0)); then
        printf '%s failed after %s s:\n' "$1" "$(seconds_since "$command_begin")"
        printf '  %s\n' "${failed_steps[@]}"
        exit 1
    fi
    printf '%s passed in %s s\n' "$1" "$(seconds_since "$command_begin")"
}

# Files of the checkout that are tracked or could be (not ignored), less the ones that are deleted, NUL-separated.
checkout_files() {
    comm -z -23 <(git ls-files -z --cached --others --exclude-standard -- "$@" | sort -zu) \
        <(git ls-files -z --deleted -- "$@" | sort -zu)
}

# Makes the checkout importable and resolvable as ringmaster.inference, wherever it lies: a link in the cache takes the
# place of the parent folders …/ansible_collections/ringmaster/ that Ansible asks for.
link_collection() {
    local link=$cache/collections/ansible_collections/ringmaster/inference
    mkdir -p "$(dirname "$link")"
    # Left alone where it is right: something else that runs in this checkout may just be looking through it.
    [[ $(readlink "$link") == "$checkout" ]] || ln -sfnT "$checkout" "$link"
    export ANSIBLE_COLLECTIONS_PATH=$cache/collections
}

command_begin=$EPOCHREALTIME
