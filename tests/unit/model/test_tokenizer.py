import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Inner

from app.errors import InvalidRequest, ModelError
from app.model.gguf_tokenizer import build_tokenizer
from app.model.tokenizer import Tokenizer
from tests.unit.model.conftest import TOKENS, tiny_tokenizer

REFERENCE = Path(__file__).parents[2] / "references" / "greedy_reference.json"
START = TOKENS.index("<|start|>")


@pytest.mark.model
def test_the_default_model_encodes_and_decodes_as_the_reference(default_model):
    tokenizer = default_model.tokenizer()
    cases = json.loads(REFERENCE.read_text())
    assert len(cases) == 11
    for case in cases:
        if case["kind"] == "raw":
            assert tokenizer.encode(case["prompt"]) == case["prompt_ids"]
        assert tokenizer.decode(case["output_ids"]) == case["text"]
    assert tokenizer.vocab_size == 49152
    assert tokenizer.special_ids == frozenset(range(17))


@pytest.mark.model
def test_token_bytes_joined_are_the_text(default_model):
    tokenizer = default_model.tokenizer()
    text = "Grüße, 世界! 🏃\u200d♀️ passes the baton\n\t§ 12345"
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text


def test_special_tokens_in_the_text_become_their_ids():
    tokenizer = Tokenizer(tiny_tokenizer())
    assert tokenizer.encode("<|start|>he<|stop|>") == [START, TOKENS.index("he"), TOKENS.index("<|stop|>")]
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.decode([START, TOKENS.index("he")]) == "he"
    assert tokenizer.decode([START, TOKENS.index("he")], skip_special_tokens=False) == "<|start|>he"


def test_bos_is_put_in_front_where_the_model_wants_it_and_never_twice():
    he = TOKENS.index("he")
    with_bos = Tokenizer(tiny_tokenizer(), bos_token="<|start|>", add_bos=True)
    assert with_bos.encode("he") == [START, he]
    assert with_bos.encode("<|start|>he") == [START, he]
    assert with_bos.encode("he", add_special_tokens=False) == [he]
    assert with_bos.encode("") == [START]

    inner = tiny_tokenizer()
    inner.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", START)])
    by_file = Tokenizer(Inner.from_str(inner.to_str()), bos_token="<|start|>")
    assert by_file.encode("he") == [START, he]
    assert by_file.encode("<|start|>he") == [START, he]
    assert by_file.encode("he", add_special_tokens=False) == [he]
    overruled = Tokenizer(inner, bos_token="<|start|>", add_bos=False)
    assert overruled.encode("he") == [he]

    with pytest.raises(ModelError, match="<s>"):
        Tokenizer(tiny_tokenizer(), bos_token="<s>", add_bos=True)


def test_truncation_and_padding_in_the_file_are_ignored():
    inner = tiny_tokenizer()
    inner.enable_truncation(max_length=2)
    inner.enable_padding(length=10)
    assert len(Tokenizer(inner).encode("he he he he")) == 7


def test_half_a_surrogate_pair_is_a_bad_request():
    with pytest.raises(InvalidRequest, match="character 2"):
        Tokenizer(tiny_tokenizer()).encode("he\ud83d")


def test_ids_outside_the_vocabulary_add_nothing():
    tokenizer = Tokenizer(tiny_tokenizer())
    he = TOKENS.index("he")
    assert tokenizer.decode([he, len(TOKENS) + 5, he]) == "hehe"
    assert tokenizer.token_bytes(len(TOKENS) + 5) == b""


def test_byte_fallback_tokens():
    vocab = {"<unk>": 0, "<0x0A>": 1, "<0xE2>": 2, "▁the": 3}
    inner = Inner(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(inner)
    assert [tokenizer.token_bytes(i) for i in range(4)] == [b"<unk>", b"\n", b"\xe2", b" the"]
    assert [tokenizer.is_byte_token(i) for i in range(4)] == [False, True, True, False]
    assert tokenizer.strip_left == 1


def test_other_decoders_are_refused_by_name():
    inner = tiny_tokenizer()
    inner.decoder = decoders.WordPiece()
    with pytest.raises(ModelError, match="WordPiece"):
        Tokenizer(inner)


def metadata(pre, tokens=TOKENS, **more):
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": [],
        "tokenizer.ggml.bos_token_id": START,
        **more,
    }


SAMPLE = "I'LL pay 12345, é!\n\n  x"


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", ",", " é", "!", "\n\n ", " x"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", ",", " é", "!", "\n\n ", " x"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", ",", " é", "!\n\n", " ", " x"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", ",", " é", "!\n\n", " ", " x"]),
    ],
)
def test_pre_tokenizers_split_by_the_rules_of_their_models(pre, pieces):
    """The expected pieces were split by hand from each model's published pattern."""
    tokenizer = build_tokenizer(metadata(pre)).tokenizer
    split = [SAMPLE[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(SAMPLE)]
    assert split == pieces


def test_only_llama_3_starts_with_bos_unless_the_file_says_otherwise():
    for pre, expected in {"gpt-2": False, "smollm": False, "qwen2": False, "llama-bpe": True, "llama3": True}.items():
        assert build_tokenizer(metadata(pre)).config["add_bos_token"] is expected
        said = {"tokenizer.ggml.add_bos_token": not expected}
        assert build_tokenizer(metadata(pre, **said)).config["add_bos_token"] is not expected


def test_llama_3_takes_whole_words_of_the_vocabulary_without_merges():
    tokens = [*TOKENS, "Ġzebra"]
    assert build_tokenizer(metadata("llama-bpe", tokens)).tokenizer.encode(" zebra").ids == [START, len(TOKENS)]
    assert len(build_tokenizer(metadata("smollm", tokens)).tokenizer.encode(" zebra").ids) == 6


def test_control_tokens_are_special_and_user_defined_ones_are_not():
    kinds = [3, 3, 3] + [1] * (len(TOKENS) - 3)
    kinds[TOKENS.index("he")] = 4
    tokenizer = build_tokenizer(metadata("gpt-2", **{"tokenizer.ggml.token_type": kinds})).tokenizer
    added = tokenizer.get_added_tokens_decoder()
    assert {i for i, token in added.items() if token.special} == {0, 1, 2}
    assert added[TOKENS.index("he")] == AddedToken("he", special=False, normalized=False)
