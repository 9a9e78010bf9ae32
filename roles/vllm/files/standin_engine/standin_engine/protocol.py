# SPDX-License-Identifier: GPL-3.0-or-later
"""Bodies of requests, checked as vLLM 0.32 checks them, and its error bodies.

vLLM has two kinds of refusal, both with status 400: a body of the wrong shape (``Bad Request``, from its validation
library) and a value that cannot be served (``BadRequestError``). Unknown fields are ignored, as vLLM ignores them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from . import documents
from .tools import ForcedCall

MAX_SEQUENCES = 16384
"""vLLM's default limit of ``n``."""
MAX_PROMPTS = 1024
"""Prompts that one request may carry."""
MAX_STOP_STRINGS = 1024
"""Stop strings that one request may carry."""

_SHOWN_INPUT = 200
_NO_OBJECT = "Input should be a valid dictionary or object to extract fields from"


class ApiError(Exception):
    """A refusal with vLLM's error body.

    Attributes:
        status: HTTP status.
        body: the body, as JSON.
    """

    def __init__(self, status: int, message: str, kind: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, dict[str, Any]] = {
            "error": {"message": message, "type": kind, "param": parameter, "code": status}
        }


def refused(message: str, parameter: str | None = None, value: Any = None) -> ApiError:
    """A value that cannot be served."""
    extras = [f"parameter={parameter}"] if parameter is not None else []
    extras += [f"value={value}"] if value is not None else []
    text = f"{message} ({', '.join(extras)})" if extras else message
    return ApiError(HTTPStatus.BAD_REQUEST, text, "BadRequestError", parameter)


def model_not_found(model: str, served: Sequence[str]) -> ApiError:
    """An unknown model name."""
    message = f"The model `{model}` does not exist. Valid aliases: {', '.join(served)}."
    return ApiError(HTTPStatus.NOT_FOUND, message, "NotFoundError", "model")


def malformed(location: str, kind: str, message: str, value: Any, context: dict[str, str] | None = None) -> ApiError:
    """A body of the wrong shape; ``location`` is the dotted path of the field."""
    error: dict[str, Any] = {"type": kind, "loc": location, "msg": message, "input": _summary(value)}
    if context:
        error["ctx"] = context
    return ApiError(HTTPStatus.BAD_REQUEST, f"1 validation error:\n  {error}", "Bad Request", location)


def _summary(value: Any) -> Any:
    if isinstance(value, (list, dict)):
        return f"<{type(value).__name__} of {len(value)} items>"
    text = value if isinstance(value, str) else str(value)
    if len(text) > _SHOWN_INPUT:
        return text[:_SHOWN_INPUT] + "...[truncated]"
    return value


