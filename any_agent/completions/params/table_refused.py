"""The refused rows of chat and completions in the table of parameters."""

from __future__ import annotations

from any_agent.completions.params.parameter import CHAT, COMPLETIONS, Parameter, never, only

_GRAMMAR = "Use `response_format` or `guided_regex`."
_TEMPLATE = "Use `chat_template_kwargs`."
_RECORDED = "Token ids are in the record: export the session."
REFUSED_ROWS: tuple[Parameter, ...] = (
    only("modalities", ["text"], then="Text is all that the policy writes.", apis=CHAT),
    never("audio", "Text is all that the policy writes.", CHAT),
    never("prediction", "Leave it out: it would make the answer no faster here.", CHAT),
    never("web_search_options", "Give the model a search as one of its `tools`.", CHAT),
    never("moderation", "Moderate in the agent.", CHAT),
    only("suffix", "", then="Put what follows into the prompt.", apis=COMPLETIONS),
    never("guided_grammar", _GRAMMAR),
    never("ebnf", _GRAMMAR),
    never("structural_tag", _GRAMMAR),
    never("cache_salt", "Identical prompts share a cache; those who must not need other services."),
    never("chat_template", "The template is the model's; " + _TEMPLATE[0].lower() + _TEMPLATE[1:]),
    never("documents", "Put them into a message.", CHAT),
    only("separate_reasoning", True, then="It is in `reasoning_content`.", apis=CHAT),
    only("stream_reasoning", True, then="It comes as it is sampled.", apis=CHAT),
    only("include_reasoning", True, then="Leave it out where you read the answer.", apis=CHAT),
    only("add_generation_prompt", True, then="An answer is always a new message.", apis=CHAT),
    only("continue_final_message", False, then="Use `/v1/completions`.", apis=CHAT),
    only("ignore_eos", False, then="Ask for fewer tokens instead."),
    only("min_tokens", 0, then="The model decides when it is done."),
    only("skip_special_tokens", True, then=_RECORDED),
    only("spaces_between_special_tokens", True, then=_RECORDED),
    only("include_stop_str_in_output", False, then=_RECORDED),
    only("no_stop_trim", False, then=_RECORDED),
    only("return_token_ids", False, then=_RECORDED),
    only("return_tokens_as_token_ids", False, then=_RECORDED),
    only("return_hidden_states", False, then="Compute them from the recorded token ids."),
    never("prompt_logprobs", "Compute them from the recorded token ids."),
    never("truncate_prompt_tokens", "Send fewer messages."),
    only("bad_words", [], then="Use `logit_bias`."),
    only("allowed_token_ids", [], then="Use `logit_bias` or `guided_regex`."),
    never("logits_processors", "Use `logit_bias` or `guided_regex`."),
    only("use_beam_search", False, then="Use `n`."),
    only("length_penalty", 1, then="There is no beam search."),
    only("early_stopping", False, then="There is no beam search."),
)
