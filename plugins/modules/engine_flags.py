#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: engine_flags
short_description: Judge an engine's options before the engine is started with them
version_added: 0.1.0
description:
  - Gives a verdict for every option that an inference engine is wanted to start with, against what the installed engine
    really accepts, and for its environment. Refuses with one message that names each refused option, what was expected,
    what was found and what to do.
  - Never starts, stops or touches an engine. The engine's own parser is asked in a process of its own, without a card.
  - Without an installed engine a catalogue answers. It is exact for vLLM 0.32.0. For other versions the history of
    options decides by name, and what it can't tell is V(not_known), which refuses nothing.
  - Values of options and variables whose names say that they are secret are not returned. Ansible logs the arguments
    of a module on the host all the same, so give C(no_log) to a task that has any.
options:
  engine:
    description: The engine.
    type: str
    choices: [vllm]
    default: vllm
  executable:
    description:
      - Absolute path of the installed engine's program, or of the Python of its virtual environment. It is run as the
        user of the task.
      - Exactly one of O(executable) and O(version) has to be given.
    type: path
  version:
    description: Version of an engine that is not installed here.
    type: str
  options:
    description:
      - Options without the dashes, as in C(vllm_engines[].options). V(true) gives the bare option, V(false) the
        option with C(no-) before it, a list several values, a dictionary JSON, null nothing.
    type: dict
    default: {}
  command_line:
    description:
      - A command line, as text or as a list of words, with or without the program and assignments before it. Text is
        split as a shell does, and nothing in it is expanded.
      - With O(options) as well, those come after it.
    type: raw
  environment:
    description:
      - Environment variables of the engine. Those of NCCL are judged by their ranges, and those that do harm in
        service are refused.
    type: dict
    default: {}
  accepted:
    description:
      - Options and variables whose harm is known and wanted, such as C(enforce-eager). Their verdict stays
        V(harmful), and does not refuse.
    type: list
    elements: str
    default: []
  refuse:
    description: Whether the task fails if something is refused.
    type: bool
    default: true
  cache_directory:
    description:
      - Absolute path of the directory that keeps what the installed engine said, a file for each version. Asking it
        takes about half a minute of processor time. An empty path keeps nothing.
      - The answer is asked again when any package beside the engine changed. In check mode nothing is written.
    type: str
    default: /var/cache/ringmaster/engine_flags
  timeout:
    description: Seconds that the installed engine may take to tell its options.
    type: int
    default: 180
attributes:
  check_mode:
    description: Changes nothing, in check mode or not. The cache is not written in check mode.
extends_documentation_fragment:
  - ringmaster.inference.attributes
  - ringmaster.inference.attributes.reader
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: The installed engine takes the options
  ringmaster.inference.engine_flags:
    executable: /opt/ringmaster/vllm/current/bin/vllm
    options: "{{ vllm_engines[0].options }}"
    environment:
      NCCL_IB_TIMEOUT: "20"

- name: A command line is judged for a version that is not installed yet
  ringmaster.inference.engine_flags:
    version: 0.32.0
    command_line: vllm serve Qwen/Qwen2-72B-Instruct --tensor-parallel-size 4 --num-scheduler-steps 4
    refuse: false
  register: planned

- name: What is refused is shown
  ansible.builtin.debug:
    msg: "{{ planned.verdicts | selectattr('refused') }}"

- name: An engine on a host without a card may run without graphs
  ringmaster.inference.engine_flags:
    executable: /opt/ringmaster/vllm/current/bin/vllm
    options: {enforce-eager: true}
    accepted: [enforce-eager]
"""

RETURN = r"""
msg:
  description: What is refused, or that nothing is.
  type: str
  returned: always
  sample: vllm 0.32.0 takes all 3 options.
version:
  description: Version of the engine that was judged for.
  type: str
  returned: always
  sample: 0.32.0
source:
  description:
    - Where the options are known from. V(installed) is the engine's own parser, V(catalogue) the built-in catalogue
      of this version, V(history) the names of options only.
  type: str
  returned: always
  sample: installed
cached:
  description: Whether the engine did not have to be asked again.
  type: bool
  returned: always
  sample: true
refused:
  description: Options, variables and words that are refused.
  type: list
  elements: str
  returned: always
  sample: [--num-scheduler-steps]
complaint:
  description: What the engine's own parser says of the whole command line. Null if it takes it, or was not asked.
  type: str
  returned: always
  sample: "unrecognized arguments: --num-scheduler-steps 4"
