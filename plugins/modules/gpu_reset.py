#!/usr/bin/python
# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later

from __future__ import annotations

DOCUMENTATION = r"""
module: gpu_reset
short_description: Reset a GPU safely, or say why not and what to do instead
version_added: 0.1.0
description:
  - Resets one card in the only order that works and harms nothing else. Takes it out of service by a hook, stops the
    named services, switches persistence mode off, proves that no process holds the card, resets it, starts the services
    again, verifies the card and lets requests in again by a hook.
  - Cards that NVLink joins are reset together where that is demanded. On Hopper and later a card is reset alone. On
    Ampere it is reset alone while Fabric Manager (C(nvidia-fabricmanager.service)) runs, else with all its NVLink peers
    in one command. Before Ampere always with all its NVLink peers. A card without NVLink (L40S, T4) is reset alone.
  - The part between the two hooks is carried out on the host by a process of its own, a transient service of systemd
    (C(ringmaster-gpu-reset.service)). It comes to its end whatever becomes of the connection and of the controller, and
    systemd starts it again if it is killed. It goes towards the reset only once; whatever happens, it then brings
    persistence mode and services back.
  - Running the task again after it was interrupted finishes what was begun, with the hooks of the task. It waits for
    the process on the host if that still runs, or starts it again, verifies the card, and lets requests in. If the
    reset had not been begun and everything is as before, a new run follows.
  - A reset that failed, or after which the card is not well, is not repeated. The card stays out of service, the task
    fails and says what the next step is. Running the task again after that step verifies the card and lets requests in.
  - Services are stopped by C(systemctl stop). No process that holds a card is ever killed by this module, not even a
    C(nvidia-smi) that does not end, since a card can freeze when a
    process that holds it is killed. What systemd itself does is the unit's matter (C(TimeoutStopSec), C(SendSIGKILL));
    the plan warns where it would kill. A service that does not stop in time ends the run before the reset; it is
    started again.
  - Refuses when memory is merely full, when the driver's recovery action is none or unknown and no O(reason) is given,
    when it asks for more than a reset, when the uuid is unknown, when the host was restarted since the plan was made,
    when another reset is under way on the host, when the card was reset too often (O(max_resets)), when it has fallen
    off the bus (Xid 79, which needs a power-cycle), when a process that belongs to none of the O(services) holds it,
    and when the task sets C(until), C(retries), C(async) or C(poll).
  - Every attempt is written to C(/var/lib/ringmaster/gpu_reset/ledger.jsonl) on the host, each phase before it is
    begun. The file is for root only and only appended to.
options:
  uuid:
    description:
      - The card's uuid. An index or a PCI address is refused, since both can name another card tomorrow.
    type: str
    required: true
  reason:
    description:
      - What is wrong with the card, for the ledger.
      - Required where neither the driver's recovery action nor a pending row remapping or page retirement asks for a
        reset.
    type: str
  services:
    description:
      - Units of systemd that use the card, in the order in which to stop them. They are started in the opposite order.
        One without a type is a service.
      - Only those that run are stopped and started again, with all units that depend on them.
      - C(ringmaster-agent.service), which reads the cards, and C(nvidia-persistenced.service) need not be named. If
        they run, they are stopped last, in this order, and started first.
    type: list
    elements: str
    default: []
  drain:
    description:
      - How to take the card's engine out of service. The hook must return only when no request is left, and must bear
        being called twice.
      - If it fails, O(undrain) is called and nothing on the host is changed.
    type: dict
    suboptions: &hook
      url:
        description:
          - Where to send a request. An answer of 200 to 299 other than 202 is success. Answers 202, 429 and 503 mean
            not yet, and the request is sent again, after what C(Retry-After) says or two seconds.
          - Exactly one of C(url) and C(command) is needed.
        type: str
      method:
        description: Method of the request.
        type: str
        default: POST
      headers:
        description: Headers of the request. This is where secrets belong; they are never shown or kept.
        type: dict
      body:
        description: Body of the request. A dictionary or list is sent as JSON.
        type: raw
      validate_certs:
        description: Whether the server's certificate must be valid.
        type: bool
        default: true
      command:
        description:
          - A command as a list of words, run without a shell. Status 0 is success. A name without a path is looked for
            in the system's folders only.
        type: list
        elements: str
      where:
        description: Whether the request is sent, or the command run, by the controller or by the host of the card.
        type: str
        choices: [controller, host]
        default: controller
      timeout:
        description: How long the hook may take, in seconds.
        type: int
        default: 600
  undrain:
    description:
      - How to let requests in again. It is called when the card is verified, and when a run ended before the reset with
        everything as before. It must bear being called twice.
    type: dict
    suboptions: *hook
  max_resets:
    description: How many resets of a card within O(window) are enough. The next one is refused.
    type: int
    default: 2
  window:
    description: The window of O(max_resets), in seconds.
    type: int
    default: 86400
  stop_timeout:
    description: How long each service may take to stop, in seconds.
    type: int
    default: 300
  start_timeout:
    description: How long each service may take to start, in seconds. An engine that loads a large model takes long.
    type: int
    default: 1800
  reset_timeout:
    description: How long C(nvidia-smi) may take to reset the cards, in seconds.
    type: int
    default: 300
  verify_timeout:
    description: How long the cards may take to be well after the services have started, in seconds.
    type: int
    default: 60
  unfinished:
    description:
      - What to do about an unfinished run on the host. V(finish) finishes it if it is of the same card, and refuses if
        it is of another one. V(abandon) writes down that nobody will finish it, changes nothing else about it, and goes
        on with a new run; it is meant for a card that was taken out of the host.
    type: str
    choices: [finish, abandon]
    default: finish
  internal:
    description: What the action plugin of the same name asks of the host. Tasks can't set it.
    type: dict
requirements:
  - To be root on the host
  - systemd, and NVIDIA's driver with C(nvidia-smi)
  - >-
    The Python library C(nvidia-ml-py) for the Python that Ansible uses on the host, or in
    C(/opt/ringmaster/gpu/venv), where the role P(ringmaster.inference.gpu#role) installs it
attributes:
  action:
    description: Has an action plugin on the controller, which checks the task, calls the hooks and leads the run.
    support: full
  async:
    description: Can be run with the C(async) keyword.
    support: none
  check_mode:
    description: Shows the plan, or why it is refused. Changes nothing, writes nothing to the ledger, calls no hook.
    support: full
  diff_mode:
    description: Shows cards and services before and after; in check mode, the steps.
    support: full
  idempotent:
    description:
      - While the driver asks for the reset, or a row remapping is pending, a second run finds nothing to do and is
        refused.
      - With a O(reason) each run is another reset, until O(max_resets).
    support: partial
  platform:
    description: Systems on which the module works. They need systemd, NVIDIA's driver and nvidia-ml-py.
    support: full
    platforms: linux
notes:
  - A loop resets one card after the other.
  - Fabric Manager must stay running for a single reset on Ampere with NVSwitch. Naming it in O(services) means that all
    cards are reset together.
  - A hook on the controller is called with the controller's rights, in the directory that C(ansible-playbook) was
    started in.
seealso:
  - module: ringmaster.inference.gpu_info
  - module: ringmaster.inference.gpu_ecc
  - module: ringmaster.inference.xid_info
author:
  - Ringmaster authors (@ringmaster)
"""

