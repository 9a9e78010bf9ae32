# SPDX-License-Identifier: GPL-3.0-or-later
"""Which engines hold the keys and values of which prefix, as far as can be known from what was sent where.

An engine that computed a prompt keeps its blocks until it needs the memory, so that another prompt with the same
beginning costs it only the rest. Nobody tells when it forgets; what was not used for some minutes counts as forgotten.
"""

from __future__ import annotations

from collections import OrderedDict

from ringmaster_scheduler.policy import Policy


class PrefixMemory:
    """Engines by prefix, of one pool; the prefix that was not used for longest is forgotten first."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._holders: OrderedDict[str, dict[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, prefix: str, now: float) -> list[str]:
        """Return the names of engines that probably hold a prefix."""
        known = self._holders.get(prefix)
        if known is None:
            return []
        oldest = now - self._policy.affinity_memory
        return [name for name, used_at in known.items() if used_at >= oldest]

    def use(self, prefix: str, engine: str, now: float) -> None:
        """Note that a prompt with this prefix went to an engine."""
        if self._policy.affinity_prefixes == 0:
            return
        known = self._holders.setdefault(prefix, {})
        self._holders.move_to_end(prefix)
        known.pop(engine, None)
        known[engine] = now
        if len(known) > self._policy.affinity_engines:
            del known[next(iter(known))]
        if len(self._holders) > self._policy.affinity_prefixes:
            self._holders.popitem(last=False)
