"""Request bodies: honoured, harmless, neutral, refused by name; nothing ignored in silence."""

from __future__ import annotations

import pytest
from whimbrel.wire.errors import InvalidRequest, UnsupportedParameter, WhimbrelError
from whimbrel.wire.messages import Sampling

from services.router.core.chat import ChatMessage
from services.router.core.params import (
    CHOICES_MAX,
    HARMLESS,
    HONOURED,
    NEUTRAL,
    InferenceParams,
    read_chat,
    read_completion,
)
from services.router.core.sampling import SamplingChoices, SamplingDefaults, resolve_sampling

MANY = {str(token): 1 for token in range(1025)}
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**more: object) -> InferenceParams:
    return read_chat({"model": "tiny", "messages": HELLO, **more})


def completion(**more: object) -> InferenceParams:
    return read_completion({"model": "tiny", "prompt": "Hello", **more})


def test_a_minimal_chat_has_openai_defaults() -> None:
    assert chat() == InferenceParams(
        model_id="tiny",
        is_chat=True,
        prompt=(ChatMessage(role="user", content="Hello"),),
        is_stream=False,
        is_usage_included=False,
        output_tokens_max=None,
        choices=SamplingChoices(),
        stops=(),
    )


def test_a_completion_without_a_limit_has_sixteen_tokens() -> None:
    assert completion().output_tokens_max == 16


def test_everything_honoured_arrives_typed() -> None:
    params = chat(
        stream=True,
        stream_options={"include_usage": True},
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        stop=["a", "b"],
        presence_penalty=-1,
        frequency_penalty=2,
        repetition_penalty=1.1,
        logit_bias={"5": -100},
    )
    assert (params.is_stream, params.is_usage_included, params.output_tokens_max) == (True, True, 7)
    assert params.stops == ("a", "b")
    assert params.choices == SamplingChoices(
        temperature=0.0,
        top_p=0.5,
        top_k=0,
        min_p=0.1,
        seed=2**63 - 1,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        repetition_penalty=1.1,
        logit_bias=((5, -100.0),),
    )


def test_failover_is_on_unless_the_client_says_no() -> None:
    assert [read.may_fail_over for read in (chat(), chat(failover=None), chat(failover=True))] == [True] * 3
    assert not chat(failover=False).may_fail_over
    assert not completion(failover=False).may_fail_over
    with pytest.raises(InvalidRequest, match="failover: must be"):
        chat(failover="no")


@pytest.mark.parametrize("name", sorted(HARMLESS))
@pytest.mark.parametrize("value", [None, 1, "x", {"a": [1]}, True], ids=repr)
def test_a_harmless_parameter_may_say_anything(name: str, value: object) -> None:
    assert chat(**{name: value}) == chat()


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_an_unsupported_parameter_is_refused_by_name_unless_it_says_nothing(name: str) -> None:
    assert chat(**{name: None}) == chat()
    for value in NEUTRAL[name]:
        assert chat(**{name: value}) == chat()
    with pytest.raises(UnsupportedParameter) as caught:
        chat(**{name: "something"})
    assert caught.value.field == name
    assert name in str(caught.value)


def test_a_true_is_not_taken_for_a_one() -> None:
    with pytest.raises(UnsupportedParameter, match="'best_of'"):
        chat(best_of=True)


def test_an_unsupported_value_is_refused_with_what_is_possible() -> None:
    with pytest.raises(UnsupportedParameter, match=r"'best_of' is not supported with this value \(only 1 is\)"):
        chat(best_of=2)


def test_several_choices_may_be_asked_for_up_to_a_limit_that_the_error_names() -> None:
    assert [read.choice_count for read in (chat(), chat(n=None), chat(n=2), completion(n=CHOICES_MAX))] == [1, 1, 2, 8]
    for wrong in (0, CHOICES_MAX + 1):
        with pytest.raises(InvalidRequest, match=f"n: must be between 1 and 8, not {wrong}"):
            chat(n=wrong)


