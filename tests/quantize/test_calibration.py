"""Calibration text: the built-in one, and users' files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from exlm import Config, InputError, MissingExtra, Tokenizer
from exlm.checkpoint import SafetensorsCheckpoint
from exlm.quantize import calibration
from exlm.quantize.calibration import make_calibration_ids
from exlm.quantize.evaluate import _ids_from_file, held_out_ids
from exlm.quantize.layer_loader import KVBuffer, layer_loader, make_batch
from exlm.quantize.options import QuantizeOptions, parse_size
from exlm.spec.model import matrices
from tests import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.make_chat_folder(tmp_path_factory.mktemp("reader"))


def test_calibration_and_held_out_text_share_no_paragraph() -> None:
    used, kept = ("\n\n".join(calibration.builtin_texts(held_out=x)).split("\n\n") for x in (False, True))
    assert not set(used) & set(kept)
    assert sum(map(len, used)) > 280_000
    assert 40_000 < sum(map(len, kept)) < sum(map(len, used)) / 3
    all_text = "".join(used)
    for words in ("def ", "Straße", "école", "¿", "的", "ます", "что", "\\int"):
        assert words.lower() in all_text.lower()


def test_text_and_json_lines_are_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("plain ¡text!", encoding="utf-8")
    lines = [{"text": "one"}, {"messages": [{"role": "user", "content": "two"}]}, "three", {"odd": 4}]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert list(calibration.read_documents(tmp_path / "a.txt")) == ["plain ¡text!"]
    assert list(calibration.read_documents(tmp_path / "b.jsonl")) == ["one", "two", "three", "4"]
    (tmp_path / "c.csv").write_text("x")
    with pytest.raises(InputError, match=r"\.parquet"):
        list(calibration.read_documents(tmp_path / "c.csv"))


def test_json_variants_are_read(folder: Path, tmp_path: Path) -> None:
    records = [{"text": "one"}, {"text": "Käse"}]
    path = tmp_path / "indented.json"
    path.write_text(json.dumps(records, indent=2))
    assert list(calibration.read_documents(path)) == ["one\nKäse"]
    path.write_text("\n".join(map(json.dumps, records)))
    assert list(calibration.read_documents(path)) == ["one", "Käse"]
    path.write_text("[1,\n2")
    with pytest.raises(InputError, match=r"indented\.json, line 1: not JSON"):
        list(calibration.read_documents(path))
    path = tmp_path / "marked.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(records[0]).encode())
    assert list(calibration.read_documents(path)) == ["one"]
    path.write_text('{"text": "cut \\ud83d and whole \\ud83d\\ude00"}')
    found = list(calibration.read_documents(path))
    assert found == ["cut \ufffd and whole 😀"]
    assert Tokenizer(Config(folder)).encode(found[0]).shape[1] > 10


@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_unreadable_files_are_named(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / f"odd.{kind}"
    path.write_bytes('{"text": "Käse"}\n'.encode("latin-1"))
    with pytest.raises(InputError, match=rf"odd\.{kind}: not UTF-8 text"):
        list(calibration.read_documents(path))

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(InputError, match=rf"odd\.{kind}: cannot be read \(Permission denied\)"):
        list(calibration.read_documents(path))


def test_parquet_is_read_or_the_missing_package_named(tmp_path: Path) -> None:
    path = tmp_path / "d.parquet"
    if find_spec("pyarrow") is None:
        path.write_bytes(b"")
        with pytest.raises(MissingExtra, match="pip install pyarrow"):
            list(calibration.read_documents(path))
        pytest.skip("pyarrow is not installed: no table was read")
    import pyarrow
    import pyarrow.parquet

    conversations = [[{"role": "user", "content": "three"}], None]
    table = pyarrow.table({"text": ["one", "two"], "messages": conversations, "id": [1, 2]})
    pyarrow.parquet.write_table(table, path)
    assert list(calibration.read_documents(path)) == ["one\nthree", "two"]
    path.write_bytes(b"PAR1 but no table")
    with pytest.raises(InputError, match=r"d\.parquet: not a Parquet file"):
        list(calibration.read_documents(path))


def test_rows_have_full_length_and_begin_with_bos(folder: Path) -> None:
    tokenizer = Tokenizer(Config(folder))
    rows = calibration.rows_from_texts(["x" * 3000, "y" * 500], tokenizer, 4, 600)
    assert rows.shape == (4, 600)
    assert int(rows[0, 0]) == 1
    with pytest.raises(InputError, match="has 6:"):
        calibration.rows_from_texts(["short"], tokenizer, 4, 600)


@pytest.mark.parametrize(("family", "every"), [("Gemma", True), ("Llama", False)])
def test_bos_is_prepended_to_every_row_where_the_model_requires_it(family: str, every: bool, tmp_path: Path) -> None:
    folder = tiny.make_chat_folder(tmp_path / "m", architectures=[f"{family}ForCausalLM"], head_dim=8)
    config = Config(folder)
    tokenizer = Tokenizer(config)
    rows = calibration.rows_from_texts(["x" * 3000], tokenizer, 4, 100)
    found = calibration.prepend_bos(rows, config, tokenizer)
    assert found[0].equal(rows[0]), "it has one already"
    assert found[1].tolist() == ([1, *rows[1, :-1].tolist()] if every else rows[1].tolist())
    (tmp_path / "text.txt").write_text("x" * 3000)
    quant_config = QuantizeOptions(bits=4.0, calibration=str(tmp_path / "text.txt"), rows=4, length=100)
    frozen = config.freeze()
    loader = layer_loader(frozen, SafetensorsCheckpoint(folder, frozen.spec.names), 100, torch.device("cpu"))
    assert make_calibration_ids(config, quant_config, loader).equal(found)
    assert bool((held_out_ids(folder)[:, 0] == 1).all()) is every
    assert bool((_ids_from_file(folder, tmp_path / "text.txt", 4, 100)[:, 0] == 1).all()) is every


def test_reading_stops_at_the_minimum_of_tokens(folder: Path) -> None:
    read = []

    def texts() -> Iterator[str]:
        for i in range(100):
            read.append(i)
            yield "x" * 99

    assert calibration.rows_from_texts(texts(), Tokenizer(Config(folder)), 1, 512).shape == (1, 512)
    assert len(read) == 21  # as many as make 2,048 tokens


def test_only_the_needed_prefix_of_a_long_text_is_tokenized(
    fixtures_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens are those of the whole text, and memory does not grow with the unread rest."""
    tokenizer = Tokenizer(Config(fixtures_dir / "tiny-lm"))
    text = "".join(f"Ship {n} left at {n % 24}:00 for the {n * 7 % 31}th harbour; " for n in range(30_000))
    all_ids = tokenizer.encode(text, add_bos=tokenizer.bos_token_id is not None)[0]
    sizes: list[int] = []
    encode = Tokenizer.encode

    def record_size(self: Tokenizer, text: str, **options: Any) -> torch.Tensor:
        sizes.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", record_size)
    for characters in (16, 1):  # enough at once, or not
        monkeypatch.setattr(calibration, "CHARS_PER_TOKEN", characters)
        sizes.clear()
        rows = calibration.rows_from_texts([text], tokenizer, 40, 64)
        assert torch.equal(rows.flatten(), all_ids[: 40 * 64])
        assert max(sizes) < len(text) // 10
        assert (len(sizes) > 1) == (characters == 1)


