# Copyright (c) 2026, the Ringmaster authors
# GNU General Public License v3.0 or later (see COPYING or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A verdict for every option that an engine is wanted to start with, before the running one is touched.

What the engine takes is told by a catalogue of its version (``engine_flags_catalogue``), taken from the installed
engine or built in. For a version without a catalogue the history of options decides by name alone, and what it can't
tell is answered with ``not_known``, which refuses nothing. Nothing here imports Ansible.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from ansible_collections.ringmaster.inference.plugins.module_utils import engine_flags_history as history
from ansible_collections.ringmaster.inference.plugins.module_utils import engine_flags_service as service
from ansible_collections.ringmaster.inference.plugins.module_utils import nccl_environment
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_catalogue import (
    Catalogue,
    Option,
    built_in,
    newest_vllm,
    release,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_values import (
    WrongValueError,
    nearest,
    read,
    values_in_words,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_words import (
    CommandLine,
    Given,
    from_options,
    in_order,
)
from ansible_collections.ringmaster.inference.plugins.module_utils.engine_flags_words import read as read_words

OK = "ok"
# Parts of a variable's name between underscores: VLLM_API_KEY is secret, TOKENIZERS_PARALLELISM is not.
_SECRET_PARTS = frozenset(
    {"KEY", "KEYS", "APIKEY", "TOKEN", "SECRET", "SECRETS", "PASSWORD", "PASSWD", "CREDENTIAL", "CREDENTIALS"}
)
_SECRET_OPTION = re.compile(r"api[-_]?key|hf[-_]?token|secret|passw|[-_](key|token)\Z")
MASK = "***"
_LONGEST_SHOWN = 200  # characters of a value in a message

# What is worth knowing of an option that is right as it is.
_ADVICE = {
    "--block-size": "the attention backend chooses it by itself; leave it out unless it was measured",
    "--seed": "it seeds sampling; it does not make the allocation of KV blocks deterministic",
    "--quantization": "it is detected from the checkpoint; given here it has to agree with it",
    "--enable-chunked-prefill": "it is on by default in the V1 engine",
    "--disable-custom-all-reduce": "it turns off vLLM's own all-reduce, not NCCL's peer-to-peer transport",
}
_DEMONSTRATION_SERVER = "vllm.entrypoints.api_server"
_DEMONSTRATION_SERVER_GONE = "0.26.0"  # a release without it; 0.23.0 is the last that is known to have it
_CUSTOM = "it is none of the engine's own, so a plugin has to bring it"
_OLD_SERVER = "vllm.entrypoints.openai.api_server"


@dataclass
class Verdict:
    """About one option, variable of the environment, or word.

    ``flag`` is the option's long name as the engine knows it, else what was written. ``refused``: an engine must not be
    started with it. ``expected``, ``reason`` and ``to_do`` are for people, and empty if there is nothing to say.
    ``since`` is the release from which on an option is gone (or deprecated), ``instead`` what takes its place.
    """

    flag: str
    written: str
    values: list[str] = field(default_factory=list)
    verdict: str = OK
    refused: bool = False
    expected: str = ""
    reason: str = ""
    to_do: str = ""
    since: str = ""
    instead: str = ""
    nearest: list[str] = field(default_factory=list)
    contradicts: list[str] = field(default_factory=list)

    def found(self) -> str:
        """What was written, values shortened."""
        return " ".join([shown(self.written), *(shown(value) for value in self.values)])

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Judgement:
    """All verdicts, in the order of the command line, then the environment's."""

    version: str
    exact: bool
    verdicts: list[Verdict]

    @property
    def refused(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.refused]


def judge(
    version: str,
    words: Sequence[str],
    catalogue: Catalogue | None = None,
    environment: Mapping[str, str] | None = None,
    accepted: Iterable[str] = (),
) -> Judgement:
    """Judge a command line for vLLM of a version.

    ``words`` is the whole command line, or what follows ``vllm serve``. ``catalogue`` is that of the installed engine;
    without it the one that is built in is taken if it is of that version. ``environment`` is what the engine would
    have in its environment. ``accepted`` names options and variables whose harm is known and wanted.
    """
    catalogue = catalogue or built_in("vllm", version)
    shapes = catalogue or newest_vllm()
    line = read_words(shapes, words)
    found_environment = {**line.environment, **(environment or {})}
    judge_one = _Judge(version, shapes, exact=catalogue is not None)
    verdicts = [*judge_one.program(line), *judge_one.words(line)]
    variables = list(judge_one.variables(found_environment))
    on_cpu = "+cpu" in version or found_environment.get("VLLM_TARGET_DEVICE") == "cpu"
    wanted = service.Wanted(judge_one.values, found_environment, on_cpu)
    for finding in service.findings(wanted):
        _add(finding, verdicts, variables)
    judgement = Judgement(version, catalogue is not None, verdicts + variables)
    _clash(judgement)
    _accept(judgement, accepted)
    for verdict in judgement.verdicts:
        if _secret(verdict.flag):
            verdict.values = [MASK for _value in verdict.values]
    return judgement


def secrets(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """The secret values in a command line and an environment, to be kept out of messages, longest first."""
    line = read_words(newest_vllm(), words)
    found = {
        value
        for given in line.given
        if _secret(given.option.flag if given.option else given.written)
        for value in given.values
    }
    found |= {value for name, value in {**line.environment, **environment}.items() if _secret(name)}
    return sorted(found - {""}, key=len, reverse=True)


def shown_words(options: Mapping[str, Any]) -> list[str]:
    """The words that options give on a command line, with the mask in place of each value of a secret one."""
    words: list[str] = []
    for name, value in in_order(options):
        given = from_options({name: value})
        words += [given[0], *(MASK for _value in given[1:])] if given and _secret(given[0]) else given
    return words


def secret_names(options: Mapping[str, Any], environment: Mapping[str, Any]) -> list[str]:
    """The options, as they are written on a command line, and the variables that hold a secret by their names.

    An option without a value of its own (true, false, null) holds none, and neither does a variable without one.
    """
    given = [from_options({name: value}) for name, value in in_order(options)]
    named = [words[0] for words in given if len(words) > 1 and _secret(words[0])]
    return named + sorted(
        name for name, value in environment.items() if _secret(name) and value is not None and str(value) != ""
    )


def render(judgement: Judgement, engine: str = "vllm") -> str:
    """What is refused, for a person to read."""
    refused = judgement.refused
    count = "1 thing" if len(refused) == 1 else f"{len(refused)} things"
    lines = [
        f"{engine} {judgement.version} is not to be started so: {count} refused. The running engine was not touched."
    ]
    for number, verdict in enumerate(refused, 1):
        reason = f" ({verdict.reason})" if verdict.reason else ""
        lines += [
            f"{number}. {shown(verdict.flag)}: {verdict.verdict.replace('_', ' ')}",
            f"   expected: {verdict.expected}",
            f"   found:    {verdict.found()}{reason}",
            f"   to do:    {verdict.to_do}",
        ]
    return "\n".join(lines)


def shown(value: str) -> str:
    """A value for a message: on one line, and not longer than a message bears."""
    text = value if value.isprintable() and value != "" else repr(value)
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 1] + "…"


class _Judge:
    """Gives the verdicts of one version, and gathers the values that the engine would have."""

    def __init__(self, version: str, catalogue: Catalogue, exact: bool) -> None:
        self.version = version
        self.catalogue = catalogue
        self.exact = exact
        self.values: dict[str, Any] = {}
        self.first: dict[str, tuple[Given, Verdict]] = {}

    def program(self, line: CommandLine) -> Iterator[Verdict]:
        module = next((word for word in line.program if word.startswith("vllm.")), "")
        if module == _DEMONSTRATION_SERVER:
            gone = release(self.version) >= release(_DEMONSTRATION_SERVER_GONE)
            yield Verdict(
                module,
                " ".join(line.program),
                verdict="removed" if gone else "harmful",
                refused=True,
                expected="vllm serve MODEL",
                reason="it was a server for demonstrations, without the OpenAI interface"
                + (f", and is gone since {_DEMONSTRATION_SERVER_GONE} at the latest" if gone else ""),
                to_do="start the engine with vllm serve MODEL",
                since=_DEMONSTRATION_SERVER_GONE if gone else "",
                instead="vllm serve",
            )
        elif module == _OLD_SERVER:
            yield Verdict(
                module,
                " ".join(line.program),
                verdict="deprecated",
                expected="vllm serve MODEL",
                to_do="start the engine with vllm serve MODEL",
                instead="vllm serve",
            )

    def words(self, line: CommandLine) -> list[Verdict]:
        verdicts = []
        if line.model is not None:
            verdicts.append(Verdict("model", line.model))
        for given in line.given:
            verdict = self.given(given)
            verdicts.append(verdict)
            self._compare_with_first(given, verdict)
            if given.written == "--model" and not verdict.refused and verdict.verdict == OK:
                verdict.verdict = "deprecated"
                verdict.reason = "with vllm serve the model stands first, without an option"
                verdict.to_do = "write vllm serve MODEL"
                verdict.instead = "vllm serve MODEL"
        named = any(given.written == "--model" for given in line.given)
        if line.serve and named and line.model is not None:
            # --model is moved to the front as the word that names the model, so that the other is one too many.
            line.stray.insert(0, line.model)
            verdicts = [verdict for verdict in verdicts if verdict.flag != "model"]
        if line.needs_model:
            for verdict in verdicts:
                if verdict.flag == "--served-model-name" and not verdict.refused:
                    verdict.verdict, verdict.refused = "contradictory", True
                    verdict.expected = "the model before all options"
                    verdict.reason = "vllm serve takes a served name only if the model is named first"
                    verdict.to_do = "write vllm serve MODEL --served-model-name NAME"
        self._parsers(verdicts)
        for word in line.stray:
            verdicts.append(
                Verdict(
                    word,
                    word,
                    verdict="unexpected",
                    refused=True,
                    expected="no more words than the options take",
                    reason="it belongs to no option, and the model is named already",
                    to_do="take it out, or put the option before it",
                )
            )
        return verdicts

    def _parsers(self, verdicts: list[Verdict]) -> None:
        """With a parser of tool calls that is not its own the engine starts only if a plugin brings it."""
        if self.values.get("--tool-parser-plugin"):
            return
        for verdict in verdicts:
            if verdict.flag == "--tool-call-parser" and verdict.reason == _CUSTOM:
                verdict.verdict, verdict.refused = "not_a_choice", True
                verdict.expected = "one of " + ", ".join(self.catalogue.options[verdict.flag].known)
                correct = f"write {verdict.nearest[0]}, or " if verdict.nearest else ""
                verdict.to_do = correct + "name the plugin in --tool-parser-plugin"

    def variables(self, environment: Mapping[str, str]) -> Iterator[Verdict]:
        for each in nccl_environment.check(environment):
            verdict = Verdict(each.name, each.name, [environment[each.name]], each.verdict, each.refused)
            verdict.expected, verdict.reason = each.expected, each.reason
            if each.verdict == nccl_environment.NOT_KNOWN:
                verdict.nearest = nearest(each.name, nccl_environment.NAMES)
            if each.refused:
                verdict.to_do = (
                    f"give {each.name} {each.expected}" if each.verdict != "harmful" else f"unset {each.name}"
                )
            yield verdict

    def given(self, given: Given) -> Verdict:
        flag = given.option.flag if given.option else given.written
        verdict = Verdict(flag, given.written, list(given.values))
        if history.known(_base(given.written)) and not self._exact_name(given):
            # The name of an option of other versions, and not just the beginning of other options' names.
            self._absent(given.written, verdict)
        elif given.option is None and given.problem:
            verdict.verdict, verdict.refused = "wrong_number_of_values", True
            verdict.expected, verdict.reason = "a value after it", given.problem
            verdict.to_do = f"write --option={given.written} if it is a value"
        elif given.candidates:
            verdict.verdict, verdict.refused = "ambiguous", True
            verdict.expected = "one of " + ", ".join(given.candidates)
            verdict.to_do = "write the option in full"
            verdict.nearest = list(given.candidates[:3])
        elif given.option is None or not self._present(given.option, verdict):
            if not verdict.refused and verdict.verdict == OK:
                self._absent(flag, verdict)
        elif given.option.ends:
            verdict.verdict, verdict.refused = "unexpected", True
            verdict.expected = "options of a service"
            verdict.reason, verdict.to_do = "the engine prints a text and ends", "take it out"
        else:
            self._judge_values(given, given.option, verdict)
            if verdict.verdict == OK:
                self._remark(given, given.option, verdict)
        return verdict

    def _present(self, option: Option, verdict: Verdict) -> bool:
        """Whether the version has the option; what is not known is noted in the verdict."""
        if self.exact:
            return True
        state = history.past(option.flag, self.version).state
        if state == history.UNKNOWN:
            verdict.verdict = "not_known"
            verdict.reason = f"whether {self.version} has it is not known here; only the installed engine can tell"
        return state == history.PRESENT

    def _exact_name(self, given: Given) -> bool:
        """Whether an option is written with a name that it has, not with the beginning of one."""
        return given.option is not None and given.written in (*given.option.names, *given.option.negations)

    def _absent(self, written: str, verdict: Verdict) -> None:
        """The version does not have it: since when, what takes its place, or what may have been meant."""
        base = _base(written)
        verdict.flag = written
        past = history.past(base, self.version)
        if past.state == history.PRESENT and not self.exact:
            # Known from the history only: by name, without its values.
            verdict.reason = f"{self.version} has it; its values are not known here"
            self._deprecation(base, verdict)
            return
        if past.state == history.UNKNOWN and not self.exact:
            names = nearest(written, history.flags_at(self.version))
            verdict.verdict, verdict.nearest = "not_known", names
            verdict.reason = f"whether {self.version} has it is not known here; only the installed engine can tell"
            return
        verdict.refused = True
        if self.exact and written != base and self.catalogue.find(base):
            verdict.verdict, verdict.expected = "unknown", f"{base}, or no such option"
            verdict.reason = f"{base} has no negation; it is off unless it is given"
            verdict.to_do = "leave it out"
        elif past.gone and release(self.version) >= release(past.gone):
            had = f"; {past.last} had it" if past.last else ""
            self._gone(past, f"gone since {past.gone} at the latest{had}", verdict)
            verdict.since = past.gone
        elif past.first and release(self.version) < release(past.first):
            verdict.verdict, verdict.since = "not_yet", past.first
            verdict.expected = f"an option that {self.version} has"
            verdict.reason = f"{past.before} did not have it, {past.first} has it"
            verdict.to_do = f"leave it out, or install {past.first} or later"
        elif past.first:
            # The installed engine is the one that knows; that a release before it had the option is worth saying.
            had = past.last or history.SAMPLED[-1]
            self._gone(past, f"{had} had it, the installed {self.version} has not", verdict)
        elif past.never:
            verdict.verdict, verdict.expected, verdict.to_do = "unknown", "no such option", "leave it out"
            verdict.reason = f"no version ever had it: {past.why}"
        else:
            known = self.catalogue.by_name if self.exact else history.flags_at(self.version)
            verdict.verdict, verdict.nearest = "unknown", nearest(written, known)
            verdict.expected = " or ".join(verdict.nearest) or "an option that the engine has"
            correct = f"correct it to {verdict.nearest[0]}, or " if verdict.nearest else ""
            verdict.to_do = correct + "leave it out"

    def _gone(self, past: history.Past, when: str, verdict: Verdict) -> None:
        verdict.verdict = "renamed" if past.instead else "removed"
        verdict.instead, verdict.expected = past.instead, past.instead or "no such option"
        verdict.reason = "; ".join(filter(None, [when, past.why]))
        verdict.to_do = f"write {past.instead} instead, or leave it out" if past.instead else "leave it out"

    def _judge_values(self, given: Given, option: Option, verdict: Verdict) -> None:
        if self.exact and given.problem:
            verdict.verdict, verdict.refused = "wrong_number_of_values", True
            verdict.expected, verdict.reason = values_in_words(option), given.problem
            verdict.to_do = (
                f"take the value out, or write {option.negations[0]}"
                if option.negations and given.values
                else ("take the value out" if option.switch else "give the value, or leave the option out")
            )
            return
        if option.switch:
            self.values[option.flag] = not given.negated
            return
        values: list[Any] = []
        for word in given.values:
            problem = self._problem(option, word, values)
            if problem is not None:
                verdict.verdict, verdict.refused, verdict.expected = problem.verdict, True, problem.expected
                verdict.nearest = problem.nearest
                verdict.reason = f"at {problem.where.lstrip('.')}" if problem.where else ""
                verdict.to_do = f"write {problem.nearest[0]}" if problem.nearest else "correct it, or leave it out"
                return
        if values:
            self.values[option.flag] = values if option.takes in ("+", "*") else values[0]

    def _problem(self, option: Option, word: str, values: list[Any]) -> WrongValueError | None:
        """What is wrong with a value; one that is right is put to `values`."""
        if not self.exact:
            taken = history.values_at(option.flag, self.version)
            if taken is not None and word not in taken:
                return WrongValueError("not_a_choice", "one of " + ", ".join(taken), nearest(word, taken))
        try:
            values.append(read(option, word))
        except WrongValueError as problem:
            # Without a catalogue of its own nobody knows whether the version takes it.
            return problem if self.exact else None
        return None

    def _remark(self, given: Given, option: Option, verdict: Verdict) -> None:
        """What is to be said of an option that the engine takes."""
        self._deprecation(option.flag, verdict)
        if verdict.verdict != OK:
            return
        if option.flag == "--config" and given.attached:
            verdict.verdict, verdict.refused = "no_effect", True
            verdict.expected, verdict.reason = (
                "--config FILE",
                "written with = the engine takes it and never reads the file",
            )
            verdict.to_do = "write --config FILE"
        elif option.flag == "--config":
            verdict.reason = "what stands in the file is not judged"
        elif given.written not in (*option.names, *option.negations):
            verdict.reason = f"short for {option.flag}; a later version may have several options that begin so"
        elif option.known and given.values and given.values[0] not in option.known:
            verdict.nearest = nearest(given.values[0], option.known)
            verdict.reason = _CUSTOM
        else:
            verdict.reason = _ADVICE.get(option.flag, "")

    def _deprecation(self, flag: str, verdict: Verdict) -> None:
        past = history.past(flag, self.version)
        if past.deprecated and release(self.version) >= release(past.deprecated):
            planned = f", to be gone in {past.planned}" if past.planned else ""
            verdict.verdict, verdict.since, verdict.instead = "deprecated", past.deprecated, past.instead
            verdict.reason = "; ".join(filter(None, [f"deprecated since {past.deprecated}{planned}", past.why]))
            verdict.to_do = f"write {past.instead} instead, or leave it out" if past.instead else "leave it out"

    def _compare_with_first(self, given: Given, verdict: Verdict) -> None:
        """An option that is given twice: the engine takes the last, whatever the first said."""
        option = given.option
        if option is None or option.repeatable:
            return
        if option.flag in self.first:
            first, first_verdict = self.first[option.flag]
            if (first.values, first.negated) != (given.values, given.negated) and not first_verdict.refused:
                first_verdict.verdict, first_verdict.refused = "contradictory", True
                first_verdict.contradicts = [verdict.found()]
                first_verdict.expected = f"{option.flag} once"
                first_verdict.reason = f"{verdict.found()} comes later and replaces it" + (
                    ": dotted options replace the whole object" if given.dotted or first.dotted else ""
                )
                first_verdict.to_do = "leave one of the two out"
        self.first[option.flag] = (given, verdict)


def _base(written: str) -> str:
    """The option behind a negation and before the fields of an object."""
    name = written.partition(".")[0]
    return "--" + name[len("--no-") :] if name.startswith("--no-") else name


def _add(finding: service.Finding, verdicts: list[Verdict], variables: list[Verdict]) -> None:
    """Put a finding to the option, or variable, that it is about."""
    flag = finding.flags[0]
    about = [verdict for verdict in verdicts + variables if verdict.flag == flag]
    if not about:
        about = [Verdict(flag, flag)]
        variables.append(about[0])
    verdict = about[-1]
    if verdict.refused:
        also = f"also {finding.verdict.replace('_', ' ')}: {finding.reason}"
        verdict.reason = "; ".join(filter(None, [verdict.reason, also]))
        return
    if verdict.verdict != OK and not finding.refused:
        return
    verdict.verdict, verdict.refused = finding.verdict, finding.refused
    verdict.reason, verdict.to_do = finding.reason, finding.to_do
    verdict.expected = "options that go together" if len(finding.flags) > 1 else "options that are fit for service"
    verdict.contradicts = list(finding.flags[1:])


def _clash(judgement: Judgement) -> None:
    """Options that one release had, and did not bear together."""
    for version, flag, other, reason in history.CLASHES:
        if release(judgement.version) == release(version):
            given = {verdict.flag: verdict for verdict in judgement.verdicts}
            if flag in given and other in given:
                verdict = given[flag]
                verdict.verdict, verdict.refused, verdict.contradicts = "contradictory", True, [other]
                verdict.expected, verdict.reason = "options that go together", reason
                verdict.to_do = "leave one of the two out"


def _accept(judgement: Judgement, accepted: Iterable[str]) -> None:
    """What an operator says is wanted does not refuse; it is still told."""
    names = {name if name.isupper() else "--" + name.lstrip("-").replace("_", "-") for name in accepted}
    for verdict in judgement.verdicts:
        if verdict.verdict == "harmful" and verdict.flag in names:
            verdict.refused = False


def _secret(name: str) -> bool:
    """Whether a variable, or an option (one that the engine does not know as well), is named like a secret."""
    if name.startswith("-"):
        return _SECRET_OPTION.search(name.lower()) is not None
    return name.isupper() and not _SECRET_PARTS.isdisjoint(name.split("_"))