def test_a_chat_asks_for_logprobs_with_a_flag_and_for_alternatives_with_a_number() -> None:
    assert chat(logprobs=True).top_logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).top_logprobs == 20
    assert [read.top_logprobs for read in (chat(), chat(logprobs=False), chat(top_logprobs=0))] == [None] * 3
    with pytest.raises(InvalidRequest, match="top_logprobs: must be between 0 and 20, not 21"):
        chat(logprobs=True, top_logprobs=21)
    with pytest.raises(InvalidRequest, match='top_logprobs: goes with "logprobs": true only'):
        chat(top_logprobs=3)
    with pytest.raises(InvalidRequest, match="logprobs: must be true or false, not the number 2"):
        chat(logprobs=2)


def test_a_completion_asks_for_logprobs_with_the_number_of_alternatives() -> None:
    assert [completion(logprobs=top).top_logprobs for top in (0, 5, None, False)] == [0, 5, None, None]
    with pytest.raises(InvalidRequest, match="logprobs: must be between 0 and 5, not 6"):
        completion(logprobs=6)
    with pytest.raises(InvalidRequest, match="logprobs: must be a whole number, not a boolean"):
        completion(logprobs=True)


@pytest.mark.parametrize("name", ["temprature", "x" * 500, "__class__", ""])
def test_an_unknown_parameter_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedParameter, match="unknown here") as caught:
        chat(**{name: 1})
    assert caught.value.field == name[:64]


def test_the_parameters_of_one_path_are_unknown_to_the_other() -> None:
    with pytest.raises(UnsupportedParameter, match="'prompt'"):
        chat(prompt="x")
    with pytest.raises(UnsupportedParameter, match="'messages'"):
        completion(messages=HELLO)
    with pytest.raises(UnsupportedParameter, match="'top_logprobs'"):
        completion(top_logprobs=1)
    with pytest.raises(UnsupportedParameter, match="'max_completion_tokens'"):
        completion(max_completion_tokens=5)


def test_no_parameter_is_on_two_lists() -> None:
    assert not HONOURED & HARMLESS
    assert not HONOURED & NEUTRAL.keys()
    assert not HARMLESS & NEUTRAL.keys()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", [0, 2, 0.5], [-0.1, 2.1, "1", True, []]),
        ("top_p", [0.01, 1], [0, 1.5, "x"]),
        ("top_k", [-1, 0, 40, 40.0], [-2, 1.5, "x", True]),
        ("min_p", [0, 1], [-0.1, 1.1]),
        ("seed", [0, -5, 2**63 - 1], [2**63, 1.5, "1", False]),
        ("presence_penalty", [-2, 2], [-2.1, 2.1, {}]),
        ("frequency_penalty", [-2, 2], [-2.1, 2.1]),
        ("repetition_penalty", [0.01, 10], [0, 11]),
        ("max_tokens", [1, 100], [0, -1, 1.5, "5", True]),
        ("max_completion_tokens", [1], [0]),
        ("stream", [True, False], [1, "true"]),
        ("stop", ["x", ["x"], ["a", "b", "c", "d"], []], [["a"] * 5, "", [""], 5, [1], "x" * 600]),
        (
            "logit_bias",
            [{}, {"1": 5}],
            [
                {"x": 1},
                {"-1": 1},
                {"1": 101},
                {"1": "x"},
                [],
                {"²": 1},
                {"9" * 11: 1},
                {str(i): 1 for i in range(1025)},
            ],
        ),
        ("model", ["tiny", "a/b"], ["../x", "", "a//b", 5, "a\nb", "x" * 200]),
    ],
)
def test_ranges_and_types_are_checked_and_named(name: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        chat(**{name: value})
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            chat(**{name: value})
        assert caught.value.field.split(".")[0].split("[")[0] == name


@pytest.mark.parametrize("body", [None, [], "x", 5, {}, {"model": "tiny"}, {"messages": HELLO}], ids=repr)
def test_a_body_that_lacks_the_essentials_is_refused(body: object) -> None:
    with pytest.raises(InvalidRequest):
        read_chat(body)


@pytest.mark.parametrize("name", ["model", "messages"])
@pytest.mark.parametrize("is_null", [True, False])
def test_what_is_missing_is_named(name: str, *, is_null: bool) -> None:
    body: dict[str, object] = {"model": "tiny", "messages": HELLO}
    if is_null:
        body[name] = None
    else:
        del body[name]
    with pytest.raises(InvalidRequest, match=f"{name}: is missing"):
        read_chat(body)


def test_two_different_limits_are_refused_and_two_equal_ones_are_not() -> None:
    assert chat(max_tokens=5, max_completion_tokens=5).output_tokens_max == 5
    with pytest.raises(InvalidRequest, match="differs from max_completion_tokens"):
        chat(max_tokens=5, max_completion_tokens=6)


@pytest.mark.parametrize(
    "options",
    [{"include_usage": 1}, {"include_usage": True, "x": 1}, [], {"include_obfuscation": True}],
    ids=repr,
)
def test_bad_stream_options_are_refused(options: object) -> None:
    with pytest.raises(WhimbrelError, match="stream_options"):
        chat(stream=True, stream_options=options)


def test_stream_options_without_a_stream_are_refused() -> None:
    with pytest.raises(InvalidRequest, match='goes with "stream": true only'):
        chat(stream_options={"include_usage": True})


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("text", "text"),
        (["text"], "text"),
        ([1, 2, 3], (1, 2, 3)),
        ([[1, 2, 3]], (1, 2, 3)),
        ("", ""),
    ],
    ids=repr,
)
def test_a_prompt_is_text_or_tokens(prompt: object, read: object) -> None:
    assert completion(prompt=prompt).prompt == read