EXAMPLES = r"""
- name: Cards are known
  ringmaster.inference.gpu_info:
  register: cards

- name: Cards whose driver asks for a reset are reset, one after the other
  ringmaster.inference.gpu_reset:
    uuid: "{{ item.uuid }}"
    services: [vllm-engine@main.service, dcgm-exporter.service]
    drain:
      url: https://scheduler.example.com/v1/engines/{{ inventory_hostname }}.main/drain
      headers:
        Authorization: Bearer {{ scheduler_key }}
    undrain:
      url: https://scheduler.example.com/v1/engines/{{ inventory_hostname }}.main/ready
      headers:
        Authorization: Bearer {{ scheduler_key }}
  loop: "{{ cards.gpus | selectattr('recovery_action', 'in', ['reset', 'drain_and_reset']) }}"
  loop_control:
    label: "{{ item.uuid }}"

- name: A hung card is reset, with HAProxy's server drained by a script on the controller
  ringmaster.inference.gpu_reset:
    uuid: GPU-5f1c0d3a-8f0e-4a51-9d2c-0b7f3f1f9a01
    reason: Xid 119, GSP did not answer for 10 minutes
    services: [vllm-engine@main]
    drain:
      command: ["{{ playbook_dir }}/files/haproxy-server", drain, "{{ inventory_hostname }}.main"]
      timeout: 900
    undrain:
      command: ["{{ playbook_dir }}/files/haproxy-server", ready, "{{ inventory_hostname }}.main"]

- name: What would be done is known before the maintenance
  ringmaster.inference.gpu_reset:
    uuid: GPU-5f1c0d3a-8f0e-4a51-9d2c-0b7f3f1f9a01
    reason: row remapping pending since Monday
    services: [vllm-engine@main]
  check_mode: true
  register: plan

- name: Host is rebooted where a reset did not help
  ansible.builtin.reboot:
  when: reset_result is failed and reset_result.next_step == 'reboot'
"""

