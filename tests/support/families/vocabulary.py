"""A small byte-level BPE, trained here: nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from tests.support.families.spec import Spec

MERGES = 320
_TEXT = (
    "the weather in Paris is sunny and the sum of the two numbers is what you asked for",
    "I will call the tool now, then I will think about the answer and tell you the result",
    '{"name": "add", "arguments": {"a": 1, "b": 2}} {"name": "find", "parameters": {"q": "x"}}',
    '{"type": "function", "function": {"name": "get", "description": "", "parameters": {}}}',
    '{"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}',
    "system user assistant tool function observation analysis commentary final developer",
    "You may call one or more functions to assist with the user query.\n\nRespond with JSON.\n",
    "<think>\nLet me see. The user wants a number.\n</think>\n\nThe answer is forty-two.\n\n",
    "café naïve größer 你好 世界 мир 🙂 ünïcödé ```json\n```\n",
)


def make_tokenizer(spec: Spec) -> PreTrainedTokenizerFast:
    """About 600 tokens: the bytes, ``MERGES`` merges and the family's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES + len(spec.specials),
        special_tokens=list(spec.specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(_TEXT * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=spec.ends[0],
        pad_token=spec.ends[-1],
        bos_token=spec.bos,
        additional_special_tokens=list(spec.specials),
    )
    tokenizer.chat_template = spec.template
    return tokenizer
