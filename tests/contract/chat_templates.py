"""Chat templates with the turn markers of each family, written for these tests.

Every template takes messages whose ``content`` is a string, a list of parts or None, writes one placeholder
per media item and rejects a part it does not know. An unlisted role becomes a turn of that role.
"""

from __future__ import annotations

from typing import Any

_DEFAULT_SYSTEM = "You are a helpful assistant."


def _write(text: str) -> str:
    r"""Jinja that writes ``text`` as it is. An expression, because a block's own newline would be cut."""
    return "{{ '" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "' }}"


def _content(*, of: str = "message", trim: bool = False, **placeholders: str) -> str:
    """Jinja that writes the content of the message called ``of``, with one placeholder per media item."""
    content = of + "['content']"
    tidy = " | trim" if trim else ""
    media = "".join(
        "{% elif part['type'] == '" + kind + "' %}" + _write(text) for kind, text in placeholders.items()
    )
    return (
        "{% if " + content + " is string %}{{ " + content + tidy + " }}"
        "{% elif " + content + " is not none %}{% for part in " + content + " %}"
        "{% if part['type'] == 'text' %}{{ part['text']" + tidy + " }}" + media + ""
        "{% else %}{{ raise_exception('no placeholder for a part of type ' + part['type']) }}{% endif %}"
        "{% endfor %}{% endif %}"
    )


def _each_message(turn: str, *, before: str = "", after: str = "", prompt: str) -> str:
    return (
        before
        + "{% for message in messages %}"
        + turn
        + "{% endfor %}{% if add_generation_prompt %}"
        + _write(prompt)
        + "{% else %}"
        + after
        + "{% endif %}"
    )


def chatml(*, default_system: bool = False, generation: bool = False, **placeholders: Any) -> str:
    """``<|im_start|>role`` newline, content, ``<|im_end|>`` newline.

    Args:
        default_system: Open with a system turn where the conversation has none (as Qwen2-VL does).
        generation: Mark what the model writes with ``{% generation %}``: masks come from the template.
        placeholders: The text of one image, video or audio.
    """
    content = _content(**placeholders)
    end = _write("<|im_end|>")
    body = content + end
    if generation:
        body = (
            "{% if message['role'] == 'assistant' %}{% generation %}" + body + "{% endgeneration %}"
            "{% else %}" + body + "{% endif %}"
        )
    system = "<|im_start|>system\n" + _DEFAULT_SYSTEM + "<|im_end|>\n"
    return _each_message(
        _write("<|im_start|>") + "{{ message['role'] }}" + _write("\n") + body + _write("\n"),
        before="{% if messages[0]['role'] != 'system' %}" + _write(system) + "{% endif %}"
        if default_system
        else "",
        prompt="<|im_start|>assistant\n",
    )


def _qwen3_vl() -> str:
    """ChatML in which what a tool returns is a user turn with ``<tool_response>`` around it."""
    content = _content(
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    )
    tool = _write("<|im_start|>user\n<tool_response>\n") + content + _write("\n</tool_response><|im_end|>\n")
    turn = _write("<|im_start|>") + "{{ message['role'] }}" + _write("\n") + content + _write("<|im_end|>\n")
    return _each_message(
        "{% if message['role'] == 'tool' %}" + tool + "{% else %}" + turn + "{% endif %}",
        prompt="<|im_start|>assistant\n",
    )


def _kimi(image: str, *, default_system: bool = False, video: str | None = None) -> str:
    """``<|im_user|>user<|im_middle|>`` … ``<|im_end|>``; all but user and assistant speak as the system."""
    placeholders: dict[str, Any] = {"image": image, **({"video": video} if video else {})}
    content = _content(**placeholders)
    who = (
        "{% if message['role'] == 'user' %}" + _write("<|im_user|>") + ""
        "{% elif message['role'] == 'assistant' %}" + _write("<|im_assistant|>") + ""
        "{% else %}" + _write("<|im_system|>") + "{% endif %}"
    )
    system = "<|im_system|>system<|im_middle|>" + _DEFAULT_SYSTEM + "<|im_end|>"
    return _each_message(
        who + "{{ message['role'] }}" + _write("<|im_middle|>") + content + _write("<|im_end|>"),
        before="{% if messages[0]['role'] != 'system' %}" + _write(system) + "{% endif %}"
        if default_system
        else "",
        prompt="<|im_assistant|>assistant<|im_middle|>",
    )


