"""Tokenizer: the calls, attributes and shapes that scripts and integrations rely on."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from exlm.errors import ChatTemplateError, InputError, TokenizerError, TokenizerNotFound
from exlm.tokenizer import Tokenizer
from exlm.tokenizer.hf import HFBackend
from exlm.tokenizer.sentencepiece import SentencePieceBackend
from tests.tokenizer.sample_vocabularies import (
    byte_level_json,
    fake_config,
    metaspace_json,
    mistral_v1_model,
    write_folder,
)

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{{ extra }}{% endif %}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with a small tokenizer and a chat template."""
    settings = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    return write_folder(tmp_path, tokenizer=byte_level_json(), tokenizer_config=settings)


@pytest.fixture
def ours(folder: Path) -> Tokenizer:
    return Tokenizer(
        fake_config(folder, bos_token_id=0, eos_token_id=2, eos_token_ids=[2], pad_token_id=0, vocab_size=640)
    )


@pytest.fixture
def tiny(fixtures_dir: Path) -> Tokenizer:
    """The fixture's tokenizer."""
    path = fixtures_dir / "tiny-lm"
    return Tokenizer(
        fake_config(path, bos_token_id=0, eos_token_id=2, eos_token_ids=[2], pad_token_id=0, vocab_size=2048)
    )


def test_encodes_as_the_reference_does(tiny: Tokenizer, fixtures_dir: Path) -> None:
    cases = json.loads((fixtures_dir / "reference" / "tokenizer_cases.json").read_text(encoding="utf-8"))
    for case in cases:
        ids = tiny.encode(case["text"], encode_special_tokens=True)
        assert (ids.dtype, ids.shape[0], ids[0].tolist()) == (torch.long, 1, case["ids_special"])
        begun = tiny.encode(case["text"], encode_special_tokens=True, add_bos=True)
        assert begun[0].tolist() == case["ids_bos"]
        assert tiny.decode(tiny.encode(case["text"])) == [case["text"]]


def test_a_draft_model_of_another_vocabulary_is_refused(ours: Tokenizer, tiny: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"another vocabulary, of 2,048 tokens; the model's has \d+, and"):
        ours.check_draft(tiny.config)
    with pytest.raises(InputError, match=r"another vocabulary, of \d+ tokens; the model's has 2,048"):
        tiny.check_draft(ours.config)
    ours.check_draft(ours.config)
    more = json.loads(byte_level_json())
    more["added_tokens"].append({**more["added_tokens"][-1], "id": 600, "content": "<|more|>"})
    larger = write_folder(tmp_path / "larger", tokenizer=json.dumps(more))
    ours.check_draft(fake_config(larger, vocab_size=700))
    (tmp_path / "none").mkdir()
    ours.check_draft(fake_config(tmp_path / "none", vocab_size=640))  # says nothing of its tokens


def test_knows_its_special_tokens(ours: Tokenizer) -> None:
    assert (ours.bos_token_id, ours.eos_token_id, ours.pad_token_id, ours.unk_token_id) == (0, 2, 0, None)
    assert (ours.bos_token, ours.eos_token, ours.unk_token, ours.pad_token) == (
        "<|endoftext|>",
        "<|im_end|>",
        "",
        "",
    )
    assert ours.eos_token_ids == [2]
    assert ours.extended_piece_to_id == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert ours.extended_id_to_piece == {0: "<|endoftext|>", 1: "<|im_start|>", 2: "<|im_end|>"}
    assert ours.unspecial_piece_to_id == {}, "<tool_call> is decoded right anyway"
    assert (ours.newline_token, ours.space_token) == ("\n", " ")
    pieces = ours.get_id_to_piece_list()
    assert ours.newline_token_id is not None
    assert pieces[ours.newline_token_id] == "\n"
    assert ours.space_token_id is not None
    assert pieces[ours.space_token_id] == " "
    assert ours.actual_vocab_size == ours.get_vocab_size() == len(pieces)
    assert ours.tokenizer_config_dict is not None
    assert "chat_template" in ours.tokenizer_config_dict


