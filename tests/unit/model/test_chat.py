import json
from datetime import datetime
from pathlib import Path

import pytest

from app.errors import InvalidRequest, ModelError
from app.model.chat import ChatTemplate

REFERENCE = Path(__file__).parents[2] / "references" / "greedy_reference.json"
ECHO = "{% for m in messages %}[{{ m['role'] }}:{{ m['content'] + '' }}]{% endfor %}"


def render(template, messages=(), **options):
    return ChatTemplate(template, "<s>", "</s>").render(list(messages), **options)


@pytest.mark.model
def test_the_default_model_renders_the_reference_prompts(default_model):
    tokenizer, chat = default_model.tokenizer(), default_model.chat()
    cases = [case for case in json.loads(REFERENCE.read_text()) if case["kind"] == "chat"]
    assert len(cases) == 5
    for case in cases:
        text = chat.render([{"role": "user", "content": case["prompt"]}])
        assert tokenizer.encode(text, add_special_tokens=False) == case["prompt_ids"]


def test_null_and_text_parts_become_text():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "x", "content": None}, {"role": "y", "content": parts}, {"role": "z"}]
    assert render(ECHO, messages) == "[x:][y:ab][z:]"


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}], "messages[1].content[1].type"),
        (["a"], "messages[1].content[0].type"),
        ([{"type": "text"}], "messages[1].content[0].text"),
        (7, "messages[1].content"),
    ],
)
def test_other_content_is_a_bad_request_that_names_the_place(content, param):
    with pytest.raises(InvalidRequest) as caught:
        render(ECHO, [{"role": "user", "content": "ok"}, {"role": "user", "content": content}])
    assert caught.value.param == param
    assert param in str(caught.value)


def test_block_tags_leave_no_whitespace():
    template = "  {% if true %}\nline\n  {% endif %}\nend"
    assert render(template) == "line\nend"


def test_special_tokens_prompt_flag_json_and_loop_controls():
    assert render("{{ bos_token }}{{ eos_token }}") == "<s></s>"
    assert render("{{ add_generation_prompt }}{{ tools is none }}", add_generation_prompt=False) == "FalseTrue"
    assert render("{{ {'b': '<é>', 'a': 1} | tojson }}") == '{"b": "<é>", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    assert render("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "1"
    assert render("{% generation %}words{% endgeneration %}!") == "words!"


def test_the_date_comes_from_the_clock_given():
    chat = ChatTemplate("{{ strftime_now('%d %b %Y') }}", "", "", now=lambda: datetime(2024, 7, 26))  # noqa: DTZ001
    assert chat.render([]) == "26 Jul 2024"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[3]['content'] + 'x' }}",
        "{{ 1 + 'roles must alternate' }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_a_template_that_refuses_gives_a_bad_request(template):
    with pytest.raises(InvalidRequest, match="refuses these messages"):
        render(template, [{"role": "user", "content": "x"}])


def test_the_templates_own_words_reach_the_client():
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_broken_template_and_none_at_all():
    with pytest.raises(ModelError, match="line 2"):
        ChatTemplate("\n{% if %}", "", "")
    with pytest.raises(InvalidRequest, match="no chat template"):
        render(None)
