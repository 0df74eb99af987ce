"""The tokenizer in a GGUF file's metadata → ``tokenizer.json`` and ``tokenizer_config.json``.

Byte-level BPE ("gpt2") with the pre-tokenizers that can be rebuilt exactly. A pre-tokenizer is named only, not
described, in the file: one that is not known here is refused, because a guess would split some texts differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from app.errors import ModelError

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


@dataclass(frozen=True)
class _Scheme:
    pre_tokenizer: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    nfc: bool = False
    add_bos: bool = False
    """Where the file does not say."""


_LLAMA3 = _Scheme(lambda: _split(_LLAMA3_SPLIT), ignore_merges=True, add_bos=True)
_SCHEMES = {
    "gpt-2": _Scheme(_gpt2),
    "smollm": _Scheme(_smollm),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _Scheme(lambda: _split(_QWEN2_SPLIT), nfc=True),
}


@dataclass(frozen=True)
class GgufTokenizer:
    """``tokenizer`` is ready to save; ``config`` is the content of tokenizer_config.json."""

    tokenizer: Tokenizer
    config: dict[str, Any]
    bos_id: int | None
    eos_ids: list[int]


def build_tokenizer(metadata: dict[str, Any]) -> GgufTokenizer:
    """Build the tokenizer that ``metadata`` describes.

    Raises:
        ModelError: a tokenizer model or pre-tokenizer that cannot be rebuilt exactly, by name, or broken metadata.
    """
    scheme = _scheme(metadata)
    tokens, merges = _strings(metadata, "tokens"), _strings(metadata, "merges")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ModelError("tokenizer.ggml.tokens names a token twice")
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    if any(not left or not right or " " in right for left, right in pairs):
        raise ModelError("tokenizer.ggml.merges holds an entry that is not two tokens")
    try:
        tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=scheme.ignore_merges))
    except Exception as error:  # the library raises bare Exception, nothing narrower
        raise ModelError(f"tokenizer.ggml.merges does not fit tokenizer.ggml.tokens: {error}") from error
    if scheme.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = scheme.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    _add_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type"))

    bos_id = _token_id(metadata, "bos_token_id", tokens)
    eos_id = _token_id(metadata, "eos_token_id", tokens)
    ends = [_token_id(metadata, key, tokens) for key in ("eot_token_id", "eom_token_id")]
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", scheme.add_bos)) and bos_id is not None
    if add_bos and bos_id is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[tokens[bos_id], "$A"], pair=[tokens[bos_id], "$A", "$B"], special_tokens=[(tokens[bos_id], bos_id)]
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None if bos_id is None else tokens[bos_id],
        "eos_token": None if eos_id is None else tokens[eos_id],
        "add_bos_token": add_bos,
        "clean_up_tokenization_spaces": False,
    }
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    eos_ids = sorted({token_id for token_id in (eos_id, *ends) if token_id is not None})
    return GgufTokenizer(tokenizer, config, bos_id, eos_ids)


def _scheme(metadata: dict[str, Any]) -> _Scheme:
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    hint = "use the model's Hugging Face folder (config.json, tokenizer.json, *.safetensors) instead"
    if model != "gpt2":
        raise ModelError(f"GGUF tokenizer model {model!r} is not supported; supported: 'gpt2'; {hint}")
    if pre not in _SCHEMES:
        raise ModelError(f"GGUF pre-tokenizer {pre!r} is not supported; supported: {', '.join(_SCHEMES)}; {hint}")
    return _SCHEMES[pre]


def _strings(metadata: dict[str, Any], key: str) -> list[str]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ModelError(f"the GGUF file has no tokenizer.ggml.{key}")
    return value


def _add_tokens(tokenizer: Tokenizer, tokens: list[str], types: Any) -> None:
    """Tokens that are matched as they are, before any splitting."""
    if types is None:
        return
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ModelError("tokenizer.ggml.token_type does not fit tokenizer.ggml.tokens")
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _token_id(metadata: dict[str, Any], key: str, tokens: list[str]) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if value is not None and not (isinstance(value, int) and 0 <= value < len(tokens)):
        raise ModelError(f"tokenizer.ggml.{key} is {value!r}, the vocabulary has {len(tokens)} tokens")
    return value