def _gemma3() -> str:
    """The system text opens the next turn, the assistant is ``model``, texts are trimmed, BOS is written."""
    content = _content(trim=True, image="<start_of_image>")
    system = (
        "{% if loop.index0 == 1 and messages[0]['role'] == 'system' %}"
        + _content(of="messages[0]", trim=True, image="<start_of_image>")
        + _write("\n\n")
        + "{% endif %}"
    )
    turn = (
        "{% if not (loop.first and message['role'] == 'system') %}"
        + _write("<start_of_turn>")
        + "{{ 'model' if message['role'] == 'assistant' else message['role'] }}"
        + _write("\n")
        + system
        + content
        + _write("<end_of_turn>\n")
        + "{% endif %}"
    )
    return _each_message(turn, before="{{ bos_token }}", prompt="<start_of_turn>model\n")


def _gemma4() -> str:
    """``<|turn>role`` newline … ``<turn|>`` newline; the assistant is ``model``; texts are trimmed."""
    content = _content(trim=True, image="<|image|>", video="<|video|>", audio="<|audio|>")
    return _each_message(
        _write("<|turn>")
        + "{{ 'model' if message['role'] == 'assistant' else message['role'] }}"
        + _write("\n")
        + content
        + _write("<turn|>\n"),
        before="{{ bos_token }}",
        prompt="<|turn>model\n",
    )


def _smolvlm() -> str:
    """``User:`` or ``User: `` (no blank before an image), the text, ``<end_of_utterance>`` newline."""
    content = _content(image="<image>", video="<video>")
    colon = (
        "{% if message['content'] is string or not message['content'] %}" + _write(": ") + ""
        "{% elif message['content'][0]['type'] == 'image' %}" + _write(":") + ""
        "{% else %}" + _write(": ") + "{% endif %}"
    )
    return _each_message(
        "{{ message['role'] | capitalize }}" + colon + content + _write("<end_of_utterance>\n"),
        before=_write("<|im_start|>"),
        prompt="Assistant:",
    )


def _phi4() -> str:
    """``<|role|>`` … ``<|end|>``, and the end-of-text token after the last turn."""
    content = _content(image="<|image|>", audio="<|audio|>")
    return _each_message(
        _write("<|") + "{{ message['role'] }}" + _write("|>") + content + _write("<|end|>"),
        after="{{ eos_token }}",
        prompt="<|assistant|>",
    )


_QWEN: dict[str, Any] = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}

TEMPLATES: dict[str, str] = {
    "qwen2_vl": chatml(default_system=True, **_QWEN),
    "qwen2_5_vl": chatml(default_system=True, **_QWEN),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _qwen3_vl()),
    "qwen3_omni": chatml(audio="<|audio_start|><|audio_pad|><|audio_end|>", **_QWEN),
    "kimi_vl": _kimi("<|media_start|>image<|media_content|><|media_pad|><|media_end|>", default_system=True),
    "kimi_k25": _kimi(
        "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
        video="<|kimi_k25_video_placeholder|>",
    ),
    "gemma3": _gemma3(),
    "gemma4": _gemma4(),
    "llava_onevision": chatml(image="<image>\n", video="<video>\n"),
    "internvl": chatml(image="<IMG_CONTEXT>\n", video="<video>\n"),
    "smolvlm": _smolvlm(),
    "lfm2_vl": "{{ bos_token }}" + chatml(image="<image>"),
    "phi4_mm": _phi4(),
    "nemotron_omni": chatml(image="<image>\n", video="<video>\n", audio="<so_embedding>\n"),
}

TRIMS_TEXT = frozenset({"gemma3", "gemma4"})
"""Families whose template cuts placeholders from both ends of every text."""


def _tools() -> str:
    """ChatML with tools in front, reasoning before and tool calls after an answer, results in a user turn."""
    content = _content(
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    )
    listed = (
        "{% if tools %}"
        + _write("<|im_start|>system\nTools:")
        + "{% for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}"
        + _write("<|im_end|>\n")
        + "{% endif %}"
    )
    calls = (
        "{% for call in message.get('tool_calls') or [] %}{% if not loop.first or message['content'] %}"
        + _write("\n")
        + "{% endif %}"
        + _write("<tool_call>")
        + "{{ {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson }}"
        + _write("</tool_call>")
        + "{% endfor %}"
    )
    result = (
        _write("<|im_start|>user\n<tool_response>\n") + content + _write("\n</tool_response><|im_end|>\n")
    )
    reasoning = (
        "{% if message.get('reasoning_content') %}"
        + _write("<think>")
        + "{{ message['reasoning_content'] }}"
        + _write("</think>\n")
        + "{% endif %}"
    )
    turn = _write("<|im_start|>") + "{{ message['role'] }}" + _write("\n") + reasoning + content + calls
    return _each_message(
        "{% if message['role'] == 'tool' %}"
        + result
        + "{% else %}"
        + turn
        + _write("<|im_end|>\n")
        + "{% endif %}",
        before=listed,
        prompt="<|im_start|>assistant\n",
    )


TOOLS = _tools()
