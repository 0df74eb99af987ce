"""Messages → the text of a prompt, by the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from app.errors import InvalidRequest, ModelError

Message = Mapping[str, Any]


class ChatTemplate:
    """A compiled chat template. Rendering touches no file, network or attribute outside the sandbox."""

    def __init__(
        self,
        template: str | None,
        bos_token: str,
        eos_token: str,
        now: Callable[[], datetime] = datetime.now,
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """``now`` is the clock of templates that print today's date; ``special_tokens`` are other tokens by name.

        Raises:
            ModelError: the template is not valid Jinja.
        """
        self._special = dict(special_tokens or {}) | {"bos_token": bos_token, "eos_token": eos_token}
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        try:
            self._template = None if template is None else environment.from_string(template)
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is broken: {error.message} (line {error.lineno})") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt for ``messages`` (``role``, ``content``: text, null, or a list of text parts).

        Raises:
            InvalidRequest: the model has no template, a content part is no text, or the template refuses the messages.
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template: use /v1/completions", param="messages")
        plain = [dict(message) | {"content": _plain_text(message, i)} for i, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=plain, tools=None, documents=None, add_generation_prompt=add_generation_prompt, **self._special
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error


def _plain_text(message: Message, index: int) -> str:
    """Templates add ``content`` to strings, so null and part lists become strings first."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    where = f"messages[{index}].content"
    if not isinstance(content, Sequence):
        raise InvalidRequest(f"{where} must be text, null or a list of text parts", param=where)
    texts = []
    for j, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            param = f"{where}[{j}].type"
            raise InvalidRequest(f"{param} is {kind!r}; only 'text' is supported", param=param)
        if not isinstance(part.get("text"), str):
            param = f"{where}[{j}].text"
            raise InvalidRequest(f"{param} must be a string", param=param)
        texts.append(part["text"])
    return "".join(texts)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: Jinja's own filter escapes <, > and & for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)


class _Generation(jinja2.ext.Extension):
    """``{% generation %}…{% endgeneration %}`` marks the assistant's words for training; here it is its body."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)