def test_all_ids_that_end_a_text_are_known(folder: Path) -> None:
    write_folder(folder, generation_config={"eos_token_id": [2, 1]})
    made = Tokenizer(fake_config(folder, eos_token_id=0, eos_token_ids=[0, 5]))
    assert (made.eos_token_id, made.eos_token_ids) == (0, [0, 5, 2, 1])


def test_special_token_ids_can_be_assigned(ours: Tokenizer) -> None:
    hello = ours.encode("hello")[0].tolist()
    assert ours.decode(torch.tensor([[*hello, 300]])) != ["hello"]
    ours.bos_token_id, ours.eos_token_id, ours.pad_token_id = 7, 300, 1
    assert (ours.bos_token_id, ours.eos_token_id, ours.eos_token_ids, ours.pad_token_id) == (7, 300, [300], 1)
    assert ours.encode("hello", add_bos=True, add_eos=True)[0].tolist() == [7, *hello, 300]
    assert ours.encode(["hello", ""])[1].tolist() == [1] * len(hello)
    assert ours.decode(torch.tensor([[1, *hello, 300]])) == ["hello"]
    ours.eos_token_ids = [2, 300]
    assert (ours.eos_token_id, ours.eos_token_ids) == (2, [2, 300])
    ours.bos_token_id = ours.eos_token_id = ours.pad_token_id = None  # type: ignore[assignment]
    assert (ours.bos_token_id, ours.eos_token_id, ours.eos_token_ids, ours.pad_token_id) == (
        None,
        None,
        [],
        -1,
    )
    assert ours.encode("hello", add_bos=True, add_eos=True)[0].tolist() == hello
    for wrong in ("</s>", True, [2]):
        bad: Any = wrong
        with pytest.raises(TokenizerError, match="eos_token_id must be a token's id, or None; found"):
            ours.eos_token_id = bad


def test_shapes_of_encoding(ours: Tokenizer) -> None:
    assert ours.encode("").shape == (1, 0)
    assert ours.encode("").dtype == torch.long
    assert ours.encode([]).shape == (0, 0)
    ids, offsets = ours.encode(["", "hello there", "x"], add_bos=True, return_offsets=True)
    assert ids.dtype == torch.long
    assert offsets.dtype == torch.int32
    longest = ids.shape[1]
    assert longest == 1 + ours.num_tokens("hello there")
    assert offsets.tolist() == [1 - longest, 0, 2 - longest]
    assert ids[0].tolist() == [0] * longest
    assert ids[2, -1].item() == ours.encode("x")[0, 0].item()
    assert ours.encode(["", "x"]).dtype == torch.long
    one, offset = ours.encode("x", return_offsets=True)
    assert (one.shape, offset.tolist()) == ((1, 1), [0])
    with pytest.raises(TokenizerError, match="found int"):
        ours.encode(5)  # type: ignore[call-overload]
    assert ours.encode("x", True, True)[0].tolist() == [0, *one[0].tolist(), 2]


def test_padding_is_masked(ours: Tokenizer) -> None:
    ids = ours.encode(["x", "hello there"])
    mask = ours.padding_mask(ids)
    assert mask.dtype == torch.half
    assert mask.shape == ids.shape
    assert torch.equal(torch.isinf(mask), ids == 0)
    assert mask[1].abs().max() == 0


def test_special_text_is_text_unless_asked(ours: Tokenizer) -> None:
    text = "<|im_start|>user\nHello<|im_end|>\n"
    asked = ours.encode(text, encode_special_tokens=True)
    plain = ours.encode(text)
    assert asked[0, 0] == 1
    assert not set(plain[0].tolist()) & {0, 1, 2}
    assert ours.decode(plain) == [text]
    assert ours.decode(asked) == ["user\nHello\n"]
    assert ours.decode(asked, decode_special_tokens=True) == [text]
    assert ours.encode_special(text) == asked[0].tolist()
    assert ours.encode_unspecial(text) == plain[0].tolist()
    assert ours.decode_unspecial(asked[0].tolist()) == "user\nHello\n"