def test_sampled_rows_are_repeatable_and_continue_their_prompts(folder: Path) -> None:
    frozen = Config(folder).freeze()
    loader = layer_loader(frozen, SafetensorsCheckpoint(folder, frozen.spec.names), 24, torch.device("cpu"))
    prompts = calibration.sample_prompts(torch.arange(3, 67).view(2, 32), 3, None)
    first = calibration.sample_rows(loader, prompts, 24, [2], 7)
    assert first.shape == (3, 24)
    assert torch.equal(first[:, :8], prompts)
    assert len(set(prompts[:, 1].tolist())) == 3  # distinct prompts
    assert not bool((first[:, 8:] == 2).any())  # EOS is banned
    assert torch.equal(first, calibration.sample_rows(loader, prompts, 24, [2], 7))
    assert not torch.equal(first, calibration.sample_rows(loader, prompts, 24, [2], 8))
    assert calibration.sample_prompts(first, 5, 1).tolist() == 5 * [[1]]
    assert calibration.sample_prompts(torch.arange(3, 13).view(2, 5), 3, None).tolist()[2] == [3, 4, 5, 6, 7]


def test_kv_buffer_equals_one_forward_pass(folder: Path) -> None:
    frozen = Config(folder).freeze()
    loader = layer_loader(frozen, SafetensorsCheckpoint(folder, frozen.spec.names), 24, torch.device("cpu"))
    decoder = list(loader.build())[-1]
    ids, layers = torch.randint(3, 250, (2, 12)), [KVBuffer(12) for _ in decoder.blocks]
    parts = [decoder.forward(make_batch(ids[:, a:b], a), layers)[0] for a, b in ((0, 5), (5, 6), (6, 12))]
    one_pass = decoder.forward(make_batch(ids), [KVBuffer(12) for _ in decoder.blocks])[0]
    torch.testing.assert_close(torch.cat([p for p in parts if p is not None], 1), one_pass)


