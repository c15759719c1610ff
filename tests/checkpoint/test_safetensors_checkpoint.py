"""Reading by role: renamed, fused, transposed, stacked and quantised tensors of every dtype."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from exlm.checkpoint import SafetensorsCheckpoint, safetensors_checkpoint
from exlm.errors import BadFile, BadTensor, MissingTensor, Unsupported
from exlm.formats import DenseWeight
from exlm.formats.quantization_config import QuantizationConfig
from exlm.spec.tensor_names import LAYER_PREFIX, KeyRename, RowRange, TensorLocation, TensorNames
from tests.checkpoint.checkpoint_helpers import FLOATS, Q, open_checkpoint, read_tensor, read_weight
from tests.checkpoint.safetensors_bytes import same_bits, write_index, write_safetensors


@st.composite
def _row_ranges(draw: st.DrawFn) -> tuple[int, tuple[RowRange, ...]]:
    """A number of rows, and spans of them in any order that reach the last row."""
    total = draw(st.integers(1, 9))
    marks = sorted({0, total, *draw(st.lists(st.integers(0, total), max_size=4))})
    spans = draw(st.permutations(list(pairwise(marks))))
    some = tuple(spans[: draw(st.integers(1, len(spans)))])
    return total, some if any(stop == total for _, stop in some) else (*some, (marks[-2], total))


@given(
    cuts=_row_ranges(),
    k=st.integers(1, 6),
    stored=st.sampled_from(FLOATS),
    wanted=st.sampled_from(FLOATS),
    transposed=st.booleans(),
    bare=st.booleans(),
    bias=st.booleans(),
    chunk=st.integers(1, 40),
)
def test_rows_equal_sliced_tensors(
    tmp_path_factory: pytest.TempPathFactory,
    cuts: tuple[int, tuple[RowRange, ...]],
    k: int,
    stored: torch.dtype,
    wanted: torch.dtype,
    transposed: bool,
    bare: bool,
    bias: bool,
    chunk: int,
) -> None:
    total, spans = cuts
    full, offsets = torch.randn(total, k).to(stored), torch.randn(total).to(stored)
    key = "model.layers.2.self_attn.packed"
    tensors = {key if bare else f"{key}.weight": full.T.contiguous() if transposed else full, "x": full}
    if bias:
        tensors[f"{key}.bias"] = offsets
    place = TensorLocation(LAYER_PREFIX + "self_attn.packed", rows=spans, transposed=transposed, without_suffix=bare)
    checkpoint = open_checkpoint(tmp_path_factory.mktemp("m"), tensors, TensorNames().with_locations(attn__q=place))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_checkpoint, "COPY_CHUNK", chunk)
        n = sum(stop - start for start, stop in spans)
        weight = read_weight(checkpoint, "layers.2.attn.q", k, n, bias=bias, dtype=wanted)
    assert same_bits(weight.data, torch.cat([full[a:b] for a, b in spans]).to(wanted))
    assert weight.data.is_contiguous()
    if bias:
        assert weight.bias is not None
        assert same_bits(weight.bias, torch.cat([offsets[a:b] for a, b in spans]).to(wanted))
    else:
        assert weight.bias is None
    assert checkpoint.unused() == ["x"]
    assert checkpoint.describe("layers.2.attn.q")[1] == (n * k + n * bias) * full.element_size()


def test_the_copy_shares_no_memory_with_the_file(tmp_path: Path) -> None:
    data = torch.randn(4, 6)
    checkpoint = open_checkpoint(tmp_path, {f"{Q}.weight": data})
    read_weight(checkpoint, "layers.0.attn.q", 6, 4).data.zero_()
    assert same_bits(read_weight(checkpoint, "layers.0.attn.q", 6, 4).data, data)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts(tmp_path: Path, transposed: bool) -> None:
    experts, inner, hidden = 3, 4, 5
    stacked = torch.randn(experts * inner, hidden)
    place = TensorLocation(
        LAYER_PREFIX + "experts.w", rows_per_expert=inner, transposed=transposed, without_suffix=True
    )
    names = TensorNames().with_locations(mlp__experts__up=(TensorLocation(LAYER_PREFIX + "experts.{e}.w"), place))
    checkpoint = open_checkpoint(tmp_path, {"model.layers.1.experts.w": stacked}, names)
    for e in range(experts):
        part = stacked[e * inner : (e + 1) * inner]
        k, n = (inner, hidden) if transposed else (hidden, inner)
        weight = read_weight(checkpoint, f"layers.1.mlp.experts.{e}.up", k, n)
        assert same_bits(weight.data, part.T.contiguous() if transposed else part)
        assert checkpoint.describe(f"layers.1.mlp.experts.{e}.up") == ("dense float32", part.nbytes)
    with pytest.raises(BadTensor, match=r"experts\.w.*expected shape \[16, 5\].*found \[12, 5\]"):
        read_weight(checkpoint, f"layers.1.mlp.experts.{experts}.up", k, n)


@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts_of_two_parts(tmp_path: Path, transposed: bool) -> None:
    experts, inner, hidden = 3, 2, 5
    shape = (experts * hidden, 2 * inner) if transposed else (experts * 2 * inner, hidden)
    stacked, stack = torch.randn(shape), hidden if transposed else 2 * inner

    def part(*rows: RowRange) -> TensorLocation:
        return TensorLocation(
            LAYER_PREFIX + "experts.w",
            rows=rows,
            rows_per_expert=stack,
            transposed=transposed,
            without_suffix=True,
        )

    names = TensorNames().with_locations(mlp__experts__gate=part((0, inner)), mlp__experts__up=part((inner, 2 * inner)))
    checkpoint = open_checkpoint(tmp_path, {"model.layers.1.experts.w": stacked}, names)
    for e in range(experts):
        full = stacked[e * stack : (e + 1) * stack]
        gate, up = (full.T if transposed else full).split(inner)
        for role, data in (("gate", gate), ("up", up)):
            assert same_bits(read_weight(checkpoint, f"layers.1.mlp.experts.{e}.{role}", hidden, inner).data, data)
            assert checkpoint.describe(f"layers.1.mlp.experts.{e}.{role}")[1] == data.nbytes


def test_the_first_location_wins_over_the_format(tmp_path: Path) -> None:
    names = TensorNames().with_locations(
        attn__q=(
            TensorLocation(LAYER_PREFIX + "alone"),
            TensorLocation(LAYER_PREFIX + "packed", rows=((0, 2),)),
        )
    )
    alone, packed = torch.randn(2, 3), torch.randn(2, 3)
    both = open_checkpoint(
        tmp_path / "a", {"model.layers.0.packed.weight": packed, "model.layers.0.alone.weight": alone}, names
    )
    assert same_bits(read_weight(both, "layers.0.attn.q", 3, 2).data, alone)
    assert both.find("layers.0.attn.q") == TensorLocation("model.layers.0.alone")
    one = open_checkpoint(tmp_path / "b", {"model.layers.0.packed.weight": packed}, names)
    assert same_bits(read_weight(one, "layers.0.attn.q", 3, 2).data, packed)
    quantised = {"model.layers.0.packed.q_weight": packed, "model.layers.0.alone.weight": alone}
    assert same_bits(
        read_weight(open_checkpoint(tmp_path / "c", quantised, names), "layers.0.attn.q", 3, 2).data, alone
    )


def test_a_fused_tensor_must_be_as_long_as_its_parts(tmp_path: Path) -> None:
    names = TensorNames().with_locations(
        attn__q=TensorLocation(LAYER_PREFIX + "qkv", rows=((0, 4),)),
        attn__k=TensorLocation(LAYER_PREFIX + "qkv", rows=((4, 6),)),
        attn__v=TensorLocation(LAYER_PREFIX + "qkv", rows=((6, 8),)),
    )
    good = open_checkpoint(tmp_path / "good", {"model.layers.0.qkv.weight": torch.randn(8, 3)}, names)
    assert read_weight(good, "layers.0.attn.q", 3, 4).data.shape == (4, 3)
    long = open_checkpoint(tmp_path / "long", {"model.layers.0.qkv.weight": torch.randn(12, 3)}, names)
    with pytest.raises(BadTensor, match=r"'model\.layers\.0\.qkv\.weight': expected shape \[8, 3\] \(4 of 8 out"):
        read_weight(long, "layers.0.attn.q", 3, 4)
    with pytest.raises(BadTensor, match="2 of 8 outputs"):
        read_weight(good, "layers.0.attn.k", 3, 4)


def test_keys_are_renamed(tmp_path: Path) -> None:
    names = TensorNames(
        key_renames=(KeyRename("h.", "model.layers.", prefix_only=True), KeyRename(".attn.", ".self_attn."))
    )
    data = torch.randn(2, 3)
    checkpoint = open_checkpoint(tmp_path, {"h.7.attn.q_proj.weight": data, "h.x": data}, names)
    assert same_bits(read_weight(checkpoint, "layers.7.attn.q", 3, 2).data, data)
    assert checkpoint.unused() == ["h.x"]


def test_two_keys_for_one_role_are_refused(tmp_path: Path) -> None:
    names = TensorNames(key_renames=(KeyRename("old.", "model.", prefix_only=True),))
    with pytest.raises(BadFile, match=r"(?s)model\.norm\.weight.*old\.norm\.weight|old.*model\.norm") as caught:
        open_checkpoint(tmp_path, {"model.norm.weight": torch.ones(2), "old.norm.weight": torch.ones(2)}, names)
    assert "both stand for 'model.norm.weight'" in str(caught.value)


def test_a_tied_head(tmp_path: Path) -> None:
    embed, head = torch.randn(7, 3), torch.randn(7, 3)
    tied = open_checkpoint(tmp_path / "tied", {"model.embed_tokens.weight": embed})
    assert not tied.has("head")
    assert same_bits(read_weight(tied, "head", 3, 7, fallback="embed").data, embed)
    assert tied.describe("head", "embed") == ("dense float32", embed.nbytes)
    with pytest.raises(MissingTensor, match=r"head is missing: expected 'lm_head\.weight'.*tie_word_emb"):
        read_weight(tied, "head", 3, 7)
    own = open_checkpoint(tmp_path / "own", {"model.embed_tokens.weight": embed, "lm_head.weight": head})
    assert own.has("head")
    assert same_bits(read_weight(own, "head", 3, 7, fallback="embed").data, head)
    neither = open_checkpoint(tmp_path / "neither", {"x": embed})
    with pytest.raises(MissingTensor, match=r"'lm_head\.weight' or 'model\.embed_tokens\.weight'"):
        read_weight(neither, "head", 3, 7, fallback="embed")


def test_a_tied_head_with_a_bias_of_its_own(tmp_path: Path) -> None:
    tensors = {"model.embed_tokens.weight": torch.randn(7, 3), "lm_head.bias": torch.randn(7)}
    checkpoint = open_checkpoint(tmp_path, tensors)
    weight = read_weight(checkpoint, "head", 3, 7, bias=True, fallback="embed")
    assert weight.bias is not None
    assert same_bits(weight.bias, tensors["lm_head.bias"])
    with pytest.raises(BadTensor, match=r"lm_head\.bias"):
        read_weight(checkpoint, "head", 3, 7, fallback="embed")


@pytest.mark.parametrize("role", ["embed", "head"])
def test_a_padded_vocabulary_names_both_numbers(tmp_path: Path, role: str) -> None:
    key = {"embed": "model.embed_tokens.weight", "head": "lm_head.weight"}[role]
    checkpoint = open_checkpoint(tmp_path, {key: torch.randn(64, 3)})
    with pytest.raises(BadTensor, match=r"expected shape \[60, 3\].*found \[64, 3\]\. vocab_size.*64"):
        read_weight(checkpoint, role, 3, 60)
    with pytest.raises(BadTensor, match=r"expected shape \[60, 3\].*found \[64, 3\]\. vocab_size.*64"):
        read_tensor(checkpoint, role, (60, 3))


def test_a_wrong_width_does_not_blame_the_vocabulary(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {"model.embed_tokens.weight": torch.randn(64, 3)})
    with pytest.raises(BadTensor, match=r"expected shape \[64, 5\].*found \[64, 3\]\. config\.json describes"):
        read_tensor(checkpoint, "embed", (64, 5))


@pytest.mark.parametrize("shape", [(3, 2), (2, 4), (2,), (2, 3, 1), (), (6,), (0, 3)])
def test_a_matrix_of_a_wrong_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    checkpoint = open_checkpoint(tmp_path, {f"{Q}.weight": torch.zeros(shape)})
    with pytest.raises(BadTensor) as caught:
        read_weight(checkpoint, "layers.0.attn.q", 3, 2)
    for part in ("model.safetensors", f"{Q}.weight", "expected shape [2, 3]", f"found {list(shape)}"):
        assert part in str(caught.value)


class TestQuantised:
    """Quantised formats are recognised by the suffix of a tensor."""

    @pytest.mark.parametrize(
        ("suffix", "words"),
        [
            ("trellis", "EXL3"),
            ("weight_packed", "compressed-tensors"),
        ],
    )
    def test_it_is_refused_by_name(self, tmp_path: Path, suffix: str, words: str) -> None:
        tensors = {f"{Q}.{suffix}": torch.ones(4, 4, dtype=torch.int32), f"{Q}.scales": torch.ones(4).half()}
        checkpoint = open_checkpoint(tmp_path, tensors)
        assert checkpoint.has("layers.0.attn.q")
        with pytest.raises(Unsupported, match=rf"layers\.0\.attn\.q is stored as {words}, which this version cannot"):
            read_weight(checkpoint, "layers.0.attn.q", 4, 4)
        with pytest.raises(Unsupported, match=f"stored as {words}"):
            read_tensor(checkpoint, "layers.0.attn.q", (4, 4))
        described, size = checkpoint.describe("layers.0.attn.q")
        assert described.startswith(words)
        assert size == 64 + 8

    @pytest.mark.parametrize(
        ("dtype", "beside", "words"),
        [
            (torch.uint32, "biases", "found 'U32', as MLX stores it"),
            (torch.uint8, "weight.absmax", "found 'U8', as bitsandbytes stores it"),
            (torch.float8_e4m3fn, "weight_scale_inv", "found 'F8_E4M3', as 8-bit floats"),
            (torch.int8, "else", "found 'I8'"),
        ],
    )
    def test_a_foreign_format_named_weight_is_refused(
        self, tmp_path: Path, dtype: torch.dtype, beside: str, words: str
    ) -> None:
        tensors = {f"{Q}.weight": torch.ones(4, 4).to(dtype), f"{Q}.{beside}": torch.ones(4)}
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(BadTensor, match=rf"{words}[^.]*\. Take a GPTQ, AWQ, EXL2 or GGUF version"):
            read_weight(SafetensorsCheckpoint(tmp_path, TensorNames()), "layers.0.attn.q", 4, 4)

    @pytest.mark.parametrize("shape", [(), (2, 2), (0,)])
    @pytest.mark.parametrize(
        ("form", "odd", "beside"), [("exl2", "q_weight", "q_groups"), ("gptq", "qweight", "scales")]
    )
    def test_tensors_of_an_odd_rank_are_described_in_fewer_words(
        self, tmp_path: Path, form: str, odd: str, beside: str, shape: tuple[int, ...]
    ) -> None:
        for number, sizes in enumerate([(shape, (4,)), ((4, 4), shape), (shape, shape)]):
            tensors = {
                f"{Q}.{name}": torch.ones(size, dtype=torch.int16)
                for name, size in zip((odd, beside), sizes, strict=True)
            }
            checkpoint = open_checkpoint(tmp_path / str(number), tensors)
            words, size = checkpoint.describe("layers.0.attn.q")
            assert words.startswith(form)
            assert size == sum(tensor.nbytes for tensor in tensors.values())
            with pytest.raises(BadTensor, match=odd):
                read_weight(checkpoint, "layers.0.attn.q", 4, 4)

    def test_a_matrix_with_scaled_inputs_is_refused(self, tmp_path: Path) -> None:
        mlp = "model.layers.0.mlp"
        names = TensorNames().with_locations(mlp__down=TensorLocation(LAYER_PREFIX + "mlp.c_proj"))
        tensors = {f"{mlp}.c_proj.weight": torch.ones(4, 4), f"{mlp}.act.scales": torch.ones(4)}
        read_weight(open_checkpoint(tmp_path / "ones", tensors, names), "layers.0.mlp.down", 4, 4)
        tensors[f"{mlp}.act.scales"][2] = 1.5
        checkpoint = open_checkpoint(tmp_path / "scaled", tensors, names)
        for ask in (
            lambda: read_weight(checkpoint, "layers.0.mlp.down", 4, 4),
            lambda: checkpoint.refuse_scaled_inputs("layers.0.mlp.down"),
        ):
            with pytest.raises(Unsupported, match=r"act\.scales': the inputs of layers\.0\.mlp\.down are to be"):
                ask()
        checkpoint.refuse_scaled_inputs("layers.0.mlp.up")

    @pytest.mark.parametrize("bits", [2, 3, 4, 8])
    @pytest.mark.parametrize("bits_in_config", [False, True])
    def test_a_matrix_with_its_own_width_is_described(self, tmp_path: Path, bits: int, bits_in_config: bool) -> None:
        """Where `dynamic` gives matrices their own widths, the config has none."""
        shapes = {"qweight": (64 * bits // 32, 32), "qzeros": (2, bits), "scales": (2, 32)}
        write_safetensors(
            tmp_path, {f"{Q}.{name}": torch.ones(size, dtype=torch.int32) for name, size in shapes.items()}
        )
        checkpoint = SafetensorsCheckpoint(
            tmp_path, TensorNames(), QuantizationConfig(bits if bits_in_config else None)
        )
        assert checkpoint.describe("layers.0.attn.q")[0] == f"gptq {bits} bit, groups of 32"

    def test_quantised_tensors_are_preferred_to_floats(self, tmp_path: Path) -> None:
        tensors = {f"{Q}.weight": torch.ones(4, 4), f"{Q}.q_weight": torch.ones(4, 4, dtype=torch.int32)}
        with pytest.raises(BadTensor, match="q_weight"):
            read_weight(open_checkpoint(tmp_path, tensors), "layers.0.attn.q", 4, 4)

    def test_a_quantised_head_comes_before_a_tied_one(self, tmp_path: Path) -> None:
        tensors = {
            "model.embed_tokens.weight": torch.ones(4, 4),
            "lm_head.q_weight": torch.ones(4, 4, dtype=torch.int32),
        }
        with pytest.raises(BadTensor, match="q_weight"):
            read_weight(open_checkpoint(tmp_path, tensors), "head", 4, 4, fallback="embed")


def test_the_index_tells_which_file_is_missing(tmp_path: Path) -> None:
    names = TensorNames(key_renames=(KeyRename("old.", "model.", prefix_only=True),))
    write_safetensors(tmp_path, {"x": torch.ones(1)}, "a.safetensors")
    write_index(tmp_path, {"old.norm.weight": "b.safetensors", "x": "a.safetensors"})
    with pytest.raises(MissingTensor, match=r"final_norm.*'b\.safetensors', which is not in the folder"):
        read_tensor(SafetensorsCheckpoint(tmp_path, names), "final_norm", (4,))


def test_describe_does_not_mark_a_tensor_as_used(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tmp_path, {"model.norm.weight": torch.ones(4), "lm_head.weight": torch.ones(4, 4)})
    assert checkpoint.has("final_norm")
    assert not checkpoint.has("embed")
    assert checkpoint.find("embed") is None
    assert checkpoint.describe("final_norm") == ("dense float32", 16)
    assert checkpoint.unused() == ["lm_head.weight", "model.norm.weight"]
    read_tensor(checkpoint, "final_norm", (4,))
    assert checkpoint.unused() == ["lm_head.weight"]


def test_real_files(fixtures_dir: Path) -> None:
    checkpoint = SafetensorsCheckpoint(fixtures_dir / "tiny-lm", TensorNames())
    info = checkpoint.files.info("model.embed_tokens.weight")
    vocab, hidden = info.shape
    embed = read_tensor(checkpoint, "embed", (vocab, hidden))
    assert same_bits(embed, checkpoint.files.view(info.name).float())
    head = read_weight(checkpoint, "head", hidden, vocab, fallback="embed")
    assert head.data.shape == (vocab, hidden)
    for folder in sorted(fixtures_dir.glob("*-exl2-*")):
        opened_exl2 = SafetensorsCheckpoint(folder, TensorNames())
        assert opened_exl2.describe("layers.0.attn.q")[0].startswith("exl2 ")
        cpu = torch.device("cpu")
        head_exl2 = opened_exl2.weight("head", hidden, vocab, bias=False, dtype=None, device=cpu)
        assert head_exl2.describe().startswith("exl2")


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
def test_on_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transposed: bool) -> None:
    monkeypatch.setattr(safetensors_checkpoint, "COPY_CHUNK", 1000)
    data, device = torch.randn(64, 48).bfloat16(), torch.device("cuda")
    names = TensorNames().with_locations(
        attn__q=TensorLocation(LAYER_PREFIX + "self_attn.q_proj", transposed=transposed)
    )
    checkpoint = open_checkpoint(tmp_path, {f"{Q}.weight": data.T.contiguous() if transposed else data}, names)
    weight = checkpoint.weight("layers.0.attn.q", 48, 64, bias=False, dtype=torch.float16, device=device)
    assert isinstance(weight, DenseWeight)
    assert weight.data.device.type == "cuda"
    assert same_bits(weight.data.cpu(), data.half())