ODD_PROMPTS: list[object] = [[], ["a", "b"], [1, "a"], [-1], [2**32], [1.5], {}, 5, [[1], [2]], [[]], [None]]


@pytest.mark.parametrize("prompt", ODD_PROMPTS, ids=repr)
def test_a_prompt_of_another_kind_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=prompt)
    assert caught.value.field.startswith("prompt")


def messages(*given: object) -> tuple[ChatMessage, ...]:
    prompt = read_chat({"model": "tiny", "messages": list(given)}).prompt
    assert isinstance(prompt, tuple)
    return prompt  # type: ignore[return-value]


def test_roles_and_text_parts_are_understood() -> None:
    assert messages(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Eve"},
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None},
        {"role": "tool", "content": "d", "tool_call_id": "call-1"},
    ) == (
        ChatMessage(role="system", content="Be brief."),
        ChatMessage(role="user", content="ab", name="Eve"),
        ChatMessage(role="assistant", content="c"),
        ChatMessage(role="tool", content="d", tool_call_id="call-1"),
    )


def test_the_template_gets_only_the_fields_that_are_there() -> None:
    assert ChatMessage(role="user", content="a").for_template() == {"role": "user", "content": "a"}
    assert ChatMessage(role="tool", content="a", tool_call_id="x").for_template()["tool_call_id"] == "x"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ("text", "messages[0]"),
        ({"content": "a"}, "messages[0].role"),
        ({"role": "god", "content": "a"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "assistant", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "odd"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "x": 1}]}, "messages[0].content[0].x"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "a", "x": 1}, "messages[0].x"),
        ({"role": "user", "content": "a", "name": 1}, "messages[0].name"),
        ({"role": "assistant", "content": "a", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
    ids=str,
)
def test_a_message_that_is_not_understood_is_refused_by_field(message: object, field: str) -> None:
    with pytest.raises((InvalidRequest, UnsupportedParameter)) as caught:
        messages(message)
    assert caught.value.field == field


@pytest.mark.parametrize("given", [[], {}, "x", None, [{"role": "user", "content": "a"}] * 5000], ids=lambda _: "")
def test_a_conversation_is_an_array_of_some_messages(given: object) -> None:
    with pytest.raises(InvalidRequest, match="messages"):
        read_chat({"model": "tiny", "messages": given})


def test_the_model_s_generation_config_fills_what_the_request_leaves_open() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
    sampling = resolve_sampling(SamplingChoices(temperature=0.0, seed=3, logit_bias=((7, 1.0),)), defaults, 99)
    assert sampling == Sampling(
        temperature=0.0, top_p=0.9, top_k=20, repetition_penalty=1.1, seed=3, logit_bias={7: 1.0}
    )


def test_a_request_without_seed_gets_the_random_one() -> None:
    assert resolve_sampling(SamplingChoices(), SamplingDefaults(), 99) == Sampling(temperature=1.0, seed=99)