def parse_body(content_type: str, body: bytes) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        ApiError: another media type, no JSON, or no object.
    """
    if content_type.lower().split(";", 1)[0] != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise ApiError(HTTPStatus.BAD_REQUEST, message, "Bad Request")
    if not body:
        raise malformed("body", "missing", "Field required", None)
    try:
        document = json.loads(body)
    except json.JSONDecodeError as error:
        raise malformed(f"body.{error.pos}", "json_invalid", "JSON decode error", {}, {"error": error.msg}) from error
    except (ValueError, RecursionError) as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, "There was an error parsing the body", "Bad Request") from error
    if not isinstance(document, dict):
        raise malformed("body", "model_attributes_type", _NO_OBJECT, document)
    return document


class Fields:
    """Typed access to the fields of a body; a wrong type raises ``ApiError``. A missing or null field is ``None``."""

    def __init__(self, document: Mapping[str, Any], path: str = "body") -> None:
        self._document = document
        self._path = path

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._document.get(name) is not None

    def get(self, name: str) -> Any:
        """The raw value."""
        return self._document.get(name)

    def _wrong(self, name: str, kind: str, message: str) -> ApiError:
        return malformed(f"{self._path}.{name}", kind, message, self._document[name])

    def missing(self, name: str) -> ApiError:
        """The error of a field that has to be there."""
        return malformed(f"{self._path}.{name}", "missing", "Field required", dict(self._document))

    def integer(self, name: str) -> int | None:
        """A whole number; a string of digits and a float without a fraction are taken, too."""
        value = self._document.get(name)
        if value is None or isinstance(value, int):
            return None if value is None else int(value)
        if isinstance(value, float):
            if math.isfinite(value) and value.is_integer():
                return int(value)
            raise self._wrong(
                name, "int_from_float", "Input should be a valid integer, got a number with a fractional part"
            )
        if isinstance(value, str):
            try:
                return int(value)
            except ValueError:
                raise self._wrong(
                    name, "int_parsing", "Input should be a valid integer, unable to parse string as an integer"
                ) from None
        raise self._wrong(name, "int_type", "Input should be a valid integer")

    def number(self, name: str) -> float | None:
        """A number; a string that is one is taken, too."""
        value = self._document.get(name)
        if value is None or isinstance(value, (int, float)):
            return None if value is None else float(value)
        if isinstance(value, str):
            try:
                return float(value)
            except ValueError:
                raise self._wrong(
                    name, "float_parsing", "Input should be a valid number, unable to parse string as a number"
                ) from None
        raise self._wrong(name, "float_type", "Input should be a valid number")

    def boolean(self, name: str) -> bool:
        """True or false; missing or null is false."""
        value = self._document.get(name)
        if value is None or isinstance(value, bool):
            return bool(value)
        if value in (0, 1):
            return bool(value)
        if isinstance(value, str) and value.lower() in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            return value.lower() in ("true", "1", "yes", "on")
        raise self._wrong(name, "bool_type", "Input should be a valid boolean")

    def text(self, name: str) -> str | None:
        """A string."""
        value = self._document.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self._wrong(name, "string_type", "Input should be a valid string")

    def strings(self, name: str) -> list[str]:
        """A string or a list of strings."""
        value = self._document.get(name)
        if value is None:
            return []
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list):
            raise self._wrong(name, "string_type", "Input should be a valid string")
        if len(value) > MAX_STOP_STRINGS:
            raise self._wrong(name, "too_long", f"List should have at most {MAX_STOP_STRINGS} items after validation")
        for index, item in enumerate(value):
            if not isinstance(item, str):
                raise malformed(f"{self._path}.{name}.{index}", "string_type", "Input should be a valid string", item)
        return value

    def integers(self, name: str) -> list[int]:
        """A list of whole numbers."""
        value = self._document.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._wrong(name, "list_type", "Input should be a valid list")
        for index, item in enumerate(value):
            if not isinstance(item, int):
                raise malformed(f"{self._path}.{name}.{index}", "int_type", "Input should be a valid integer", item)
        return value

    def mapping(self, name: str) -> Fields | None:
        """An object."""
        value = self._document.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self._wrong(name, "model_attributes_type", _NO_OBJECT)
        return Fields(value, f"{self._path}.{name}")


@dataclass
class Sampling:
    """How answers are to be made.

    Attributes:
        max_tokens: None means up to the end of the context.
        logprobs: number of alternatives to show for each token; None means no log probabilities.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    stops: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    include_stop: bool = False
    logprobs: int | None = None


@dataclass
class GenerationRequest:
    """What both completion routes have in common.

    Attributes:
        prompts: texts or token ids; for a chat one rendered prompt.
        max_tokens_name: the field that limits the answer, for messages.
        echo: whether the prompt is repeated before the answer.
        salt: separates the prefix cache.
        document: the text of an answer of the form that is asked for, or of the call; None if neither is.
        call: the call of a tool that the answer has to be, if any.
    """

    model: str | None
    prompts: Sequence[str | Sequence[int]]
    sampling: Sampling
    max_tokens_name: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    echo: bool
    return_token_ids: bool
    stream_interval: int
    request_id: str | None
    salt: str
    truncate_prompt_tokens: int | None
    document: str | None
    call: ForcedCall | None


