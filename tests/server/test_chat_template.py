"""Templates: what Hugging Face templates use works, and nothing else is reachable."""

import pytest

from adaflash.engine.errors import ConfigError, InvalidRequestError
from adaflash.server.chat_template import ChatTemplate

HELLO = [{"role": "user", "content": "<b>Hello</b> é"}]


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(HELLO)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}{{ messages[0].content }}{{ eos_token }}", "<s><b>Hello</b> é</s>"),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<b>Hello</b> é"}'),
        (
            "{{ {'b': 1, 'a': '<'} | tojson(separators=(',', ':'), sort_keys=true) }}",
            '{"a":"<","b":1}',
        ),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{% if tools %}t{% endif %}{% if add_generation_prompt %}a{% endif %}", "a"),
        ("  {% if true %}\nline\n  {% endif %}\n", "line\n"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ undefined_name }}|{{ messages[0]['name'] }}", "|"),
    ],
)
def test_what_templates_use(source: str, expected: str) -> None:
    assert render(source) == expected


def test_a_refusal_is_the_client_s_error() -> None:
    with pytest.raises(InvalidRequestError, match="roles must alternate") as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[5].content.x }}", "{{ 1 + messages[0].role }}"])
def test_what_fails_inside_is_the_client_s_error(source: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot render"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(InvalidRequestError):
        render(source)


def test_a_template_that_is_no_jinja_is_refused_at_once() -> None:
    with pytest.raises(ConfigError, match="not valid Jinja"):
        ChatTemplate("{% if %}", {})