def test_parse_size() -> None:
    assert parse_size("5.2GB") == 5_200_000_000
    assert parse_size("800 MiB") == 800 * 2**20
    assert parse_size("12345") == 12345
    for text in ("", "GB", "-1GB", "1TB?"):
        with pytest.raises(InputError):
            parse_size(text)


def test_fingerprint_tells_configs_apart() -> None:
    assert QuantizeOptions(bits=4.0).fingerprint() != QuantizeOptions(bits=4.0, seed=2).fingerprint()


def test_fewer_default_rows_for_large_models_on_a_cpu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Config(folder).spec
    weights = sum(m.in_features * m.out_features for m in matrices(model))
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    found = []
    for rows in (1000, 77, 5):
        monkeypatch.setattr(calibration, "CPU_WEIGHT_ROWS", rows * weights)
        found.append((calibration.default_rows(model, cpu), calibration.default_rows(model, cuda)))
    assert found == [(128, 128), (77, 128), (48, 128)]


@pytest.mark.parametrize("rows", [1, 8, 20, 128, 10**6])
def test_every_kind_of_built_in_text_gives_the_same_number_of_rows(folder: Path, rows: int) -> None:
    tokenizer = Tokenizer(Config(folder))
    bos = tokenizer.bos_token_id is not None
    texts = [tokenizer.encode(text, add_bos=bos)[0] for text in calibration.builtin_texts()]
    kinds = [{tuple(row.tolist()) for row in ids[: len(ids) // 512 * 512].view(-1, 512)} for ids in texts]
    found = {tuple(row.tolist()) for row in calibration.builtin_rows(tokenizer, rows, 512)}
    assert len(found) == min(rows, sum(map(len, kinds)))
    counts = [len(found & kind) for kind in kinds]
    full = [count == len(kind) for count, kind in zip(counts, kinds, strict=True)]
    open_ = [count for count, all_ in zip(counts, full, strict=True) if not all_]
    assert max(open_, default=0) - min(open_, default=0) <= 1


def test_rows_longer_than_one_kind_of_text_span_several(folder: Path) -> None:
    tokenizer = Tokenizer(Config(folder))
    assert calibration.builtin_rows(tokenizer, 2, 60_000).shape == (2, 60_000)
    with pytest.raises(InputError, match="at least 9,000,000 tokens"):
        calibration.builtin_rows(tokenizer, 2, 9_000_000)