RETURN = r"""
run:
  description: Name of the run in the ledger.
  type: str
  returned: if a run was opened or finished
  sample: 20260301T120000Z-5f1c0d3a
outcome:
  description:
    - V(verified) means that the card was reset (or the host rebooted meanwhile, which resets it, too) and is well.
    - V(aborted) means that the run ended before the reset; services and persistence mode are as before.
    - V(failed) means that the card is not well, or a service does not run; it is left out of service.
    - V(unknown) means that the run was interrupted while C(nvidia-smi) ran and nothing shows whether it reset the card;
      it is left out of service, run the task again.
    - V(refused) means that nothing was done. V(planned) is for check mode.
  type: str
  returned: always
  sample: verified
next_step:
  description:
    - What to do if RV(outcome) is not V(verified). One of V(run_again), V(start_services), V(reboot), V(power_cycle)
      and V(replace), empty if there is nothing to do or RV(problems) say it in words.
  type: str
  returned: always
  sample: reboot
problems:
  description: Everything that speaks against the reset, or is wrong after it.
  type: list
  elements: dict
  returned: always
  contains:
    code:
      description: A stable word for playbooks.
      type: str
      sample: held
    expected:
      description: What was expected.
      type: str
      sample: no process to hold the card but those of the services to stop
    found:
      description: What was found.
      type: str
      sample: process 4711 (python3 train.py), user alice, unit session-3.scope, has /dev/nvidia0 open
    to_do:
      description: What to do.
      type: str
      sample: end it in its own way (never by SIGKILL, which can freeze the card), then run this task again
    step:
      description: The step of RV(next_step) that mends it, if it is one of those.
      type: str
      sample: ""
uuids:
  description: Uuids of the cards that are reset in one command, the one asked for first.
  type: list
  elements: str
  returned: if there is a plan
  sample: [GPU-5f1c0d3a-8f0e-4a51-9d2c-0b7f3f1f9a01]
reason:
  description: Why, as the ledger has it.
  type: str
  returned: if there is a plan
  sample: the driver's recovery action is reset
services:
  description: Units that are stopped, in order.
  type: list
  elements: str
  returned: if there is a plan
  sample: [vllm-engine@main.service, nvidia-persistenced.service]
plan_warnings:
  description: What to know of the plan, for people.
  type: list
  elements: str
  returned: if there is a plan
  sample: ["systemd itself kills vllm-engine@main.service if it has not stopped after 90 s (its TimeoutStopSec)"]
steps:
  description: The plan, a line a step.
  type: list
  elements: str
  returned: in check mode, if there is a plan
  sample: ["drain: POST https://scheduler.example.com/v1/drain", "stop vllm-engine@main.service"]
reset:
  description: Whether a reset was begun.
  type: bool
  returned: always
  sample: true
rebooted:
  description: Whether the host was rebooted while the run was unfinished.
  type: bool
  returned: always
  sample: false
resumed:
  description: Whether this task finished a run that another one had opened.
  type: bool
  returned: always
  sample: false
drained:
  description: Whether the card was left out of service by this task. False if it has no O(drain).
  type: bool
  returned: always
  sample: false
phases:
  description: What was begun, with the time in UTC. C(detail) names the unit or the card.
  type: list
  elements: dict
  returned: if a run was opened or finished
  sample:
    - {phase: stop, detail: vllm-engine@main.service, at: "2026-03-01T12:00:07Z"}
cards_before:
  description:
    - All cards of the host before, with C(uuid), C(pci_address), C(model), C(state) as in
      M(ringmaster.inference.gpu_info), C(recovery_action), C(persistence_mode), C(ecc_current), C(ecc_pending),
      C(remapped_rows_pending), C(remapped_rows_failed), C(retired_pages_pending), C(nvlinks_up) (numbers of the links)
      and C(nvlinks_expected). What the driver does not tell is null.
  type: list
  elements: dict
  returned: if there is a plan
  sample:
    - uuid: GPU-5f1c0d3a-8f0e-4a51-9d2c-0b7f3f1f9a01
      pci_address: "0000:07:00.0"
      model: NVIDIA L40S
      state: answers
      recovery_action: reset
      persistence_mode: true
      ecc_current: true
      ecc_pending: true
      remapped_rows_pending: true
      remapped_rows_failed: false
      retired_pages_pending: null
      nvlinks_up: []
      nvlinks_expected: 0
cards_after:
  description: All cards of the host after the verification, in the same form.
  type: list
  elements: dict
  returned: if the cards were verified
  sample: []
ledger:
  description: Path of the ledger on the host.
  type: str
  returned: always
  sample: /var/lib/ringmaster/gpu_reset/ledger.jsonl
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.urls import open_url

from ansible_collections.ringmaster.inference.plugins.module_utils.commands import CommandRunner
from ansible_collections.ringmaster.inference.plugins.module_utils.file_tree import FileTree
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_hooks import Hook
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_host import SystemHost
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_ledger import Ledger, LedgerError
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_options import ARGUMENTS
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_sequence import HostError
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_steps import Steps
from ansible_collections.ringmaster.inference.plugins.module_utils.gpu_reset_worker import Workers


def perform(steps: Steps, options: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
    """One step of those that the action plugin asks for. Raises HostError and LedgerError."""
    step = asked["step"]
    if step == "plan":
        return steps.plan(options)
    if step == "open":
        return steps.open(options, asked["by"], asked["lease"], asked["drain"])
    if step == "begin":
        return steps.begin(asked["run"], asked["key"], asked["by"])
    if step == "watch":
        return steps.watch(asked["run"], asked["seen"], asked["seconds"])
    if step == "abort":
        return steps.abort(asked["run"], asked["why"])
    if step == "note":
        return steps.note(asked["run"], asked["phase"])
    if step == "hook":
        return {"complaint": Hook(options[asked["hook"]], CommandRunner(), open_url).run()}
    return steps.close(asked["run"], asked["how"])


def main() -> None:
    module = AnsibleModule(
        argument_spec={**ARGUMENTS, "internal": {"type": "dict"}},
        supports_check_mode=True,
    )
    asked = module.params["internal"]
    if not asked:
        module.fail_json(msg="Expected to be called by the action plugin gpu_reset. Found another caller.")
    ledger, commands = Ledger(), CommandRunner()
    steps = Steps(ledger, SystemHost(FileTree("/"), commands, ledger), Workers(commands, ledger))
    try:
        module.exit_json(changed=False, ledger=ledger.path, **perform(steps, module.params, asked))
    except (HostError, LedgerError) as error:
        module.fail_json(msg=str(error), ledger=ledger.path)


if __name__ == "__main__":
    main()