def _sampling(fields: Fields, max_tokens: int | None, logprobs: int | None) -> Sampling:
    temperature = fields.number("temperature")
    count = fields.integer("n")
    sampling = Sampling(
        n=1 if count is None else count,
        max_tokens=max_tokens,
        min_tokens=fields.integer("min_tokens") or 0,
        temperature=1.0 if temperature is None else temperature,
        seed=fields.integer("seed"),
        ignore_eos=fields.boolean("ignore_eos"),
        stops=fields.strings("stop"),
        stop_token_ids=fields.integers("stop_token_ids"),
        include_stop=fields.boolean("include_stop_str_in_output"),
        logprobs=logprobs,
    )
    for name, low, high in (("presence_penalty", -2.0, 2.0), ("frequency_penalty", -2.0, 2.0)):
        penalty = fields.number(name)
        if penalty is not None and not low <= penalty <= high:
            raise refused(f"{name} must be in [-2, 2], got {penalty}.")
    if sampling.n < 1:
        raise refused(f"n must be at least 1, got {sampling.n}.")
    if sampling.n > MAX_SEQUENCES:
        raise refused(
            f"n must be at most {MAX_SEQUENCES}, got {sampling.n}. To increase this limit, set the "
            "VLLM_MAX_N_SEQUENCES environment variable."
        )
    heat = sampling.temperature
    if not math.isfinite(heat):
        raise refused(f"temperature must be a finite number, got {heat}.", "temperature", heat)
    if heat < 0:
        raise refused(f"temperature must be non-negative, got {heat}.", "temperature", heat)
    if heat > 2:
        raise refused(f"temperature must be in [0, 2], got {heat}.", "temperature", heat)
    top_p = fields.number("top_p")
    if top_p is not None and not 0 < top_p <= 1:
        raise refused(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    top_k = fields.integer("top_k")
    if top_k is not None and top_k < -1:
        raise refused(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    if sampling.min_tokens < 0:
        raise refused(f"min_tokens must be greater than or equal to 0, got {sampling.min_tokens}.")
    if any(not stop for stop in sampling.stops):
        raise refused("stop cannot contain an empty string.")
    if heat < 1e-5 and sampling.n > 1:
        raise refused(f"n must be 1 when using greedy sampling, got {sampling.n}.")
    return sampling


def _request(
    fields: Fields, prompts: Sequence[Any], sampling: Sampling, max_tokens_name: str, call: ForcedCall | None = None
) -> GenerationRequest:
    document = _document(fields)
    stream = fields.boolean("stream")
    options = fields.mapping("stream_options")
    if fields.get("stream_options") and not stream:
        raise refused("Stream options can only be defined when `stream=True`.", "stream_options")
    include_usage = options is not None and options.boolean("include_usage")
    truncation = fields.integer("truncate_prompt_tokens")
    if truncation is not None and truncation < -1:
        raise malformed(
            "body.truncate_prompt_tokens",
            "greater_than_equal",
            "Input should be greater than or equal to -1",
            truncation,
        )
    interval = fields.integer("stream_interval")
    if interval is not None and interval < 1:
        raise malformed(
            "body.stream_interval", "greater_than_equal", "Input should be greater than or equal to 1", interval
        )
    return GenerationRequest(
        model=fields.text("model"),
        prompts=prompts,
        sampling=sampling,
        max_tokens_name=max_tokens_name,
        stream=stream,
        include_usage=include_usage,
        continuous_usage=include_usage and options is not None and options.boolean("continuous_usage_stats"),
        echo=fields.boolean("echo"),
        return_token_ids=fields.boolean("return_token_ids"),
        stream_interval=interval or 1,
        request_id=fields.text("request_id"),
        salt=fields.text("cache_salt") or "",
        truncate_prompt_tokens=truncation,
        document=document if call is None else call.text,
        call=call,
    )


def _document(fields: Fields) -> str | None:
    """The answer that `response_format` asks for."""
    wanted = fields.mapping("response_format")
    if wanted is None:
        return None
    kind, path = wanted.get("type"), "body.response_format"
    if kind not in ("text", "json_object", "json_schema", "structural_tag"):
        expected = "'text', 'json_object' or 'json_schema'"
        raise malformed(f"{path}.type", "literal_error", f"Input should be {expected}", kind, {"expected": expected})
    if kind == "json_schema" and not wanted.has("json_schema"):
        raise refused(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.", "response_format"
        )
    if kind == "json_object":
        return documents.text({})
    described = wanted.get("json_schema")
    return documents.text(described.get("schema")) if kind == "json_schema" and isinstance(described, dict) else None


def _is_token_ids(items: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def _prompts(fields: Fields) -> Sequence[str | Sequence[int]]:
    prompt = fields.get("prompt")
    if prompt is None or prompt == "":
        raise refused("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise malformed("body.prompt", "string_type", "Input should be a valid string", prompt)
    if not prompt:
        raise refused("You must pass at least one prompt")
    if _is_token_ids(prompt):
        prompts: list[Any] = [prompt]
    elif all(isinstance(item, str) for item in prompt) or all(
        isinstance(item, list) and _is_token_ids(item) for item in prompt
    ):
        prompts = prompt
    else:
        raise malformed("body.prompt", "string_type", "Input should be a valid string", prompt)
    if len(prompts) > MAX_PROMPTS:
        raise refused(
            f"prompt list length {len(prompts)} exceeds the maximum allowed count of {MAX_PROMPTS}. To increase this "
            "limit, set the VLLM_MAX_COMPLETION_PROMPTS environment variable.",
            "prompt",
        )
    for item in prompts:
        if len(item) == 0:
            raise refused("The decoder prompt cannot be empty")
        if isinstance(item, list) and min(item) < 0:
            raise malformed(
                "body.prompt", "greater_than_equal", "Input should be greater than or equal to 0", min(item)
            )
    return prompts


def parse_completion(document: Mapping[str, Any]) -> GenerationRequest:
    """Check the body of ``/v1/completions``.

    Raises:
        ApiError: vLLM would refuse it.
    """
    fields = Fields(document)
    logprobs = fields.integer("logprobs")
    if logprobs is not None and logprobs < -1:
        raise refused("`logprobs` must be a positive value or -1.", "logprobs", logprobs)
    max_tokens = fields.integer("max_tokens")
    sampling = _sampling(fields, 16 if max_tokens is None else max_tokens, logprobs)
    return _request(fields, _prompts(fields), sampling, "max_tokens")


def parse_chat(document: Mapping[str, Any], auto_tool_choice: bool) -> tuple[GenerationRequest, list[dict[str, Any]]]:
    """Check the body of ``/v1/chat/completions``; gives the request, without prompts, and the messages as text.

    Args:
        document: the body.
        auto_tool_choice: whether the engine was started with ``--enable-auto-tool-choice`` and ``--tool-call-parser``.

    Raises:
        ApiError: vLLM would refuse it.
    """
    fields = Fields(document)
    messages = parse_messages(fields)
    call = _forced_call(fields, "tool_choice" in document, auto_tool_choice)
    alternatives = fields.integer("top_logprobs") or 0
    if alternatives < -1:
        raise refused("`top_logprobs` must be a positive value or -1.", "top_logprobs", alternatives)
    if alternatives and not fields.boolean("logprobs"):
        raise refused("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    name = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    sampling = _sampling(fields, fields.integer(name), alternatives if fields.boolean("logprobs") else None)
    return _request(fields, [], sampling, name, call), messages


def _forced_call(fields: Fields, chosen: bool, auto_tool_choice: bool) -> ForcedCall | None:
    """The call that the client insists on. ``chosen``: whether `tool_choice` is there, null or not."""
    tools = fields.get("tools")
    if tools == []:
        raise refused(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.", "tools"
        )
    choice = fields.get("tool_choice") if chosen or not tools else "auto"
    if choice not in (None, "none"):
        if tools is None:
            raise refused("When using `tool_choice`, `tools` must be set.", "tool_choice")
        if choice not in ("auto", "required") and not isinstance(choice, dict):
            raise refused(
                f"Invalid value for `tool_choice`: {choice}! "
                'Only named tools, "none", "auto" or "required" are supported.',
                "tool_choice",
            )
    functions = _functions(tools)
    named = _named_function(choice, functions) if isinstance(choice, dict) else None
    if choice in (None, "none"):
        return None
    if not auto_tool_choice:
        if choice == "auto":
            raise refused('"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set')
        wanted = f'"{choice}"' if named is None else f'function "{named}"'
        raise refused(f"tool_choice={wanted} requires --tool-call-parser to be set")
    if choice == "auto":
        return None
    name = next(iter(functions)) if named is None else named
    return ForcedCall(name, documents.text(functions[name]), named=named is not None)


def _named_function(choice: Mapping[str, Any], functions: Mapping[str, Any]) -> str:
    usage = 'Correct usage: `{"type": "function", "function": {"name": "my_function"}}`'
    function = choice.get("function")
    if not isinstance(function, dict):
        raise refused(f"Invalid value for `function`: `{function}` in `tool_choice`! {usage}", "tool_choice.function")
    if "name" not in function:
        raise refused(f"Expected field `name` in `function` in `tool_choice`! {usage}", "tool_choice.function.name")
    name = function["name"]
    if not isinstance(name, str) or not name:
        raise refused(f"Invalid `name` in `function`: `{name}` in `tool_choice`! {usage}", "tool_choice.function.name")
    if name not in functions:
        raise refused("The tool specified in `tool_choice` does not match any of the specified `tools`", "tool_choice")
    if choice.get("type", "function") != "function":
        # vLLM tries the kinds of choice one after the other, and names the first.
        path = "body.tool_choice.literal['none']"
        raise malformed(path, "literal_error", "Input should be 'none'", choice, {"expected": "'none'"})
    return name


def _functions(tools: Any) -> dict[str, Any]:
    """The functions that a client offers: name → schema of the arguments, None if it says nothing of them."""
    if tools is None:
        return {}
    if not isinstance(tools, list):
        raise malformed("body.tools", "list_type", "Input should be a valid list", tools)
    functions: dict[str, Any] = {}
    for place, tool in enumerate(tools):
        path = f"body.tools.{place}"
        if not isinstance(tool, dict):
            raise malformed(path, "model_attributes_type", _NO_OBJECT, tool)
        fields = Fields(tool, path)
        if tool.get("type", "function") != "function":
            expected = "'function'"
            raise malformed(
                f"{path}.type", "literal_error", f"Input should be {expected}", tool["type"], {"expected": expected}
            )
        if "function" not in tool:
            raise fields.missing("function")
        function = fields.mapping("function")
        if function is None:
            raise malformed(f"{path}.function", "model_attributes_type", _NO_OBJECT, None)
        functions.setdefault(*_function(function, tool["function"], f"{path}.function"))
    return functions


def _function(fields: Fields, document: Mapping[str, Any], path: str) -> tuple[str, Any]:
    """A function's name and the schema of its arguments."""
    if "name" not in document:
        raise fields.missing("name")
    name = fields.text("name")
    if name is None:
        raise malformed(f"{path}.name", "string_type", "Input should be a valid string", None)
    fields.text("description")
    fields.boolean("strict")
    parameters = document.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise malformed(f"{path}.parameters", "dict_type", "Input should be a valid dictionary", parameters)
    return name, parameters


def parse_messages(fields: Fields) -> list[dict[str, Any]]:
    """Messages with their parts joined to one text.

    Raises:
        ApiError: no messages, a message without a role, or a part that is no text.
    """
    messages = fields.get("messages")
    if messages is None:
        raise fields.missing("messages")
    if not isinstance(messages, list):
        raise malformed("body.messages", "list_type", "Input should be a valid list", messages)
    if not messages:
        raise refused("Cannot apply chat template to an empty conversation. Provide at least one message.")
    result = []
    for index, message in enumerate(messages):
        path = f"body.messages.{index}"
        if not isinstance(message, dict):
            raise malformed(path, "model_attributes_type", "Input should be a valid dictionary", message)
        entry = Fields(message, path)
        role = entry.text("role")
        if role is None:
            # vLLM tries the kinds of message one after the other, and names the first.
            raise Fields(message, f"{path}.ChatCompletionDeveloperMessageParam").missing("role")
        content = entry.get("content")
        if isinstance(content, list):
            content = "\n".join(_part(part, f"{path}.content.{place}") for place, part in enumerate(content))
        elif content is not None and not isinstance(content, str):
            raise malformed(f"{path}.content", "string_type", "Input should be a valid string", content)
        result.append({"role": role, "content": content or ""})
    return result


def _part(part: Any, path: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise malformed(path, "model_attributes_type", "Input should be a valid dictionary", part)
    kind = part.get("type")
    if kind in ("image_url", "input_image", "audio_url", "input_audio", "video_url"):
        modality = kind.replace("input_", "").replace("_url", "")
        raise refused(f"At most 0 {modality}(s) may be provided in one prompt.")
    text = part.get("text")
    if not isinstance(text, str):
        raise malformed(f"{path}.text", "string_type", "Input should be a valid string", text)
    return text


def check_limits(
    request: GenerationRequest, prompt_tokens: int, max_model_len: int, max_logprobs: int, counted: bool = False
) -> int:
    """Tokens that an answer to a prompt of that length may have. ``counted``: the client gave token ids, not a text.

    Raises:
        ApiError: prompt or answer do not fit into the context, or too many log probabilities are wanted.
    """
    sampling = request.sampling
    wanted = sampling.max_tokens
    if wanted is not None and wanted > max_model_len:
        raise refused(
            f"{request.max_tokens_name}={wanted} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            request.max_tokens_name,
            wanted,
        )
    if prompt_tokens > max_model_len:
        # vLLM reads no more of a text than it needs to know that it is too long.
        prompt_tokens = prompt_tokens if counted else max_model_len + 1
        raise refused(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{'' if counted else 'at least '}{prompt_tokens} input tokens, which exceeds this limit even without any "
            "output tokens. Please reduce the length of the input prompt.",
            "input_tokens",
            prompt_tokens,
        )
    limit = max_model_len - prompt_tokens if wanted is None else min(wanted, max_model_len - prompt_tokens)
    if request.echo and wanted == 0:
        limit = min(1, max_model_len - prompt_tokens)
    if limit < 1:
        raise refused(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if sampling.min_tokens > limit:
        raise refused(f"min_tokens must be less than or equal to max_tokens={limit}, got {sampling.min_tokens}.")
    if sampling.logprobs is not None and sampling.logprobs > max_logprobs >= 0:
        raise refused(
            f"Requested sample logprobs of {sampling.logprobs}, which is greater than max allowed: {max_logprobs}",
            "logprobs",
            sampling.logprobs,
        )
    return limit