words:
  description:
    - The words that O(options) give on a command line, for people to read. Values of secret ones are C(***); the filter
      P(ringmaster.inference.engine_words#filter) gives those that an engine is started with.
  type: list
  elements: str
  returned: always
  sample: [--max-num-seqs, "256"]
verdicts:
  description: A verdict for every option, in the order of the command line, then for the environment.
  type: list
  elements: dict
  returned: always
  contains:
    flag:
      description: The option's long name, or the variable, or the word.
      type: str
      sample: --tensor-parallel-size
    written:
      description: What was written.
      type: str
      sample: -tp
    values:
      description: Its values as they were written.
      type: list
      elements: str
      sample: ["4"]
    verdict:
      description:
        - V(ok), V(deprecated), V(no_effect), V(not_known), V(unknown), V(removed), V(renamed), V(not_yet),
          V(ambiguous), V(wrong_number_of_values), V(wrong_type), V(not_a_choice), V(out_of_range), V(unexpected),
          V(contradictory) or V(harmful).
      type: str
      sample: ok
    refused:
      description: Whether the engine must not be started with it.
      type: bool
      sample: false
    expected:
      description: What was expected instead.
      type: str
      sample: ""
    reason:
      description: Why, or what is worth knowing.
      type: str
      sample: ""
    to_do:
      description: What to do.
      type: str
      sample: ""
    since:
      description: Release from which on an option is gone, deprecated, or there.
      type: str
      sample: ""
    instead:
      description: What takes its place.
      type: str
      sample: ""
    nearest:
      description: Names or values that may have been meant.
      type: list
      elements: str
      sample: []
    contradicts:
      description: The other options of a contradiction.
      type: list
      elements: str
      sample: []
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags import (
    MASK,
    Judgement,
    judge,
    render,
    secrets,
    shown_words,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import release
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_installed import (
    DEFAULT_TIMEOUT,
    Installed,
    InstalledEngine,
    InstalledError,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_words import (
    CommandLineError,
    from_options,
    serve_words,
    split,
)

# Characters. Ansible hides such values wherever they stand in the result; shorter ones would hide too much.
SHORTEST_HIDDEN = 8

# Stands for the model where only options are judged: the engine wants one before them.
SOME_MODEL = "model"


def asked(parameters: dict[str, Any], words: list[str], environment: dict[str, str], keep: bool) -> Installed:
    """What the installed engine says of its options and of `words`."""
    engine = InstalledEngine(
        parameters["engine"],
        parameters["executable"],
        CommandRunner(),
        environment,
        parameters["cache_directory"] or None,
        parameters["timeout"],
    )
    return engine.ask(serve_words(words), keep=keep)


def report(judgement: Judgement, complaint: str | None, hidden: list[str], engine: str) -> str:
    """What is refused, or that nothing is. `hidden` are values that must not be shown."""
    if judgement.refused:
        return render(judgement, engine)
    if complaint is not None:
        return (
            f"{engine} {judgement.version} is not to be started so. The running engine was not touched. "
            "Expected a command line that its own parser takes. "
            f"Found: {without(complaint, hidden)}. To do: correct that option."
        )
    count = len(judgement.verdicts)
    return f"{engine} {judgement.version} takes " + ("what was given." if count == 1 else f"all {count} things given.")


def without(text: str, hidden: list[str]) -> str:
    for value in hidden:
        text = text.replace(value, MASK)
    return text


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "engine": {"type": "str", "choices": ["vllm"], "default": "vllm"},
            "executable": {"type": "path"},
            "version": {"type": "str"},
            "options": {"type": "dict", "default": {}},
            "command_line": {"type": "raw"},
            "environment": {"type": "dict", "default": {}},
            "accepted": {"type": "list", "elements": "str", "default": []},
            "refuse": {"type": "bool", "default": True},
            "cache_directory": {"type": "str", "default": "/var/cache/ringmaster/engine_flags"},
            "timeout": {"type": "int", "default": int(DEFAULT_TIMEOUT)},
        },
        mutually_exclusive=[("executable", "version")],
        required_one_of=[("executable", "version")],
        supports_check_mode=True,
    )
    parameters = module.params
    command_line = parameters["command_line"]
    if command_line is not None and not isinstance(command_line, (str, list)):
        module.fail_json(
            msg=f"Expected command_line to be text or a list. Found {type(command_line).__name__}. To do: correct it."
        )
    if parameters["version"] is not None and not release(parameters["version"]):
        module.fail_json(
            msg=f"Expected a version such as 0.32.0. Found {parameters['version']!r}. To do: correct version."
        )
    environment = {str(name): "" if value is None else str(value) for name, value in parameters["environment"].items()}
    of_options = from_options(parameters["options"])
    words: list[str] = []
    said = None
    try:
        words = (split(command_line) if command_line is not None else [SOME_MODEL]) + of_options
        if parameters["executable"]:
            said = asked(parameters, words, environment, keep=not module.check_mode)
    except CommandLineError as error:
        module.fail_json(msg=f"Expected a command line. Found: {error}. To do: close the quote.")
    except InstalledError as error:
        module.fail_json(msg=without(str(error), secrets(words, environment)))
    version = said.catalogue.version if said else parameters["version"]
    judgement = judge(version, words, said.catalogue if said else None, environment, parameters["accepted"])
    if command_line is None:
        judgement.verdicts = [verdict for verdict in judgement.verdicts if verdict.flag != SOME_MODEL]
    hidden = secrets(words, environment)
    module.no_log_values.update(value for value in hidden if len(value) >= SHORTEST_HIDDEN)
    complaint = said.complaint if said else None
    result = {
        "changed": False,
        "msg": report(judgement, complaint, hidden, parameters["engine"]),
        "version": version,
        "source": "installed" if said else "catalogue" if judgement.exact else "history",
        "cached": bool(said and said.cached),
        "refused": [verdict.flag for verdict in judgement.refused],
        "complaint": without(complaint, hidden) if complaint is not None else None,
        "words": shown_words(parameters["options"]),
        "verdicts": [verdict.document() for verdict in judgement.verdicts],
    }
    if parameters["refuse"] and (judgement.refused or complaint is not None):
        module.fail_json(**result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
