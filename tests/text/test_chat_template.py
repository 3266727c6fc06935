import pytest

from treadle.core.errors import InvalidRequestError, ModelLoadError
from treadle.text import ChatTemplate

MESSAGES = [
    {"role": "user", "content": 'What is 1 < 2 & "quotes"?'},
    {"role": "assistant", "content": "Trüe 😀"},
    {"role": "user", "content": "Thanks"},
]

LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token}}{% endif %}{% endfor %}"
)
FANCY = """{%- for message in messages %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {% if message.role == 'assistant' %}
{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}

    {% else %}
{{ message | tojson }}
    {% endif %}
{%- endfor %}
{{ [1, {'a': 'é'}] | tojson(indent=2) }}
"""


@pytest.mark.parametrize("source", [None, LLAMA3, MISTRAL, FANCY])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendering_equals_transformers(source, add_generation_prompt, embedded_model, oracle_tokenizer):
    tokenizer = oracle_tokenizer
    expected = tokenizer.apply_chat_template(
        MESSAGES, chat_template=source, tokenize=False, add_generation_prompt=add_generation_prompt
    )
    template = embedded_model.chat_template
    if source is not None:
        template = ChatTemplate(source, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    assert template.render(MESSAGES, add_generation_prompt=add_generation_prompt) == expected


def test_errors_raised_by_a_template_are_reported():
    template = ChatTemplate(MISTRAL, bos_token="<s>", eos_token="</s>")
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        template.render([{"role": "assistant", "content": "hi"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.__class__.__base__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
    ],
)
def test_templates_cannot_escape_the_sandbox(source):
    with pytest.raises(InvalidRequestError):
        ChatTemplate(source).render([{"role": "user", "content": "hi"}])


def test_an_invalid_template_is_a_model_load_error():
    with pytest.raises(ModelLoadError, match="chat template is not valid"):
        ChatTemplate("{% for %}")


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages: is empty"),
        ("hi", "messages: must be a list"),
        ({"role": "user", "content": "hi"}, "messages: must be a list"),
        (["hi"], r"messages\[0\]: must be a mapping"),
        ([{"content": "hi"}], r"messages\[0\].role"),
        ([{"role": "user", "content": "a"}, {"role": "user"}], r"messages\[1\].content"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: must be a string, got 3"),
    ],
)
def test_errors_name_the_malformed_message(messages, field):
    with pytest.raises(InvalidRequestError, match=field):
        ChatTemplate("x").render(messages)