def test_unparsed_special_text_is_warned_of_once(ours: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    ours.encode(["hello", "a < b"])
    ours.encode("<|im_start|>user", encode_special_tokens=True)
    assert not caplog.records
    for _ in range(2):
        ours.encode(["hello", "<|im_start|>user\nhello<|im_end|>"])
    (record,) = caplog.records
    assert "'<|im_start|>', which is taken for plain text" in record.getMessage()
    assert "encode_special_tokens=True" in record.getMessage()


def test_shapes_of_decoding(ours: Tokenizer) -> None:
    ids = ours.encode("hello")
    assert ours.decode(ids[0]) == "hello"
    assert ours.decode(ids) == ["hello"]
    assert ours.decode([ids[0], ids]) == ["hello", ["hello"]]
    assert ours.decode(torch.tensor([-5, 10**9, 2, 0])) == ""
    assert ours.decode(torch.zeros((2, 0), dtype=torch.long)) == ["", ""]
    for wrong in ("abc", 5, torch.zeros((1, 1, 1), dtype=torch.long)):
        with pytest.raises(TokenizerError, match="ids must be Tensor"):
            ours.decode(wrong)  # type: ignore[arg-type]


def test_single_tokens(ours: Tokenizer) -> None:
    assert ours.single_token(7).tolist() == [[7]]
    assert ours.single_id("<|im_end|>") == 2
    assert ours.single_id("<tool_call>") == ours.actual_vocab_size - 1
    number = ours.single_id(" the")
    assert number is not None
    assert number == ours.single_id("\u0120the")
    assert ours.single_id("no such piece") is None
    assert ours.single_id("") is None


def test_a_hundred_strings_are_cached(ours: Tokenizer) -> None:
    first = ours.cached_encode_str("0")
    assert ours.cached_encode_str("0") is first
    for n in range(100):
        ours.cached_encode_str(f"text {n}")
    again = ours.cached_encode_str("0")
    assert again is not first
    assert torch.equal(again, first)


def test_lookup_tables(ours: Tokenizer) -> None:
    assert ours.id_to_piece is None
    assert ours.char_trie is None
    ours.build_tables()
    assert ours.id_to_piece is ours.get_id_to_piece_list()
    assert ours.get_id_to_piece_list(True)[1] == "<|im_start|>"
    assert ours.get_id_to_piece_list()[1] == ""
    assert ours.get_id_to_ord_list()[ours.single_id("A") or 0] == 65
    assert ours.get_piece_to_id_dict()["A"] == ours.single_id("A")
    space = ours.space_token_id
    assert space is not None
    healing = ours.get_prefix_id_to_ids_dict()
    assert healing[space] == ours.get_prefix_to_ids_dict()[" "]
    assert ours.single_id(" the") in healing[space]
    assert set(healing) == set(range(640))
    assert healing[1] == [1]
    assert healing[639] == [639]
    assert isinstance(ours.get_char_trie(), Tokenizer.Trie)
    assert (
        ours.single_id(" the") in ours.get_char_trie_ci().children[" "].children["t"].children["h"].children["e"].leaf
    )


def test_lazy_or_not(folder: Path) -> None:
    assert Tokenizer(fake_config(folder), lazy_init=False).char_trie_ci is not None
    assert Tokenizer(fake_config(folder)).char_trie_ci is None


def test_the_class_has_the_attributes_that_integrations_set() -> None:
    for name in (
        "unspecial_piece_to_id",
        "unspecial_id_to_piece",
        "extended_piece_to_id",
        "extended_id_to_piece",
    ):
        assert dict(getattr(Tokenizer, name)) == {}
    for name in ("id_to_piece", "id_to_piece_with_special", "id_to_ord", "piece_to_id", "prefix_to_ids"):
        assert getattr(Tokenizer, name) is None
    for name in ("prefix_id_to_ids", "char_trie", "char_trie_ci"):
        assert getattr(Tokenizer, name) is None


@pytest.mark.parametrize("kind", ["json", "spm"])
def test_the_backend_is_what_integrations_expect(tmp_path: Path, kind: str) -> None:
    write_folder(tmp_path, tokenizer=metaspace_json())
    (tmp_path / "tokenizer.model").write_bytes(mistral_v1_model().read_bytes())
    made = Tokenizer(fake_config(tmp_path), force_spm=kind == "spm", force_json=kind == "json")
    model = made.tokenizer_model
    assert made.tokenizer is model
    assert isinstance(model, SentencePieceBackend if kind == "spm" else HFBackend)
    assert model.vocab_size() == 32000
    assert hasattr(model, "vocab")
    vocabulary = {model.id_to_piece(n): n for n in range(model.vocab_size())}
    assert vocabulary["\u2581the"] == model.piece_to_id("\u2581the") == made.single_id(" the")
    assert model.piece_to_id("no such piece") is None
    assert model.decode(model.encode("Hello world")) == "Hello world"
    assert dict(model.enumerate_tokens())[made.single_id(" the") or 0] == " the"
    assert (made.bos_token, made.eos_token, made.unk_token, made.unk_token_id) == ("<s>", "</s>", "<unk>", 0)


def embedding(alias: str, first: int, length: int) -> Any:
    return SimpleNamespace(text_alias=alias, get_ids=lambda: list(range(first, first + length)))


def test_embeddings_are_found_by_their_aliases(ours: Tokenizer) -> None:
    picture = embedding("<$EMB_1000000000$>", 10**9, 3)
    ids = ours.encode("a<$EMB_1000000000$>b", add_bos=True, embeddings=[picture])
    assert ids.dtype == torch.long
    assert ids[0, 2:5].tolist() == [10**9, 10**9 + 1, 10**9 + 2]
    assert ours.decode(ids) == ["ab"]


def test_chat(ours: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    text = "<|endoftext|><|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert ours.has_chat_template
    assert ours.chat_template == TEMPLATE
    assert ours.apply_chat_template(messages, add_generation_prompt=False) == text
    assert ours.apply_chat_template(messages, extra="!") == text + "<|im_start|>assistant\n!"
    ids = ours.apply_chat_template(messages, tokenize=True)
    assert ids.shape[0] == 1
    assert ids[0, :2].tolist() == [0, 1]
    assert torch.equal(ids, ours.encode(text + "<|im_start|>assistant\n", encode_special_tokens=True))
    assert torch.equal(ours.apply_chat_template(messages, tokenize=True, add_bos=True), ids), "one BOS is enough"
    bare = ours.apply_chat_template(messages, tokenize=True, add_bos=True, chat_template="x")
    assert bare[0].tolist() == [0, *ours.encode("x")[0].tolist()]
    with pytest.raises(TokenizerError, match="add_bos"):
        ours.apply_chat_template(messages, add_bos=True)


def test_chat_without_a_template_is_refused(tmp_path: Path) -> None:
    write_folder(tmp_path, tokenizer=byte_level_json())
    made = Tokenizer(fake_config(tmp_path))
    assert not made.has_chat_template
    assert made.chat_template is None
    with pytest.raises(ChatTemplateError, match="has no chat template"):
        made.apply_chat_template([{"role": "user", "content": "Hi"}])


def test_detokenizer(ours: Tokenizer) -> None:
    ids = ours.encode("<|im_start|>h\u00e9", encode_special_tokens=True)[0].tolist()
    stream = ours.detokenizer(decode_special_tokens=True)
    assert stream.feed(ids) + stream.flush() == "<|im_start|>h\u00e9"


def test_text_is_not_decoded(ours: Tokenizer) -> None:
    with pytest.raises(AssertionError, match="ids must be Tensor"):  # as old scripts expect it
        ours.decode("abc")  # type: ignore[arg-type]


def test_invalid_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TokenizerNotFound, match="No supported tokenizer found"):
        Tokenizer(fake_config(tmp_path))
    with pytest.raises(TokenizerError, match="exclude each other"):
        Tokenizer(fake_config(tmp_path), force_json=True, force_spm=True)
    nowhere = fake_config(tmp_path)
    nowhere.model_dir = None
    with pytest.raises(TokenizerError, match="no model_dir"):
        Tokenizer(nowhere)
    path: Any = "/path/to/model"
    with pytest.raises(TokenizerError, match=r"for a Config\('/path/to/model'\), found a str that has no model_dir"):
        Tokenizer(path)
